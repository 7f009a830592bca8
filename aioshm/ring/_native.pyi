from contextlib import AbstractAsyncContextManager
from typing import Any

from aioshm.ring._portable import ELSEWHERE as ELSEWHERE
from aioshm.ring._portable import NOTHING as NOTHING
from aioshm.ring._portable import Calls as Calls
from aioshm.ring._portable import ReaderCore as ReaderCore
from aioshm.ring._portable import WriterCore as WriterCore
from aioshm.ring._portable import memory_fence as memory_fence
from aioshm.ring._portable import timerfd_create as timerfd_create
from aioshm.ring._portable import timerfd_settime as timerfd_settime

class LoanKind:
    """What loans of arrays of one kind have in common; see `aioshm.queue.ends.lending`."""

    def __init__(
        self,
        core: WriterCore,
        windows: dict[int, Any],
        array: tuple[Any, Any, Any, Any],
        tail: bytes,
        numbers: tuple[int, int, int, int, int, int],
        open_slowly: Any,
        hand_over: Any,
        reserve: Any,
        /,
    ) -> None: ...
    def block(self) -> AbstractAsyncContextManager[Any]: ...
