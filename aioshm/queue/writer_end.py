"""The writer's end of a queue while its readers attach and while it closes; see ``writer.py`` for the rest."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from abc import ABC
from collections.abc import Sequence

from aioshm.codec import Codec, get_codec
from aioshm.codec.frames import plain
from aioshm.codec.raw import RawCodec
from aioshm.config import Options, check_int
from aioshm.queue.annexes import SECRET_BYTES, Annexes
from aioshm.queue.base import MAX_CHUNK_BYTES, MAX_CHUNKS
from aioshm.queue.end import End, deadline_after
from aioshm.queue.handle import Handle, host_id
from aioshm.queue.roster import Roster
from aioshm.queue.stats import QueueStats
from aioshm.ring import ShmRingBuffer
from aioshm.ring.atomics import WriterCore
from aioshm.ring.layout import VERSION
from aioshm.wait.address import new_address
from aioshm.wait.lifeline import LifelineListener
from aioshm.wait.line import settle
from aioshm.wait.protocol import Welcome

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
    ) -> None:
        ranks = _checked_ranks(n_reader, n_local_reader, local_reader_ranks)
        if connect_ip is not None and not isinstance(connect_ip, str):
            raise TypeError(f"connect_ip must be a string or None, not {connect_ip!r}")
        self._connect_ip = connect_ip
        self._codec = get_codec(codec)
        self._encode = self._codec.encode
        self._code = self._codec.code
        options = Options.from_env() if options is None else options
        if not isinstance(options, Options):
            raise TypeError(f"options must be an Options, not {options!r}")
        self._chunk_bytes = max_chunk_bytes
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._secret = secrets.token_bytes(SECRET_BYTES)
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
        self._buffer.prefault(options.prefault_bytes, write=True)
        self._ring = self._buffer.writer()
        self._ring.set_writer_state(closed=False, pid=os.getpid())
        self._roster = Roster(
            queue_id.hex()[:8], ranks, self._ring, options.on_reader_death, self._welcome, self._changed
        )
        self._core = self._ring.core
        self._core.bind(self._encode, plain(self._code), isinstance(self._codec, RawCodec), self._roster.ring_bells)
        self.send = self._core.send
        self._annexes = Annexes(self._ring, self._roster.hand_over)
        self._listening = False
        self._change: asyncio.Future[None] | None = None
        super().__init__(queue_id, options)

    # Attaching

    def export_handle(self) -> Handle:
        sizes = self._ring.layout
        return Handle(
            version=VERSION,
            queue_id=self._buffer.queue_id,
            token=self._token,
            host=host_id(),
            uid=os.geteuid(),
            n_reader=sizes.n_reader,
            local_reader_ranks=self._roster.ranks,
            max_chunk_bytes=sizes.max_chunk_bytes,
            max_chunks=sizes.max_chunks,
            lifeline=self._listener.address,
            segment=self._segment_name,
            codec=self._codec.name,
            connect_ip=self._connect_ip,
            options=self._options,
        )

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        await self._become_ready(deadline_after(timeout))

    async def _become_ready(self, deadline: float | None) -> None:
        loop = self._bind()
        if not self._listening:
            self._listening = True
            self._listener.start(loop, self._roster)
        stall = self._stall(self._report_missing)
        try:
            while not self._roster.complete:
                if self._change is None or self._change.done():
                    self._change = loop.create_future()
                await settle(self._change, deadline=deadline, stall=stall)
                self._check_usable()  # a reader may have died
        except TimeoutError:
            raise TimeoutError(f"{self!r}: not attached yet: {self._roster.missing()}") from None
        if not self._ready:
            self._ready = True
            self._poller = self._new_poller(self._ring.parked, self._roster.pids())
            self._buffer.unlink()  # everybody has it mapped
            self._roster.go()
            logger.debug("%r: %d readers", self, self._roster.alive)
            self._reopen()

    def _changed(self) -> None:
        """Look again at the readers and at the ring."""
        if self._roster.trouble is not None and self._refusal is None:
            self._refuse(self._roster.trouble)
        else:
            self._interrupt()

    def _welcome(self) -> tuple[Welcome, list[int]]:
        by_descriptor = self._segment_name is None
        welcome = Welcome(os.getpid(), self._secret, by_descriptor, self._listener.bell is not None)
        return welcome, [self._buffer.fd] if by_descriptor else []

    # Reporting

    def _report_missing(self) -> None:
        logger.warning(
            "%r: waited %g s for readers to attach: %s", self, self._options.stall_warning_s, self._roster.missing()
        )

    def _report_laggards(self, wanted: int) -> None:
        logger.warning(
            "%r: waited %g s to write message %d: not read by %s",
            self,
            self._options.stall_warning_s,
            self._ring.seq,
            self._roster.laggards(wanted),
        )

    def _current_stats(self) -> QueueStats:
        return self._stats(self._ring, -1, self._roster.backlog(), self._roster.alive)

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


def _checked_ranks(n_reader: int, n_local_reader: int, ranks: Sequence[int] | None) -> tuple[int, ...]:
    check_int("n_reader", n_reader, minimum=1)
    check_int("n_local_reader", n_local_reader, minimum=0)
    if n_local_reader != n_reader:
        raise ValueError(
            f"n_local_reader is {n_local_reader} and n_reader {n_reader}: this release has no readers on other hosts"
        )
    checked = tuple(range(n_local_reader) if ranks is None else ranks)
    if len(checked) != n_local_reader or len(set(checked)) != n_local_reader:
        raise ValueError(f"local_reader_ranks must be {n_local_reader} different ranks, not {ranks!r}")
    for rank in checked:
        if check_int("a rank in local_reader_ranks", rank, minimum=0) >= n_reader:
            raise ValueError(f"local_reader_ranks must be below n_reader ({n_reader}), not {rank}")
    return checked
