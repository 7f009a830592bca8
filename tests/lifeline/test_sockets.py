"""Addresses of sockets: directories, lengths of paths, the removal of leftovers."""

from __future__ import annotations

import errno
import gc
import os
import socket
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import descriptor_limit

from aioshm.config import Options
from aioshm.errors import SharedMemoryError
from aioshm.lifeline import sockets
from aioshm.lifeline.sockets import QuietSocket, new_address, peer_credentials, remove, sockaddr

QUEUE_ID = bytes(range(16))


def address_in(directory: Path) -> str:
    return new_address(Options(lifeline="directory", runtime_dir=str(directory)), QUEUE_ID, "lifeline")


def bound(path: Path, *, listening: bool, age_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    if listening:
        sock.listen(1)
    when = time.time() - age_s
    os.utime(path, (when, when))
    return sock


class TestAbstract:
    def test_addresses_name_queue_and_kind(self) -> None:
        options = Options(lifeline="abstract", runtime_dir="/nonexistent")
        address = new_address(options, QUEUE_ID, "lifeline")
        assert address == f"@aioshm-{QUEUE_ID.hex()}.lifeline"
        assert new_address(options, QUEUE_ID, "another") != address
        assert new_address(options, bytes(16), "lifeline") != address
        assert sockaddr(address) == "\0" + address[1:]


class TestDirectory:
    @pytest.mark.parametrize("umask", [0o000, 0o022])
    def test_is_made_for_its_user_alone_whatever_the_umask(self, base: Path, umask: int) -> None:
        directory = base / "a" / "b"
        before = os.umask(umask)
        try:
            address = address_in(directory)
        finally:
            os.umask(before)
        assert address == str(directory / f"{QUEUE_ID.hex()}.lifeline")
        assert sockaddr(address) == address
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert address_in(directory) == address

    def test_is_refused_if_others_get_in(self, base: Path) -> None:
        for mode in (0o755, 0o750, 0o770, 0o701, 0o710, 0o702, 0o777):
            base.chmod(mode)
            with pytest.raises(SharedMemoryError, match="must be a directory of this user with mode 0700") as caught:
                address_in(base)
            assert caught.value.errno == errno.EACCES
            assert "AIOSHM_RUNTIME_DIR" in str(caught.value)
        base.chmod(0o700)

    def test_is_refused_if_it_is_somebody_elses(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(SharedMemoryError, match="of this user"):
            address_in(base)

    def test_is_refused_if_it_is_a_link_or_no_directory(self, base: Path) -> None:
        (base / "real").mkdir(mode=0o700)
        (base / "link").symlink_to(base / "real")
        (base / "dangling").symlink_to(base / "nothing")
        (base / "file").write_text("mine")
        for path in (base / "link", base / "dangling", base / "file", base / "file" / "below"):
            with pytest.raises(SharedMemoryError, match="AIOSHM_RUNTIME_DIR"):
                address_in(path)

    def test_may_not_be_too_deep(self, base: Path) -> None:
        directory = base / ("d" * 80)
        with pytest.raises(SharedMemoryError, match="longer than 107 bytes: set AIOSHM_RUNTIME_DIR") as caught:
            address_in(directory)
        assert caught.value.errno == errno.ENAMETOOLONG

    @pytest.mark.parametrize("letter", ["d", "ä"])
    def test_may_be_as_deep_as_a_socket_can_be_bound(self, base: Path, letter: str) -> None:
        room = 107 - len(os.fsencode(address_in(base / "x"))) + 1
        directory = base / (letter * (room // len(letter.encode())))
        address = address_in(directory)
        assert 106 <= len(os.fsencode(address)) <= 107
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(sockaddr(address))
        remove(address)
        assert not os.path.exists(address)
        remove(address)
        with pytest.raises(SharedMemoryError, match="longer than"):
            address_in(directory.with_name(directory.name + letter))


class TestSweep:
    def test_leaves_one_that_is_bound_again_meanwhile(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def restart(path: Path) -> bool:
            found = is_bound(path)
            if not restarted:
                path.unlink()
                restarted.append(bound(path, listening=True, age_s=0))
            return found

        is_bound = sockets._is_bound
        monkeypatch.setattr(sockets, "_is_bound", restart)
        restarted: list[socket.socket] = []
        bound(base / "coordinator", listening=False, age_s=0).close()
        address_in(base)
        with restarted[0], socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(base / "coordinator"))
        address_in(base)
        assert not list(base.iterdir())

    def test_leaves_those_whose_backlog_is_full(self, base: Path) -> None:
        callers = []
        with bound(base / "busy", listening=True, age_s=3600):
            while True:
                caller = socket.socket(socket.AF_UNIX)
                caller.setblocking(False)
                callers.append(caller)
                try:
                    caller.connect(str(base / "busy"))
                except BlockingIOError:
                    break
            address_in(base)
            assert (base / "busy").exists()
        for caller in callers:
            caller.close()

    @pytest.mark.parametrize("age_s", [0.0, 3600.0, -3600.0])
    def test_leaves_those_that_do_not_listen_yet_whatever_the_clock_says(self, base: Path, age_s: float) -> None:
        with bound(base / "just-bound", listening=False, age_s=age_s) as sock:
            address_in(base)
            assert (base / "just-bound").exists()
            sock.listen(1)
            address_in(base)
            assert (base / "just-bound").exists()
        address_in(base)
        assert not (base / "just-bound").exists(), "a dead one goes at once, be it young"

    def test_leaves_what_is_no_socket(self, base: Path) -> None:
        (base / "file").write_text("mine")
        (base / "directory").mkdir()
        (base / "link").symlink_to("nothing")
        os.mkfifo(base / "fifo")
        for path in base.iterdir():
            os.utime(path, (0, 0), follow_symlinks=False)
        address_in(base)
        assert {path.name for path in base.iterdir()} == {"file", "directory", "link", "fifo"}

    def test_is_not_led_astray_by_a_link(self, base: Path) -> None:
        elsewhere = base / "elsewhere"
        elsewhere.mkdir()
        bound(elsewhere / "theirs", listening=True, age_s=3600).close()
        (base / "run").mkdir(mode=0o700)
        (base / "run" / "link").symlink_to(elsewhere / "theirs")
        address_in(base / "run")
        assert (elsewhere / "theirs").exists()


PROGRAM = """
import os, socket, sys
import zmq
from aioshm.config import Options
from aioshm.lifeline.sockets import HAVE_EVENTFD, Doorbell, new_address, sweep_leftovers
from aioshm.ring.segment import Segment
from aioshm.zeromq.sockets import Sockets

options = Options(lifeline="directory", backing="named", runtime_dir=sys.argv[1])
sockets = Sockets()
own = new_address(options, bytes(16), "engine")
sockets.add(sockets.context.socket(zmq.ROUTER)).bind(f"ipc://{own}")
if os.fork() == 0:
    socket.socket(socket.AF_UNIX).bind(new_address(options, bytes(16), "lifeline"))
    print(Segment.create(8192, "named").name, flush=True)
    os._exit(1)
os.wait()
if sys.argv[2] == "asked":
    sweep_leftovers()
    print(*os.listdir(sys.argv[1]))
"""


class TestLeftovers:
    @pytest.mark.parametrize("when", ["asked", "at exit"])
    def test_leftovers_of_a_dead_child_are_removed(self, base: Path, when: str) -> None:
        ran = subprocess.run([sys.executable, "-c", PROGRAM, str(base), when], capture_output=True, text=True)
        assert (ran.returncode, ran.stderr) == (0, "")
        segment, *listed = ran.stdout.split()
        assert not Path("/dev/shm", segment).exists()
        assert listed == ([f"{bytes(16).hex()}.engine"] if when == "asked" else [])
        assert os.listdir(base) == []


def test_socket_without_a_free_descriptor_raises_only_the_error_of_its_constructor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: unraisable.append(args.exc_value))
    with socket.socket() as lowest_free:
        limit = lowest_free.fileno()
    with descriptor_limit(limit):
        with pytest.raises(OSError, match="Too many open files"):
            QuietSocket(socket.AF_UNIX, socket.SOCK_STREAM)
        gc.collect()
    assert not unraisable


@pytest.mark.parametrize("uid", [0, 1000, 2**31, 2**32 - 2])
def test_uid_of_a_peer_has_32_bits_and_no_sign(uid: int) -> None:
    class Kernel:
        def getsockopt(self, *_: object) -> bytes:
            return struct.pack("=iII", 42, uid, 7)

    assert peer_credentials(Kernel()) == (42, uid)  # type: ignore[arg-type]
