"""Segments of both kinds: made, mapped, refused, grown, closed."""

from __future__ import annotations

import _posixshmem
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rings import fds, python

from aioshm.errors import HandleError, OutOfDescriptors, SharedMemoryError
from aioshm.ring import Layout, ShmRingBuffer
from aioshm.ring.segment import NAME_PREFIX, Segment, orphans

SHM = Path("/dev/shm")
GIB = 1 << 30
BACKINGS = pytest.mark.parametrize("backing", ["memfd", "named"])


class TestMemfd:
    def test_is_zeros_without_a_name_and_goes_with_its_mapping(self) -> None:
        before, named = fds(), set(SHM.glob(f"{NAME_PREFIX}*"))
        segment = Segment.create(10_000, "memfd")
        assert (segment.name, segment.size, len(segment.view)) == (None, 10_000, 10_000)
        assert os.readlink(f"/proc/self/fd/{segment.fd}").startswith("/memfd:")
        assert not {path for path in set(SHM.glob(f"{NAME_PREFIX}*")) - named if path.stat().st_size == 10_000}
        assert bytes(segment.view) == bytes(10_000)
        segment.view[9_999] = 1
        segment.unlink()
        for _ in range(2):
            segment.close()
        assert fds() == before

    def test_no_holder_can_change_its_size(self) -> None:
        segment = Segment.create(8192, "memfd")
        other = os.open(f"/proc/{os.getpid()}/fd/{segment.fd}", os.O_RDWR)
        for fd in (segment.fd, other):
            for resize in (0, 4096, 16384):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, resize)
        with pytest.raises(PermissionError):
            fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        os.close(other)
        segment.close()


class TestNamed:
    def test_has_a_file_of_its_users_own_whatever_the_umask(self) -> None:
        before = os.umask(0)
        try:
            segment = Segment.create(10_000, "named")
        finally:
            os.umask(before)
        assert segment.name is not None
        path = SHM / segment.name
        found = path.stat()
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert (found.st_uid, found.st_size) == (os.geteuid(), 10_000)
        assert found.st_blocks * 512 >= 10_000, "its space is reserved"
        assert segment.name.startswith(NAME_PREFIX)
        assert not os.get_inheritable(segment.fd)
        assert bytes(segment.view) == bytes(10_000)
        for _ in range(2):
            segment.close()
        assert not path.exists()

    def test_two_mappings(self) -> None:
        segment = Segment.create(8192, "named")
        assert segment.name is not None
        other = Segment.open(segment.name, 8192)
        other.view[4096:4101] = b"hello"
        assert bytes(segment.view[4096:4101]) == b"hello"
        other.close()
        assert (SHM / segment.name).exists(), "closing never unlinks somebody else's"
        other.unlink()
        assert (SHM / segment.name).exists(), "nor does unlinking"
        (SHM / segment.name).unlink()
        segment.close()
        assert segment.fd == -1

    def test_a_forked_child_does_not_unlink_its_parents(self) -> None:
        segment = Segment.create(4096, "named")
        assert segment.name is not None
        pid = os.fork()
        if pid == 0:
            segment.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert (SHM / segment.name).exists()
        segment.close()
        assert not (SHM / segment.name).exists()

    def test_another_users(self, monkeypatch: pytest.MonkeyPatch) -> None:
        segment = Segment.create(4096, "named")
        assert segment.name is not None
        before = fds()
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(HandleError, match=f"'{segment.name}' belongs to another user"):
            Segment.open(segment.name, 4096)
        assert orphans() == []
        monkeypatch.undo()
        assert fds() == before
        segment.close()


TEXT = (
    r"(?P<needed>[\d.]+) MiB of shared memory are needed, (?P<where>.*) has (?P<free>[\d.]+) MiB free: (?P<remedy>.+)"
)


def told(error: SharedMemoryError) -> tuple[float, str, float, str]:
    """Return what was needed, where, how much is free there, in MiB, and the remedy."""
    match = re.fullmatch(TEXT, error.strerror or "")
    assert match is not None, error
    return float(match["needed"]), match["where"], float(match["free"]), match["remedy"]


