"""Constructors that are called with a wrong keyword: a `TypeError`, and no error of a destructor."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest

from aioshm import MessageQueue, blocking
from aioshm.engine import (
    CoreEngineActorManager,
    CoreEngineProcManager,
    EngineClient,
    EngineStartupCoordinator,
    EngineSupervisor,
    WorkerGroup,
)
from aioshm.engine import blocking as blocking_engine
from aioshm.events import EventSubscriber, ThreadedEventPublisher, ZmqEventPublisher


@pytest.mark.parametrize(
    "constructor",
    [
        MessageQueue,
        blocking.MessageQueue,
        WorkerGroup,
        EngineClient,
        blocking_engine.EngineClient,
        EngineStartupCoordinator,
        EngineSupervisor,
        CoreEngineProcManager,
        CoreEngineActorManager,
        ZmqEventPublisher,
        ThreadedEventPublisher,
        EventSubscriber,
    ],
    ids=lambda each: f"{each.__module__}.{each.__name__}",
)
def test_wrong_keyword_is_a_type_error_and_no_destructor_fails(
    constructor: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    with pytest.raises(TypeError):
        constructor(no_such_argument=1)
    gc.collect()
    assert not reported
