"""The writer's end of a queue while its readers attach and while it closes; see ``writer.py`` for the rest."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
from abc import ABC
from collections.abc import Callable, Sequence
from typing import Any

from aioshm.codec import Codec, Encoded, get_codec
from aioshm.codec.frames import plain
from aioshm.codec.raw import RawCodec
from aioshm.config import Options
from aioshm.errors import AioshmError, PeerDied, QueueClosed
from aioshm.lifeline.address import check_ip, new_address
from aioshm.lifeline.listener import LifelineListener
from aioshm.lifeline.protocol import Welcome
from aioshm.process.limits import naming_limits, shortage
from aioshm.queue.annexes import SECRET_BYTES, Annexes
from aioshm.queue.base import MAX_CHUNK_BYTES, MAX_CHUNKS
from aioshm.queue.end import End, deadline_after
from aioshm.queue.handle import Handle, RemoteAddress, host_id
from aioshm.queue.ranks import checked_ranks
from aioshm.queue.roster import Roster
from aioshm.queue.stats import QueueStats
from aioshm.ring import ShmRingBuffer
from aioshm.ring.atomics import WriterCore
from aioshm.ring.layout import VERSION
from aioshm.wait.line import settle
from aioshm.wait.stall import Stall, seconds

logger = logging.getLogger("aioshm.queue")

TOKEN_BYTES = 32


class WriterEnd(End, ABC):
    """Makes the ring, admits the readers, notices what becomes of them."""

    _side = "writer"
    _core: WriterCore

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        max_chunks: int = MAX_CHUNKS,
        connect_ip: str | None = None,
        *,
        codec: str | Codec = "pickle",
        options: Options | None = None,
        remote_reader_ranks: Sequence[int] | None = None,
    ) -> None:
        ranks, remote_ranks = checked_ranks(n_reader, n_local_reader, local_reader_ranks, remote_reader_ranks)
        self._connect_ip = check_ip(connect_ip)
        self._n_reader = n_reader
        self._codec = get_codec(codec)
        self._encode = self._codec.encode if n_reader else _checked_only(self._codec)
        self._code = self._codec.code
        options = Options.from_env() if options is None else options
        if not isinstance(options, Options):
            raise TypeError(f"options must be an Options, not {options!r}")
        self._chunk_bytes = max_chunk_bytes
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        with naming_limits("a writer"):
            self._buffer = ShmRingBuffer(n_local_reader, max_chunk_bytes, max_chunks, backing=options.backing)
            try:
                queue_id = self._buffer.queue_id
                self._listener = LifelineListener(
                    new_address(options, queue_id, "lifeline"), queue_id, self._token, backlog=max(64, n_local_reader)
                )
            except BaseException:
                self._buffer.close()
                raise
        self._segment_name = self._buffer.name
        self._buffer.prefault(options.prefault_bytes if n_local_reader else 0, write=True)
        self._ring = self._buffer.writer()
        self._ring.set_writer_state(closed=False, pid=os.getpid())
        self._roster = Roster(
            queue_id.hex()[:8], ranks, self._ring, options.on_reader_death, self._welcome, self._changed
        )
        self._core = self._ring.core
        as_it_is = isinstance(self._codec, RawCodec) and n_reader > 0
        self._core.bind(self._encode, plain(self._code), as_it_is, self._roster.ring_bells)
        self.send = self._core.send
        self._annexes = Annexes(self._ring, self._roster.hand_over)
        self._listening = False
        self._wanted = 1  # slots, by the call that waits
        self._writing: Stall | None = None
        self._writing_seq = -1
        self._change: asyncio.Future[None] | None = None
        super().__init__(queue_id, options)
        try:
            self._open_remote(remote_ranks)
        except BaseException:
            self._dismantled = True
            WriterEnd._dismantle(self)
            raise

    def _open_remote(self, ranks: tuple[int, ...]) -> None:
        """Prepare for the readers on other hosts: here, there are none."""

    # Attaching

    def export_handle(self) -> Handle:
        sizes = self._ring.layout
        return Handle(
            version=VERSION,
            queue_id=self._buffer.queue_id,
            token=self._token,
            host=host_id(),
            uid=os.geteuid(),
            n_reader=self._n_reader,
            local_reader_ranks=self._roster.ranks,
            max_chunk_bytes=sizes.max_chunk_bytes,
            max_chunks=sizes.max_chunks,
            lifeline=self._listener.address,
            segment=self._segment_name,
            codec=self._codec.name,
            connect_ip=self._connect_ip,
            remote=self._remote_address(),
            options=self._options,
            answers="in calls" if self._blocks else "always",
        )

    def _remote_address(self) -> RemoteAddress | None:
        """Return what the handle tells remote readers."""
        return None

    def tell_parked(self) -> None:
        self._roster.ring_bells()

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        await self._become_ready(deadline_after(timeout))

    async def wait_for_these_readers(self) -> None:
        """Wait until every reader is attached, where none that leaves can be replaced.

        Raises:
            PeerDied, QueueClosed: One of them has died, or left.
        """
        await self._become_ready(None, replaceable=False)

    async def _become_ready(self, deadline: float | None, *, replaceable: bool = True) -> None:
        loop = self._bind()
        if not self._listening:
            self._listening = True
            self._listen(loop)
        stall = self._stall(self._report_missing)
        try:
            while not (self._complete() and self._all_there()):
                if self._departed():
                    self._check_left(replaceable)
                    if self._complete():
                        continue
                await self._news(deadline, stall)
                self._check_usable()
        except TimeoutError:
            missing = f"{self!r}: not attached yet: {', '.join(self._missing())}"
            raise self._listener.lacking or shortage(missing) or TimeoutError(missing) from None
        if not self._ready:
            self._ready = True
            self._poller = self._new_poller(self._ring.parked, self._roster.pids(), self._listener.bell)
            self._buffer.unlink()  # everybody has it mapped
            self._go()
            logger.debug("%r: %d readers", self, self._alive())
            self._reopen()

    async def _news(self, deadline: float | None, stall: Stall) -> None:
        """Wait until something has changed."""
        if self._change is None or self._change.done():
            assert self._loop is not None
            self._change = self._loop.create_future()
        await settle(self._change, deadline=deadline, stall=stall)

    def _changed(self) -> None:
        """Look again at the readers and at the ring."""
        trouble = self._trouble()
        if trouble is None and self._n_reader and self._listening and self._complete() and not self._alive():
            trouble = functools.partial(QueueClosed, f"queue {self._name}: every reader has left")
        if trouble is not None and self._refusal is None:
            self._refuse(trouble)
        else:
            self._interrupt()

    # The readers, wherever they are

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        self._listener.start(loop, self._roster)

    def _complete(self) -> bool:
        """Return whether no reader is waited for any more."""
        return self._roster.complete

    def _all_there(self) -> bool:
        """Return whether it is still so, if readers are asked that have gone since the loop has looked."""
        self._listener.look()
        return self._complete()

    def _alive(self) -> int:
        """Return how many readers are attached."""
        return self._roster.alive

    def _missing(self) -> list[str]:
        """Name the readers that are not attached yet."""
        return self._roster.missing()

    def _departed(self) -> dict[int, str]:
        """Return what became of the readers that were there before all were ready, and are not replaced."""
        return self._roster.left

    def _take_death(self) -> PeerDied | None:
        """Return, once, who of them has died."""
        return self._roster.take_death()

    def _check_left(self, replaceable: bool) -> None:
        """Raise, once, if a reader has died before all were ready; and if one has left that nobody can replace."""
        self._listener.look()  # whoever has come in its place may be at the door
        died = self._take_death()
        if died is not None:
            raise died
        if self._departed() and not replaceable:
            left = ", ".join(f"rank {rank} ({what})" for rank, what in self._departed().items())
            raise QueueClosed(f"{self!r}: not all will come: {left}")

    def _laggards(self, slots: int = 1) -> str:
        """Name the readers that so many messages have to wait for."""
        return ", ".join(self._roster.laggards(slots))

    def _trouble(self) -> Callable[[], AioshmError] | None:
        """Return what makes the error that this end has to raise from now on, if any."""
        return self._roster.trouble

    def _go(self) -> None:
        """Tell every reader that all are ready."""
        self._roster.go()

    def _welcome(self) -> tuple[Welcome, list[int]]:
        by_descriptor = self._segment_name is None
        welcome = Welcome(os.getpid(), self._secret, by_descriptor, self._listener.bell is not None)
        return welcome, [self._buffer.fd] if by_descriptor else []

    # Reporting

    def _report_missing(self, waited_s: float) -> None:
        logger.warning(
            "%r: waited %s for readers to attach: %s",
            self,
            seconds(waited_s),
            ", ".join(self._missing()),
        )

    def _report_laggards(self, waited_s: float) -> None:
        logger.warning(
            "%r: waited %s to write message %d: not read by %s",
            self,
            seconds(waited_s),
            self._ring.seq,
            self._laggards(self._wanted),
        )

    def _stall_of_writing(self, wanted: int) -> Stall:
        """Return what reports that the next message cannot be written; it goes on from an earlier call that gave up."""
        self._wanted = wanted
        if self._writing is not None and self._writing_seq == self._ring.seq:
            self._writing.resume()
        else:
            self._writing, self._writing_seq = self._stall(self._report_laggards), self._ring.seq
        return self._writing

    def _current_stats(self) -> QueueStats:
        return self._stats(self._ring, -1, self._roster.backlog(), self._alive())

    # Closing (see `End`)

    def _interrupt(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)
        self._wake()

    def _say_goodbye(self) -> None:
        self._ring.set_writer_state(closed=True, pid=os.getpid())
        self._listener.close()

    def _dismantle(self) -> None:
        self._listener.close()
        self._annexes.close()
        self._ring.close()
        self._buffer.close()

    def _abandon(self) -> None:
        self._listener.abandon()


def _checked_only(codec: Codec) -> Callable[[Any], Encoded]:
    """Return what encodes a message of a queue without readers: errors are those of any queue, and nothing is kept."""

    def encode(obj: Any) -> Encoded:
        codec.encode(obj)
        return b""

    return encode
