"""A supervisor that is killed at any moment of an actor's restart leaves no process anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from managed import marked

ray: Any = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.slow,  # each of them takes seconds to start its actor
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc"),
]

GONE_S = 2.0  # at most, on a machine that has nothing else to do
PATIENCE_S = 30.0


@pytest.mark.usefixtures("ray_cluster", "runtime_dir")
@pytest.mark.parametrize("moment", ["0", "starting"])
def test_at_a_moment(moment: str) -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, str(Path(__file__).with_name("ray_supervisor.py"))]
    process = subprocess.Popen(
        [*command, ray.get_runtime_context().gcs_address, moment],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "AIOSHM_TEST_MARK": mark},
    )
    try:
        assert process.stdout is not None
        assert b"now\n" in iter(process.stdout.readline, b""), "Ray may say something before"
        assert len(marked(mark)) >= (3 if moment == "starting" else 2)  # it, the coordinator, the new actor
        process.kill()
        killed = time.monotonic()
        while left := marked(mark):
            assert time.monotonic() < killed + PATIENCE_S, left
            time.sleep(0.005)
        assert time.monotonic() - killed < 5 * GONE_S  # others may use this machine
    finally:
        process.kill()
        process.communicate()
    # Ray may have begun to start a process for the next actor: that gets no actor, gives its room back, and ends.
    deadline = time.monotonic() + PATIENCE_S
    while (late := marked(mark)) or ray.available_resources().get("CPU") != ray.cluster_resources().get("CPU"):
        assert not any("EngineCoreActor" in each for each in late), late
        assert time.monotonic() < deadline, late
        time.sleep(0.005)
