"""One warning for a row of like failures."""

from __future__ import annotations

import logging

import pytest

from kvtier.io.incident import AGAIN_SECONDS, Incident


def test_the_first_is_a_warning_and_the_rest_is_counted_for_the_next(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    incident = Incident(logging.getLogger("kvtier.drive"), lambda: now)
    with caplog.at_level(logging.INFO):
        for slot in range(5):
            incident.warn("slot %d is bad", slot)
        now += AGAIN_SECONDS
        incident.warn("slot %d is bad", 5)
        incident.warn("slot %d is bad", 6)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "slot 0 is bad", "slot 5 is bad (and 4 more since the last warning)"]
    assert sum(record.levelno == logging.INFO for record in caplog.records) == 5


def test_different_incidents_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    for incident in (Incident(logging.getLogger("kvtier.drive")), Incident(logging.getLogger("kvtier.drive"))):
        incident.warn("bad")
    assert caplog.messages == ["bad", "bad"]
