"""Which publisher a configuration gets."""

from __future__ import annotations

from typing import Any

import pytest

from aioshm.events import (
    EventBatch,
    EventPublisher,
    EventPublisherFactory,
    KVEventsConfig,
    NullEventPublisher,
    ThreadedEventPublisher,
    ZmqEventPublisher,
)

from ..helpers import ANY, batch


class TestFactory:
    @pytest.mark.parametrize("config", [None, KVEventsConfig(), KVEventsConfig(True, "null")])
    def test_nothing_to_publish(self, config: KVEventsConfig | None) -> None:
        publisher = EventPublisherFactory.create(config)
        assert isinstance(publisher, NullEventPublisher)
        publisher.publish(batch(0))
        publisher.shutdown()
        assert publisher.get_publisher_config() is None

    def test_defaults_are_the_fields(self) -> None:
        config = KVEventsConfig(enable_kv_cache_events=True)
        assert (config.publisher, config.endpoint, config.replay_endpoint) == ("zmq", "tcp://*:5557", None)
        assert (config.buffer_steps, config.hwm, config.max_queue_size, config.topic) == (
            10_000,
            100_000,
            100_000,
            "",
        )
        assert KVEventsConfig().publisher == "null"

    async def test_on_a_loop(self, nothing_left: None) -> None:
        config = KVEventsConfig(True, endpoint="tcp://127.0.0.1:*", replay_endpoint=ANY, topic="kv")
        before = repr(config)
        publisher = EventPublisherFactory.create(config, 2)
        assert isinstance(publisher, ZmqEventPublisher)
        assert repr(config) == before
        resolved = publisher.get_publisher_config()
        assert resolved.endpoint == publisher.endpoint
        assert resolved.topic == "kv"
        assert ":*" not in resolved.endpoint
        await publisher.aclose()

    def test_without_a_loop(self) -> None:
        publisher = EventPublisherFactory.create(KVEventsConfig(True, endpoint="inproc://without-a-loop"))
        assert isinstance(publisher, ThreadedEventPublisher)
        publisher.shutdown()

    def test_names(self) -> None:
        class Mine(EventPublisher):
            def __init__(self, data_parallel_rank: int = 0, **options: Any) -> None:
                super().__init__(data_parallel_rank)
                self.options = options

            def publish(self, events: EventBatch) -> None: ...

            def shutdown(self) -> None: ...

        with pytest.raises(ValueError, match=r"unknown event publisher 'kafka': known are null, zmq"):
            EventPublisherFactory.create(KVEventsConfig(True, "kafka"))
        with pytest.raises(KeyError, match="zmq"):
            EventPublisherFactory.register_publisher("zmq", Mine)
        EventPublisherFactory.register_publisher("test-mine", Mine)
        try:
            made = EventPublisherFactory.create(KVEventsConfig(True, "test-mine", topic="t"), 4)
        finally:
            EventPublisherFactory._registry.pop("test-mine")
        assert isinstance(made, Mine)
        assert made.options["topic"] == "t"
