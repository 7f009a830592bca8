"""What dead processes leave behind is reaped by the process that adopts it, and nothing else is."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import orphanage
import pytest

from aioshm.process import adopt_orphans, proc, stopping

pytestmark = [
    pytest.mark.one_loop,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has pid namespaces and subreapers"),
]

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc"]


def unshared() -> list[str]:
    try:
        allowed = subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0
    except OSError:
        allowed = False
    if not allowed:
        pytest.skip("this process may not make a pid namespace")
    return UNSHARE


@pytest.mark.parametrize("way", ["process 1", "subreaper"])
def test_no_zombie_is_left_and_no_exit_code_is_stolen(tmp_path: Path, way: str) -> None:
    wrap = unshared() if way == "process 1" else []
    program = [sys.executable, orphanage.__file__, way, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([*wrap, *program], capture_output=True, text=True, timeout=110, env=environment)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"zombies": {}, "own": [orphanage.OWN_CODE]}


def test_systems_without_subreapers_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="darwin has no subreapers") as caught:
        adopt_orphans()
    assert caught.value.errno == errno.ENOTSUP
    assert not stopping.adopts_orphans()


def test_process_that_handles_child_exits_is_known() -> None:
    assert proc.handles_child_exits(os.getpid()) is False
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        assert proc.handles_child_exits(os.getpid()) is True
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert proc.handles_child_exits(1 << 22) is None


def test_zombies_of_a_process_are_listed() -> None:
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert proc.zombies_of(os.getpid()) == [child.pid]