class TestTooLarge:
    @pytest.mark.parametrize(
        ("backing", "place", "remedies"),
        [
            ("memfd", "this machine", ["fewer or smaller chunks"]),
            ("named", "/dev/shm", ["fewer or smaller chunks", "--shm-size", "backing='memfd'"]),
        ],
    )
    def test_segment_larger_than_its_place_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, backing: Any, place: str, remedies: list[str]
    ) -> None:
        before = fds()
        monkeypatch.setattr(secrets, "token_hex", lambda _: f"too-large-{os.getpid()}")
        fs = os.statvfs(SHM)
        there_is = fs.f_blocks * fs.f_frsize
        if backing == "memfd":
            there_is = psutil.virtual_memory().total + psutil.swap_memory().total
        for too_much in (there_is + GIB, 2**70):
            with pytest.raises(SharedMemoryError) as caught:
                ShmRingBuffer(1, too_much, 1, slots=1, backing=backing)
            needed, where, free, remedy = told(caught.value)
            assert caught.value.errno == errno.ENOSPC
            assert needed == pytest.approx(too_much / 2**20, abs=1)
            assert where == place
            assert 0 <= free <= there_is / 2**20 + 0.1
            assert [text for text in remedies if text not in remedy] == []
        for sizes in ((10**5000, 1, 1), (1, 10**5000, 1)):
            with pytest.raises(SharedMemoryError, match="MiB of shared memory are needed"):
                ShmRingBuffer(*sizes, backing=backing)
        assert not (SHM / f"{NAME_PREFIX}too-large-{os.getpid()}").exists(), "a failed creation leaves no file"
        assert fds() == before

    def test_for_a_full_inode_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object, **__: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        used_up = SimpleNamespace(f_blocks=1 << 20, f_files=7, f_favail=0, f_bavail=1024, f_frsize=4096)
        another = ShmRingBuffer(1, 100, 1, slots=1, backing="named")  # cannot be looked at, either: no reason to fail
        monkeypatch.setattr(_posixshmem, "shm_open", full)
        monkeypatch.setattr(os, "statvfs", lambda _: used_up)
        with pytest.raises(SharedMemoryError, match=r"all of its 7 inodes are in use: .*nr_inodes") as caught:
            ShmRingBuffer(1, 1 << 20, 1, slots=1, backing="named")
        assert caught.value.errno == errno.ENOSPC
        assert "MiB free" not in str(caught.value)
        another.close()

    @pytest.mark.parametrize(
        ("number", "remedy"),
        [
            (errno.EMFILE, "ulimit -n"),
            (errno.ENFILE, "fs.file-max"),
            (errno.ENOSYS, "AIOSHM_BACKING=named"),
            (errno.EPERM, "AIOSHM_BACKING=named"),
            (errno.ENOMEM, "fewer or smaller chunks"),
        ],
    )
    def test_a_memfd_that_the_system_refuses(self, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str) -> None:
        kind = OutOfDescriptors if number in (errno.EMFILE, errno.ENFILE) else SharedMemoryError

        def refuse(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "memfd_create", refuse)
        with pytest.raises(kind, match=re.escape(remedy)) as caught:
            ShmRingBuffer(1, 1 << 20, 1, slots=1, backing="memfd")
        assert f"{Layout.of(1, 1 << 20, 1, 1).total_bytes / 2**20:.1f} MiB" in str(caught.value)

    @BACKINGS
    def test_for_this_process_limit(self, backing: str) -> None:
        out, err = python(
            "import resource, sys\n"
            "from aioshm.errors import SharedMemoryError\n"
            "from aioshm.ring import ShmRingBuffer\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
            "try: ShmRingBuffer(1, 2 << 20, 1, slots=1, backing=sys.argv[1])\n"
            "except SharedMemoryError as error: print(error)",
            backing,
        ).communicate()
        assert f"{Layout.of(1, 2 << 20, 1, 1).total_bytes / 2**20:.1f} MiB" in out, err
        assert backing not in out, "what failed is no remedy"


# Segments that grow, and that give their memory back


def no_memory(*_: object) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


@BACKINGS
def test_growing_keeps_the_content_and_adds_zeros(backing: Any) -> None:
    before = fds()
    segment = Segment.create(4096, backing, may_grow=True)
    segment.view[:] = b"x" * 4096
    assert segment.grow(100_000)
    assert (segment.size, len(segment.view), os.fstat(segment.fd).st_size) == (100_000, 100_000, 100_000)
    assert bytes(segment.view) == b"x" * 4096 + bytes(95_904)
    assert os.fstat(segment.fd).st_blocks * 512 >= (100_000 if backing == "named" else 4096), "a name reserves"
    segment.view[99_999] = 1
    with pytest.raises(SharedMemoryError, match="this machine"):
        segment.grow(psutil.virtual_memory().total + psutil.swap_memory().total + GIB)
    if backing == "memfd":
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, 4096)
    segment.close()
    assert fds() == before


def test_one_that_cannot_grow_or_be_mapped_again_stays_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed, growing = Segment.create(4096, "memfd"), Segment.create(4096, "memfd", may_grow=True)
    assert not fixed.grow(8192)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", no_memory)
        assert not growing.grow(8192)
    for segment in (fixed, growing):
        segment.view[4095] = 1
        assert (segment.size, len(segment.view)) == (4096, 4096)
        segment.close()


@BACKINGS
def test_one_that_cannot_be_mapped_at_all_is_a_typed_error(backing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fds()
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", no_memory)
        with pytest.raises(SharedMemoryError):
            Segment.create(4096, backing)
    assert fds() == before
