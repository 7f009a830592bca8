"""The same readers on the blocking face."""

from __future__ import annotations

import asyncio
import signal
import threading

from aioshm import AioshmError, PeerClosed, QueueRestarted
from aioshm.blocking import MessageQueue
from tools.campaign.queues import MOST_AT_ONCE, content, note_messages, reader, stays_for
from tools.campaign.stage import Part

_LOOK_S = 0.5


async def read(part: Part) -> None:
    """Read in a thread without a loop, until the end."""
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    await asyncio.to_thread(_read, part, told)


def _read(part: Part, told: threading.Event) -> None:
    try:
        queue = reader(part, MessageQueue)
    except FileNotFoundError:
        return
    left = stays_for(part)
    try:
        with queue:
            while not told.is_set() and (left is None or left > 0):
                try:
                    if part.chance.random() < 0.5:
                        messages = [queue.dequeue(_LOOK_S)]
                    else:
                        messages = queue.dequeue_many(MOST_AT_ONCE, _LOOK_S)
                except QueueRestarted:
                    part.journal.note("restarted")
                    continue
                except TimeoutError:
                    continue
                note_messages(part, [content(received) for received in messages])
                left = None if left is None else left - len(messages)
            part.journal.note("end", "told" if told.is_set() else "left")
    except PeerClosed:
        part.journal.note("end", "closed")
    except AioshmError as error:
        part.journal.note("end", type(error).__name__)
        part.journal.failed(error)
