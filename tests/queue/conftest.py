from __future__ import annotations

import pytest


@pytest.fixture
def long_respite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a name keep a leased message until the next lease ends, however slow the machine is just now."""
    monkeypatch.setattr("aioshm.queue.local.leases.RESPITE_S", 60.0)


@pytest.fixture
def short_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let remote readers close soon where the test's writer does not run, and so does not answer their goodbyes."""
    monkeypatch.setattr("aioshm.queue.remote.source.GOODBYE_S", 0.1)
