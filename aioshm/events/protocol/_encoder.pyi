from typing import Any

class EventEncoder:
    def __new__(
        cls, kinds: tuple[tuple[type, bytes, tuple[str, ...], tuple[bytes, ...], int], ...]
    ) -> EventEncoder: ...
    def encode(self, ts: float, events: list[Any], rank: int | None) -> bytes | None: ...
