"""A local reader's end while it attaches to its queue and while it leaves; see ``local_reader.py`` for the rest."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import cast

from aioshm.codec import Codec
from aioshm.config import Options
from aioshm.errors import AioshmError, HandleError, PeerDied, QueueClosed
from aioshm.lifeline.address import peer_credentials
from aioshm.lifeline.dialer import Lifeline, dial, hang_up
from aioshm.lifeline.protocol import Hello
from aioshm.process.limits import naming_limits
from aioshm.process.state import SUSPECT_STATES, process_state
from aioshm.queue.annexes import AnnexReader
from aioshm.queue.attachment import Attachment
from aioshm.queue.end import NotAttached, deadline_after
from aioshm.queue.handle import Handle
from aioshm.queue.inquiry import findings
from aioshm.queue.reader_end import ReaderEnd
from aioshm.queue.stats import QueueStats
from aioshm.ring import RingReader
from aioshm.ring.atomics import ReaderCore
from aioshm.ring.layout import VERSION
from aioshm.wait.line import settle
from aioshm.wait.stall import seconds

logger = logging.getLogger("aioshm.queue")


class LocalEnd(ReaderEnd, ABC):
    """Dials when it is made, attaches when it is first awaited."""

    # Set when the writer has admitted this reader, before which nothing that uses them runs.
    _lifeline: Lifeline
    _ring: RingReader
    _annexes: AnnexReader
    _core: ReaderCore

    def __init__(self, handle: Handle, rank: int, codec: str | Codec | None, options: Options | None) -> None:
        self._core = cast(ReaderCore, NotAttached())
        self._attaching: asyncio.Task[None] | None = None
        self._going: asyncio.Future[None] | None = None
        self._news: asyncio.Future[None] | None = None  # what a message that waits for its annex listens to
        self._attachment: Attachment | None = None
        self._sock: socket.socket | None = None
        self._dialled_pid = 0  # the process that listens, as this one sees it
        super().__init__(handle, rank, codec, options)
        self._hello = Hello(VERSION, handle.queue_id, handle.token, rank, os.getpid())
        try:
            self._sock = dial(handle.lifeline, self._hello)
            if self._sock is not None:
                self._dialled_pid = peer_credentials(self._sock)[0]
        except BaseException:
            self._dismantled = True
            raise

    def _check_rank(self, handle: Handle, rank: int) -> None:
        handle.check_local()
        if rank not in handle.local_reader_ranks:
            elsewhere = () if handle.remote is None else handle.remote.ranks
            if not handle.n_reader:
                raise ValueError(f"rank must be a reader's, and the queue has none; not {rank}")
            raise ValueError(
                f"rank must be one of {tuple(sorted((*handle.local_reader_ranks, *elsewhere)))}, not {rank}"
            )

    # Attaching

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        await self._become_ready(deadline_after(timeout))

    async def _become_ready(self, deadline: float | None, cancel: asyncio.Event | None = None) -> None:
        self._start_attaching()
        assert self._going is not None
        try:
            await settle(self._going, deadline=deadline, cancel=cancel, stall=self._inquiry())
        except TimeoutError:
            raise TimeoutError(f"{self!r}: {self._why_not_ready()}") from None
        if not self._ready:
            self._check_usable()
            assert self._writer_gone is not None
            raise self._writer_gone()
        self._reopen()

    def _start_attaching(self) -> None:
        loop = self._bind()
        if self._attaching is None:
            # A task of its own, so that a caller that gives up and comes back finds it where it was.
            self._going = loop.create_future()
            self._attaching = loop.create_task(self._attach())
            self._attaching.add_done_callback(self._attached)

    async def _attach(self) -> None:
        sock, self._sock = self._sock, None
        with naming_limits(f"{self!r}"):
            self._attachment = attachment = await Attachment.make(
                self._handle, self._rank, self._hello, sock, self._options.prefault_bytes
            )
        self._lifeline, self._ring, self._annexes = attachment.lifeline, attachment.ring, attachment.annexes
        self._core = self._ring.core
        self._belong()
        self._begin()
        self._lifeline.start(self._on_go, self._wake, self._on_writer_gone, self._on_annex, self._on_annex_held_back)
        self._lifeline.prove()

    def _attached(self, attaching: asyncio.Task[None]) -> None:
        if attaching.cancelled():
            return
        error = attaching.exception()
        if error is not None and self._refusal is None:
            self._refuse(lambda: error if isinstance(error, AioshmError) else HandleError(f"cannot attach: {error}"))

    @abstractmethod
    def _begin(self) -> None:
        """Take note of the ring, which is there now."""

    # What the lifeline tells

    def _on_go(self) -> None:
        if self._poller is None:
            self._poller = self._new_poller(self._ring.parked, self._other_ends(), self._lifeline.bell)
        self._ready = True
        self._reopen()
        self._wake()
        self._going_changed()

    def _own_ring(self) -> RingReader:
        return self._ring

    def _own_ring_or_none(self) -> RingReader | None:
        return None if self._attachment is None or self._dismantled else self._ring

    def _other_ends(self) -> list[int]:
        others = self._ring.reader_pids()
        others[self._ring.reader] = self._lifeline.writer_pid  # in its place: this end is no other
        return others

    def _on_writer_gone(self, said_goodbye: bool) -> None:
        if said_goodbye or self._ring.writer_closed():  # its goodbye may have found no room in a full socket
            self._writer_gone = lambda: QueueClosed(f"{self!r}: the writer has closed the queue")
        else:
            pid = self._lifeline.welcome.pid
            self._writer_gone = functools.partial(PeerDied, -1, pid, "writer", f"queue {self._name}")
        self._wake()
        self._going_changed()

    def _on_annex(self, fd: int | None) -> None:
        self._annexes.arrived(fd)
        self._wake()  # where bells are bytes on the same socket, this one may have left no room for them
        self._going_changed()

    def _on_annex_held_back(self) -> None:
        self._wake()  # who waits for it, to say so
        self._going_changed()

    def _going_changed(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        if self._going is not None and not self._going.done():
            self._going.set_result(None)

    def _why_not_ready(self) -> str:
        if self._attachment is None:
            return "the writer does not answer: does its event loop run, in wait_until_ready()?"
        return "other readers are missing"

    # What is known of the writer

    def _progress(self) -> int:
        return self._core.seq

    def _ask_writer(self) -> bool:
        if self._attachment is None or process_state(self._lifeline.writer_pid) in SUSPECT_STATES:
            return False
        self._lifeline.ask()
        return True

    def _findings(self) -> tuple[int, str]:
        """Return at which level to log what is known of the writer, and the words."""
        lifeline = self._lifeline
        who, state = f"the writer (pid {lifeline.welcome.pid})", process_state(lifeline.writer_pid)
        return findings(who, state, lifeline.silent_s, self._handle.answers)

    def _report_not_ready(self, waited_s: float) -> None:
        about = ""
        if self._attachment is not None:
            about = f"; {self._findings()[1]}"
        elif self._dialled_pid:
            about = f" (it has pid {self._dialled_pid} and is {process_state(self._dialled_pid)})"
        logger.warning("%r: waited %s: %s%s", self, seconds(waited_s), self._why_not_ready(), about)

    # Telling about itself

    def _current_stats(self) -> QueueStats:
        if self._attachment is None:
            return self._stats(None, self._rank, 0, 0)
        return self._stats(self._ring, self._rank, self._ring.messages_written() - self._core.seq, 0)

    # Closing (see `End`)

    def _interrupt(self) -> None:
        self._wake()
        self._going_changed()

    def _say_goodbye(self) -> None:
        """Say nothing yet: once the writer knows, it overwrites what a block may still be reading."""

    def _dismantle(self) -> None:
        if self._attaching is not None and self._loop is not None:
            if not self._loop.is_closed():
                self._attaching.cancel()
            elif not self._attaching.done():
                with suppress(RuntimeError):  # it leaves the loop, which is closed
                    self._attaching.get_coro().close()
        if self._sock is not None:
            hang_up(self._sock)
        if self._attachment is not None:
            self._attachment.close()

    def _finished(self) -> bool:
        return self._attaching is None or self._attaching.done() or self._attaching.get_loop().is_closed()

    async def _finish(self) -> None:
        if self._attaching is not None and not self._finished():
            await asyncio.wait({self._attaching})

    def _abandon(self) -> None:
        if self._sock is not None:
            os.close(self._sock.detach())
        if self._attachment is not None:
            self._lifeline.abandon()
