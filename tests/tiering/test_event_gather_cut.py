"""A transport that somebody closes under its gather: the gathering ends, and no thread asks it again and again."""

from __future__ import annotations

import pytest
from gather_rig import PATIENCE, WAYS, Ranks, of_rank
from toy_engine import wait_until

from kvtier.tiering.event_gather import EventGather, RankState
from kvtier.tiering.event_queue import EventQueue


@pytest.mark.parametrize("way", WAYS)
def test_a_transport_that_is_closed_first_ends_the_gathering(way: str) -> None:
    made = WAYS[way](3)
    ranks = Ranks(made)
    ranks.put(1, 0)
    assert of_rank(ranks.gathered(1), 1) == [0]
    made[0].close()
    wait_until(lambda: all(report.state is RankState.LOST for report in ranks.root.ranks[1:]))
    ranks.root._receiving.join(PATIENCE)
    assert not ranks.root._receiving.is_alive(), "nobody asks for ever what cannot come"
    assert ranks.close() == [False, False, False]


@pytest.mark.parametrize("way", WAYS)
def test_whoever_waits_for_a_confirmation_does_not_ask_a_closed_transport_again(way: str) -> None:
    root, other = WAYS[way](2)
    gather = EventGather(EventQueue(4).stream(), other)
    asked: list[float] = []
    receive = other.receive

    def closed_meanwhile(timeout: float) -> list[tuple[int, bytes | None]]:
        asked.append(timeout)
        other.close()
        return receive(timeout)

    other.receive = closed_meanwhile  # type: ignore[method-assign]
    assert not gather.close(PATIENCE)
    assert len(asked) == 1
    root.close()
