"""The files of names: whose they are, what crashes leave, disks that are full, and what is no such file."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faces import Thread
from support import raising
from test_names import named_child, new_writer
from test_names import names as names  # the fixture

from aioshm import HandleError, MessageQueue, NameTaken, OutOfDescriptors, QueueRestarted, SharedMemoryError
from aioshm.queue.names import files

pytestmark = pytest.mark.one_loop  # what is under test are files


def file_of(names: Path) -> Path:
    return names / "steps.queue"


async def leave_a_name(names: Path) -> bytes:
    """Let there be the file of a writer that is gone; return what is in it."""
    async with new_writer():
        content = file_of(names).read_bytes()
    file_of(names).touch(0o600)
    file_of(names).write_bytes(content)
    return content


async def works(names: Path, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Assert that the name is to be had and found, and that nothing is left of it."""
    async with new_writer() as writer, MessageQueue.attach("steps", 0) as reader:
        meanwhile()
        await writer.enqueue(1, 20)
        assert await reader.dequeue(20) == 1
    assert os.listdir(names) == []


async def test_the_file_and_its_directory_are_this_users_alone(names: Path) -> None:
    before = os.umask(0)
    try:
        async with new_writer() as writer:
            assert stat.S_IMODE(names.stat().st_mode) == 0o700
            assert os.listdir(names) == ["steps.queue"]
            assert stat.S_IMODE(file_of(names).stat().st_mode) == 0o600
            content = json.loads(file_of(names).read_bytes())
            assert (content["name"], content["pid"]) == ("steps", os.getpid())
            assert content["lifeline"] == writer.export_handle().lifeline
    finally:
        os.umask(before)


