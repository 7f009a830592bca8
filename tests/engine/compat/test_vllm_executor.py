"""vLLM's own executor and worker processes on this queue: where `make vllm` has fetched vLLM's Python files."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
WITHIN_S = 110

needs_vllm = pytest.mark.skipif(
    not (ROOT / ".venv-vllm" / ".ready").exists(), reason="vLLM's executor is not here; `make vllm` builds .venv-vllm"
)

DRIVER = """
import json, os, signal, sys, time
from benchmarks import vllm_engine
executor = vllm_engine.make_executor()
said = {"queue": type(executor.rpc_broadcast_mq).__module__}
said["answers"] = [type(queue).__module__ for queue in executor.response_mqs]
for number in range(200):
    vllm_engine.check(executor.collective_rpc("execute_model", args=(vllm_engine.scheduled(number),)))
said["steps"] = number + 1
futures = [executor.collective_rpc("cpu_seconds", non_block=True, unique_reply_rank=1) for _ in range(3)]
said["later"] = [future.result() > 0 for future in futures]
try:
    executor.collective_rpc("no_such_method", timeout=30)
except RuntimeError as error:
    said["failure"] = str(error)
try:
    executor.collective_rpc(time.sleep, args=(), timeout=0)
except TimeoutError as error:
    said["timeout"] = str(error)
from vllm.distributed.device_communicators import shm_broadcast
from aioshm.engine.compat.vllm import MessageQueue, differences
said["differences"] = differences(shm_broadcast.MessageQueue, MessageQueue)
pid = executor.workers[1].proc.pid
if said["queue"].startswith("aioshm"):
    os.kill(pid, signal.SIGKILL)
    try:
        for _ in range(100):
            executor.collective_rpc("execute_model", args=(vllm_engine.scheduled(0),))
    except Exception as error:
        said["death"] = type(error).__name__, str(error), pid
began = time.monotonic()
executor.shutdown()
said["shutdown_s"] = time.monotonic() - began
print("SAID " + json.dumps(said))
"""


def drive(replaced: bool) -> Any:
    done = subprocess.run(
        [PYTHON, "-c", DRIVER],
        cwd=ROOT,
        env={**os.environ, "AIOSHM_VLLM": str(int(replaced)), "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "20"},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert said, done.stderr[-4000:]
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(said[0].removeprefix("SAID "))


@needs_vllm
@pytest.mark.slow
def test_it_runs_on_this_queue_and_names_a_worker_that_dies() -> None:
    said = drive(True)
    ours = "aioshm.engine.compat.vllm"
    assert (said["queue"], said["answers"]) == (ours, [ours] * 2)
    assert said["steps"] == 200
    assert said["later"] == [True] * 3
    assert "no_such_method" in said["failure"]
    assert "timed out" in said["timeout"]
    name, text, pid = said["death"]
    assert name in {"PeerDied", "PeerClosed", "RuntimeError"}  # as the executor's own watch may be quicker
    assert str(pid) in text or name != "PeerDied"
    assert said["shutdown_s"] < 15, "a worker did not hear of its queues' shutdown"


@needs_vllm
@pytest.mark.slow
def test_its_own_queue_stays_unasked_and_is_the_one_that_was_recorded() -> None:
    said = drive(False)
    assert said["queue"] == "vllm.distributed.device_communicators.shm_broadcast"
    assert said["differences"] == []
