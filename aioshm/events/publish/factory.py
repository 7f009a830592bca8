"""Publishers by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar

from aioshm.arguments import check_plain
from aioshm.events.config import KVEventsConfig
from aioshm.events.publish.base import EventPublisher, NullEventPublisher
from aioshm.events.publish.publisher import ZmqEventPublisher
from aioshm.events.publish.threaded import ThreadedEventPublisher


def _zmq_publisher(**options: Any) -> EventPublisher:
    """Make the publisher that fits: on the running loop if there is one, else on the background loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return ThreadedEventPublisher(**options)
    return ZmqEventPublisher(**options)


class EventPublisherFactory:
    """Makes the publisher that a configuration names.

    ``"zmq"`` is a ``ZmqEventPublisher`` where a loop is running and a ``ThreadedEventPublisher`` elsewhere;
    ``"zmq-thread"`` is always the latter.
    """

    _registry: ClassVar[dict[str, Callable[..., EventPublisher]]] = {
        "null": NullEventPublisher,
        "zmq": _zmq_publisher,
        "zmq-thread": ThreadedEventPublisher,
    }

    @classmethod
    def register_publisher(cls, name: str, ctor: Callable[..., EventPublisher]) -> None:
        """Let configurations name ``ctor``, called with ``data_parallel_rank`` and their fields.

        Raises:
            KeyError: The name is taken.
            TypeError: ``ctor`` is a coroutine function.
        """
        if name in cls._registry:
            raise KeyError(f"publisher {name!r} is already registered")
        cls._registry[name] = check_plain("ctor", ctor)

    @classmethod
    def create(cls, config: KVEventsConfig | None, data_parallel_rank: int = 0) -> EventPublisher:
        """Make a publisher; the configuration itself stays as it is.

        Returns:
            A ``NullEventPublisher`` if the configuration is None, disabled or names ``"null"``. What any
            other resolved its configuration to is read with ``get_publisher_config()``.

        Raises:
            ValueError: Nobody registered that kind of publisher, or one of its options is wrong.
        """
        if config is None or not config.enable_kv_cache_events or config.publisher == "null":
            return NullEventPublisher(data_parallel_rank)
        options = asdict(config)
        del options["enable_kv_cache_events"]
        kind = options.pop("publisher")
        try:
            ctor = cls._registry[kind]
        except KeyError:
            known = ", ".join(sorted(cls._registry))
            raise ValueError(f"unknown event publisher {kind!r}: known are {known}") from None
        return ctor(data_parallel_rank=data_parallel_rank, **options)
