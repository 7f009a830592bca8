"""The options of an `EngineClient`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from aioshm.arguments import check_int
from aioshm.config import Options
from aioshm.engine.security.keys import EngineKeys
from aioshm.errors import EngineDead

OnEngineChange: TypeAlias = Callable[[int, EngineDead | None], object]
OnEngineDeath: TypeAlias = Literal["fail", "continue"]
Resubmit: TypeAlias = Literal["unstarted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """The options of an `EngineClient`.

    Attributes:
        client_index: Index of this client's input and output in the addresses.
        request_type: The type of requests; None: anything that MessagePack can encode, and arrays and tensors.
        output_type: The type that outputs are decoded to: any type that msgspec knows, or None for plain data. A plain
            array is read as vLLM's outputs are: the first item is the request id, the sixth the finish reason.
        options: ``max_message_bytes``, ``remote_timeout`` and ``secure`` apply; None: `Options.from_env`.
        keys: The keys of the deployment, for TCP; None: the keys of this process.
        secure: Whether TCP connections are encrypted and admit holders of keys only. Engines and the coordinator need
            the same setting. False for engines without keys, such as vLLM's: SECURITY.md lists the consequences.
        on_engine_death: ``"fail"``: the death of one engine fails everything. ``"continue"``: the other engines serve
            on, for engines that do not need each other. A later engine of the same rank is the replacement.
        resubmit: With ``"continue"``, ``"unstarted"`` sends requests of a dead engine that brought no output yet to
            other engines, to each engine once; None: they fail.
        on_engine_change: With ``"continue"``, called on the loop with the rank and the error when an engine dies, and
            with the rank and None when it is back.
        membership_address: With ``"continue"``, the address where the launching process publishes the present engines,
            see `CoreEngineLaunch.membership_address`. None: the engines passed to the client, plus `add_engine`, minus
            `remove_engine`.

    Raises:
        TypeError, ValueError: A value or a combination is invalid; the text names it.
    """

    client_index: int = 0
    # Payloads
    request_type: type[Any] | None = None
    output_type: Any = None
    options: Options | None = None
    # Security
    keys: EngineKeys | None = None
    secure: bool = True
    # Deaths of engines
    on_engine_death: OnEngineDeath = "fail"
    resubmit: Resubmit | None = None
    on_engine_change: OnEngineChange | None = None
    membership_address: str | None = None

    def __post_init__(self) -> None:
        check_int("client_index", self.client_index, minimum=0)
        if self.on_engine_death not in get_args(OnEngineDeath):
            raise ValueError(f"on_engine_death must be 'fail' or 'continue', not {self.on_engine_death!r}")
        given = self.resubmit
        if given is not None and (given not in get_args(Resubmit) or self.on_engine_death == "fail"):
            raise ValueError(f"resubmit must be None, or 'unstarted' with on_engine_death='continue', not {given!r}")
        if self.membership_address is not None and self.on_engine_death == "fail":
            raise ValueError("membership_address needs on_engine_death='continue', not 'fail'")
