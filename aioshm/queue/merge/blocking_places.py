"""What a merge of queues whose calls block has of each of its readers; see ``blocking.py``."""

from __future__ import annotations

import asyncio

from aioshm.codec import cannot_decode
from aioshm.errors import AioshmError, QueueEmpty, RoleError
from aioshm.queue.blocking.held import Held
from aioshm.queue.ends.reading import ReadingEnd
from aioshm.ring import RingReader
from aioshm.ring.atomics import ELSEWHERE, NOTHING


class BlockingPlace:
    """One reader's place in the round.

    Attributes:
        rank: What its messages come with.
        held: The reader.
        reader: Its end.
        late: Whether its next message has not arrived completely.
        running: Whether the queue has not ended.
    """

    def __init__(self, rank: int, held: Held, reader: ReadingEnd) -> None:
        self.rank = rank
        self.held = held
        self.reader = reader
        self.late: bool = False
        self.running = True
        self._news: asyncio.Future[None] | None = None  # done when anything but a message has come since `poll`

    @property
    def ring(self) -> RingReader | None:
        """The ring that it reads, if it reads one by now."""
        return None if self.reader.gate.dismantled else self.reader.source.ring

    def poll(self) -> None:
        """Let the loop have a turn, and receive what is there, for the next call to return; sets ``late``.

        Raises:
            QueueEmpty: Another thread has its turn.
            AioshmError: As `dequeue_nowait`.
        """
        held = self.held
        if held.block is not None and held.turns.mine and not held.block.gone():
            raise RoleError(
                f"{self.reader!r}: called inside of a block that has its slot, and so would wait for itself"
            )
        held.run(lambda _: self._look(), busy=QueueEmpty)

    async def _look(self) -> None:
        reader, gate = self.reader, self.reader.gate
        if gate.ready:
            await asyncio.sleep(0)
        else:
            reader.start_attaching()
            await asyncio.sleep(0)
            gate.check_refusal()
            gone = reader.source.gone
            if not gate.ready and gone is not None:
                reader.go_on_after(gone())
        self._news = gate.news()
        gate.check_refusal()
        news = reader.tell()
        if news is not None:
            raise news
        if not gate.ready:
            return
        gate.new_turn()
        gate.reopen()
        source = reader.source
        gone = source.gone  # before looking: what was published before the writer went is then seen
        obj = reader.poll()
        self.late = obj is ELSEWHERE
        if obj is not NOTHING and not self.late:
            self.held.kept.append(obj)
        elif gone is not None:
            reader.go_on_after(source.lost() if self.late else gone())
            self.late = False

    def may_go_on(self) -> bool:
        """Return whether anything has come since `poll` looked: the loop may have read from its sockets afterwards."""
        return (self._news is not None and self._news.done()) or (not self.late and self.reader.may_go_on())

    def damage(self, error: Exception) -> AioshmError:
        """Return what is wrong with a message that could not be received."""
        if isinstance(error, AioshmError):
            return error.with_traceback(None)
        return cannot_decode(error, self.reader.codec_name)

    # For the round

    def reserve(self) -> bool:
        """Begin this thread's turn, if it is nobody's; another thread that waits for a message is told itself."""
        return not self.held.kept and self.held.turns.take_now()

    def release(self) -> None:
        """End this thread's turn."""
        self.held.end_turn()
