"""The interface of publishers, the publisher that does nothing, and the base of those over ZeroMQ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from aioshm.events.config import CLOSE_TIMEOUT_S, KVEventsConfig, for_rank
from aioshm.events.protocol.messages import EventBatch
from aioshm.events.protocol.wire import END_SEQ
from aioshm.events.publish.core import PublisherCore
from aioshm.events.stats import PublisherStats
from aioshm.zeromq.hosts import connectable


class EventPublisher(ABC):
    """Takes event batches and sends them, in order, to all subscribers.

    Every data-parallel rank has its own publisher, which writes its rank into the batches that name none.
    """

    def __init__(self, data_parallel_rank: int = 0) -> None:
        if isinstance(data_parallel_rank, bool) or not isinstance(data_parallel_rank, int):
            raise TypeError(f"data_parallel_rank must be an int, not {type(data_parallel_rank).__name__}")
        if data_parallel_rank < 0:
            raise ValueError(f"data_parallel_rank must not be negative, not {data_parallel_rank}")
        self._data_parallel_rank = data_parallel_rank

    END_SEQ: ClassVar[bytes] = END_SEQ
    """What stands for the number in the frame that ends a replay."""

    SHUTDOWN_TIMEOUT: ClassVar[float] = CLOSE_TIMEOUT_S
    """How long ``shutdown`` lets go out what is queued."""

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
        """Return the endpoint of one rank: the port moves up by it, and names get a suffix; None stays None.

        Raises:
            ValueError: The endpoint cannot be one, or the port would lie above 65535.
        """
        return for_rank(endpoint, data_parallel_rank) if endpoint else endpoint

    @abstractmethod
    def publish(self, events: EventBatch) -> None:
        """Number the batch and see to it that it goes out; never waits for the network."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send what is queued, then close; calling it again does nothing."""

    def get_publisher_config(self) -> KVEventsConfig | None:
        """Return what this publisher really runs with, or None if it has no configuration."""
        return None


class NullEventPublisher(EventPublisher):
    """Drops everything: what runs when events are switched off."""

    def publish(self, events: EventBatch) -> None:
        """Do nothing."""

    async def apublish(self, events: EventBatch, timeout: float | None = None) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""


class CorePublisher(EventPublisher):
    """A publisher that sends through a `PublisherCore`."""

    _core: PublisherCore

    @property
    def endpoint(self) -> str:
        """Where batches really go out: rank added, port 0 replaced by the port that was bound."""
        return self._core.ends.endpoint

    @property
    def connect_endpoint(self) -> str:
        """``endpoint`` for subscribers: with this host's own address where all of its addresses are bound."""
        return connectable(self.endpoint)

    @property
    def replay_endpoint(self) -> str | None:
        """Where replay requests are really served, or None."""
        return self._core.ends.replay_endpoint

    @property
    def connect_replay_endpoint(self) -> str | None:
        """``replay_endpoint`` for subscribers, or None."""
        return None if self.replay_endpoint is None else connectable(self.replay_endpoint)

    def get_publisher_config(self) -> KVEventsConfig:
        """Return the configuration with the endpoints that are really in use."""
        return self._core.config

    def stats(self) -> PublisherStats:
        """Return the counters up to now."""
        return self._core.stats()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self.endpoint}>"
