"""Where no terminal shows a bar, a long command says what it is at, again and again."""

from __future__ import annotations

import sys
import threading

import pytest

from kvtier.bench.slow_stages import SlowStages, to_stderr

DEADLINE = 60.0


class Listener:
    """What was said, and a wait for it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, line: str) -> None:
        with self._changed:
            self.lines.append(line)
            self._changed.notify_all()

    def wait_for(self, text: str) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: any(text in line for line in self.lines), DEADLINE)


def test_each_stage_is_one_line_where_it_is_short() -> None:
    said = Listener()
    with SlowStages("kvtier x", said, seconds=DEADLINE) as stages:
        stages.begin("loading")
        stages.begin("answers", 3)
        stages.advance()
    assert said.lines == ["kvtier x: loading", "kvtier x: answers"]


def test_a_stage_that_lasts_is_told_again_with_its_steps_though_nothing_moves() -> None:
    said = Listener()
    with SlowStages("kvtier x", said, seconds=0.01) as stages:
        stages.begin("loading")
        assert said.wait_for("kvtier x: loading, ")
        stages.begin("answers", 3)
        stages.advance()
        stages.advance()
        assert said.wait_for("kvtier x: answers, 2 of 3, ")
    assert said.lines[-1].endswith(" s so far")
    assert not [thread for thread in threading.enumerate() if thread.name == "kvtier-stages"], "nobody speaks after the end"


def test_nothing_is_said_before_the_first_stage_nor_after_an_error() -> None:
    said = Listener()
    with pytest.raises(KeyboardInterrupt), SlowStages("kvtier x", said, seconds=0.001):
        raise KeyboardInterrupt
    assert said.lines == []


def test_a_standard_error_that_is_closed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/null", "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
    to_stderr("lost")
