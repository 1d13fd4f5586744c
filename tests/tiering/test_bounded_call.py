"""A call that may hang: its answer in time, its error in time, and otherwise neither."""

from __future__ import annotations

import threading

import pytest

from kvtier.tiering.bounded_call import call_within


def fail() -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize("has_threads", [True, False])
def test_what_is_over_in_time_answers_as_if_called_here(monkeypatch: pytest.MonkeyPatch, has_threads: bool) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if not has_threads:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    ends: list[int] = []
    assert call_within(10.0, lambda: None, "test", lambda: ends.append(1))
    with pytest.raises(ValueError, match="on purpose"):
        call_within(10.0, fail, "test", lambda: ends.append(2))
    assert ends == [1, 2]


def test_what_is_not_over_in_time_goes_on_and_its_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    gate, over = threading.Event(), threading.Event()

    def late() -> None:
        gate.wait(10.0)
        fail()

    assert not call_within(0.01, late, "test", over.set)
    assert not over.is_set()
    gate.set()
    assert over.wait(10.0)
    assert "test: failed, long after anybody waited for it: on purpose" in caplog.text
