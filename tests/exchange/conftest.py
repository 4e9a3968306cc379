"""What the engine's tests share."""

from __future__ import annotations

import pytest

from gradcomp.exchange import watchdog


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchdogs look often, and wait for an answer for half a second: for tests in which one does not come."""
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.5)