async def test_relative_directory_stays_where_it_is(names: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(names.parent)
    monkeypatch.setenv("AIOSHM_RUNTIME_DIR", names.name)
    await works(names, lambda: monkeypatch.chdir("/"))


async def test_a_writer_that_is_killed_between_two_steps(names: Path) -> None:
    async with named_child("die_at_every_step", "steps", str(names)) as running:
        # A name that is new is not taken over, and one that is not, not taken by a draft that gets there first.
        await running.says("killed 13")
        assert await running.end() == 0


async def test_a_name_that_changes_hands_while_it_is_taken(names: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between finding a stale file and locking the file, which has no name any more then."""
    await leave_a_name(names)
    path, lock, others = file_of(names), fcntl.flock, list[files.OwnFile]()

    def be_overtaken(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        path.unlink()
        other = files.create(path, b"{}")
        assert other is not None
        others.append(other)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", be_overtaken)
    assert files.take(path) is None
    others[0].release(remove=True)
    await works(names)


async def test_what_others_have_left_is_removed_and_what_they_have_is_not(names: Path) -> None:
    await leave_a_name(names)
    names.joinpath("text").write_text("somebody's own")
    async with new_writer(name="other"):
        async with new_writer(name="another"):
            assert sorted(os.listdir(names)) == ["another.queue", "other.queue", "text"]
            names.joinpath("directory.queue").mkdir()
            names.joinpath("mail.queue").write_text("somebody's own")
            async with new_writer(name="third"), MessageQueue.attach("other", 0) as reader:
                with pytest.raises(TimeoutError, match="does its event loop run"):  # it is found
                    await reader.dequeue(0.1)
    assert sorted(os.listdir(names)) == ["directory.queue", "mail.queue", "text"]


@pytest.mark.parametrize(
    ("step", "code"), [("open", errno.EROFS), ("write", errno.ENOSPC), ("link", errno.EDQUOT), ("rename", errno.EIO)]
)
async def test_a_directory_that_takes_no_files(
    names: Path, step: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = await leave_a_name(names) if step == "rename" else b""
    step_itself = getattr(os, step)

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        if step == "open" and not str(arguments[0]).endswith(".draft"):
            return step_itself(*arguments, **keywords)
        if step == "write" and os.readlink(f"/proc/self/fd/{arguments[0]}").startswith("anon"):
            return step_itself(*arguments, **keywords)  # an eventfd
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, refuse)
        with pytest.raises(SharedMemoryError, match=r"cannot write .*steps\.queue: .*AIOSHM_RUNTIME_DIR") as caught:
            new_writer()
        assert caught.value.errno == code
    if content:
        assert file_of(names).read_bytes() == content
    else:
        assert not names.exists() or os.listdir(names) == []
    await works(names)


async def test_a_directory_that_is_not_this_users_alone(names: Path) -> None:
    names.mkdir(mode=0o755)
    for make in (new_writer, lambda: MessageQueue.attach("steps", 0)):
        with pytest.raises(SharedMemoryError, match="must be a directory of this user with mode 0700"):
            make()
    names.rmdir()
    names.write_text("")
    for make in (new_writer, lambda: MessageQueue.attach("steps", 0)):
        with pytest.raises(SharedMemoryError, match=r"cannot make the directory|must be a directory"):
            make()


def spoil(path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a file one that is not private to this user; return the error's text."""
    if what == "mode":
        path.chmod(0o604)
        return "others may use it: its mode is 0604 instead of 0600"
    if what == "owner":
        stranger = os.geteuid() + 1
        monkeypatch.setattr(files, "_own_uid", lambda: stranger)
        return f"it belongs to uid {os.geteuid()}, this process runs as uid {stranger}"
    path.rename(path.with_name("elsewhere"))
    if what == "symlink":
        path.symlink_to(path.with_name("elsewhere"))
    elif what == "fifo":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir(0o700)
    return "is no regular file"


@pytest.mark.parametrize("what", ["mode", "owner", "symlink", "fifo", "directory"])
async def test_what_is_no_file_of_this_users_alone(names: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await leave_a_name(names)
    expected = spoil(file_of(names), what, monkeypatch)
    with pytest.raises(SharedMemoryError, match=rf"steps\.queue: .*{expected}.*remove it"):
        new_writer()
    async with MessageQueue.attach("steps", 0) as reader:
        with pytest.raises(HandleError, match=rf"steps\.queue .*{expected}.*remove it"):
            await reader.dequeue(20)


async def test_every_truncation_and_what_is_forged(names: Path) -> None:
    content = await leave_a_name(names)
    path = file_of(names)
    forged = [content[:length] for length in range(0, len(content), 97)]
    forged += [b"null", b"[" * 100_000, bytes(100), content.replace(b'"steps"', b'"other"'), b"{}" * (1 << 20)]
    for text in forged:
        path.write_bytes(text)
        async with MessageQueue.attach("steps", 0) as reader:
            with pytest.raises(HandleError, match=r"steps\.queue is (no|the) registration of .*remove it"):
                await reader.dequeue(20)
    await works(names)  # nobody has it, so the next writer does


async def test_stale_file_that_is_locked_for_a_moment_is_waited_for(names: Path) -> None:
    await leave_a_name(names)
    with file_of(names).open("r+") as other:  # a process that is closing, or checks whether the file is stale
        fcntl.flock(other, fcntl.LOCK_EX)
        asyncio.get_running_loop().run_in_executor(None, lambda: (time.sleep(0.02), fcntl.flock(other, fcntl.LOCK_UN)))
        async with new_writer():
            assert file_of(names).exists()


async def test_file_of_another_release_counts_while_its_writer_lives(names: Path) -> None:
    async with new_writer():
        content = json.loads(file_of(names).read_bytes())
        content["handle"]["version"] = 99
        changed = json.dumps(content).encode()
        file_of(names).write_bytes(changed)
        async with MessageQueue.attach("steps", 0) as reader:
            with pytest.raises(HandleError, match=r"steps\.queue: the handle has layout version 99"):
                await reader.dequeue(20)
        with pytest.raises(NameTaken):
            new_writer()
    file_of(names).touch(0o600)
    file_of(names).write_bytes(changed)
    async with MessageQueue.attach("steps", 0, timeout=0.02) as reader:
        with pytest.raises(TimeoutError, match="no other has come"):
            await reader.dequeue()


async def test_a_file_that_somebody_has_removed(names: Path) -> None:
    """Its writer closes without harm to the next one."""
    async with new_writer() as first:
        file_of(names).unlink()
        async with new_writer() as second, MessageQueue.attach("steps", 0) as reader:
            await first.aclose()
            assert file_of(names).exists()
            await second.enqueue(1, 20)
            assert await reader.dequeue(20) == 1


def test_of_many_writers_at_once_one_has_the_name(names: Path) -> None:
    for _ in range(5):
        names.mkdir(mode=0o700, exist_ok=True)
        file_of(names).touch(mode=0o600)  # whose writer is gone

        def try_it() -> MessageQueue | None:
            try:
                return new_writer()
            except NameTaken:
                return None

        threads = [Thread(try_it) for _ in range(6)]
        made = [queue for thread in threads if (queue := thread.result()) is not None]
        assert len(made) == 1
        asyncio.run(made[0].aclose())
        assert os.listdir(names) == []


async def test_who_lacks_a_descriptor_is_told_and_may_try_again(names: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = raising(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    with monkeypatch.context() as patch:
        patch.setattr(files, "_new_draft", refuse)
        with pytest.raises(OutOfDescriptors, match="a writer of the name 'steps'"):
            new_writer()
    async with MessageQueue.attach("steps", 0, reconnect=True) as reader:
        for told in (False, True):
            async with new_writer() as writer:
                with monkeypatch.context() as patch:
                    patch.setattr(files, "open_own", refuse)
                    with pytest.raises(OutOfDescriptors, match="a reader of the name 'steps'"):
                        await reader.dequeue(20)
                await writer.enqueue(1, 20)
                if told:
                    with pytest.raises(QueueRestarted):
                        await reader.dequeue(20)
                assert await reader.dequeue(20) == 1
