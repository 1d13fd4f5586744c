"""Rules that a reader of the design would try out: steps and removals, tools and bad bytes, expiry across a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from toy_engine import PROMPT, MakeCache, ToyEngine, flip_stored_bit

from kvtier import (
    CapacityError,
    CorruptBlock,
    KVCacheManager,
    KVLayout,
    KVTierError,
    LayerSpec,
    Level,
    Request,
    RequestError,
    RetentionConfig,
    TokenRange,
    UnknownRequest,
)
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")


def slots(table: object) -> set[int]:
    return {int(entry) for entry in table[:, 0].flatten() if entry >= 0}  # type: ignore[index]


def test_blocks_of_a_sequence_removed_within_its_step_are_not_handed_out_before_the_step_ends(make_cache: MakeCache) -> None:
    cache = make_cache(4, 0)
    cache.add_sequence(Request(1, PROMPT[:8]))
    with cache.step(None, [1]) as ids:
        mine = slots(cache.block_table(ids))
        cache.remove_sequence(1, store=False)
        assert cache.num_free_blocks(Level.PRIMARY) == 2, "the engine may still be writing into them"
        cache.add_sequence(Request(2, [7] * 8))
        with cache.step(None, [2]) as others:
            assert not mine & slots(cache.block_table(others))
        cache.verify()
    with pytest.raises(UnknownRequest):
        cache.block_ids(1)
    assert cache.num_free_blocks(Level.PRIMARY) == 2
    cache.verify()


def test_a_step_that_ends_with_an_error_ends_removed_sequences_too(make_cache: MakeCache) -> None:
    cache = make_cache(4, 0)
    cache.add_sequence(Request(1, PROMPT[:8]))

    def fail() -> None:
        with cache.step(None, [1]):
            cache.remove_sequence(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert cache.num_free_blocks(Level.PRIMARY) == 4
    cache.verify()


def test_the_last_of_two_nested_steps_ends_a_removed_sequence(make_cache: MakeCache) -> None:
    cache = make_cache(4, 0)
    cache.add_sequence(Request(1, PROMPT[:8]))
    with cache.step(None, [1]):
        with cache.step(None, [1]):
            cache.remove_sequence(1)
        assert cache.num_free_blocks(Level.PRIMARY) == 2
    assert cache.num_free_blocks(Level.PRIMARY) == 4


def test_a_sequence_in_a_running_step_cannot_be_rewound(make_cache: MakeCache) -> None:
    cache = make_cache(4, 0)
    cache.add_sequence(Request(1, PROMPT[:8]))
    cache.mark_computed(1, 8)
    cache.append_tokens(1, [1])
    with cache.step(None, [1]), pytest.raises(RequestError, match="running step"):
        cache.rewind(1, 1)
    cache.rewind(1, 1)


def test_a_cut_block_leaves_the_tree_when_it_is_rewound(make_cache: MakeCache) -> None:
    cache = make_cache(8, 0)
    cache.add_sequence(Request(1, PROMPT[:4]))
    cache.mark_computed(1, 4)
    cache.append_tokens(1, [1, 2, 3, 4, 5])
    cache.store_context(1)
    assert cache.match([*PROMPT[:4], 1, 2, 3, 4, 9]).reusable_blocks == 2
    cache.rewind(1, 3)
    assert cache.match([*PROMPT[:4], 1, 2, 3, 4, 9]).reusable_blocks == 1
    cache.verify()


def test_a_block_that_a_tool_finds_bad_is_promised_to_nobody(make_cache: MakeCache, store_directory: Path, layout: KVLayout) -> None:
    cache = make_cache(8, 4, 16)
    ToyEngine(cache).serve(Request(1, PROMPT))
    assert cache.flush()
    cache.close()
    cache = make_cache(8, 4, 16)
    assert cache.match(PROMPT).reusable_blocks == 3
    head = next(iter(cache._ledger.allocators[0].warm.values())).id
    flip_stored_bit(store_directory, layout, cache.block(head).slot)
    with pytest.raises(CorruptBlock):
        cache.read_block(head)
    stats = cache.stats()
    assert (stats.checksum_failures, stats.quarantined) == (1, 1)
    assert cache.match(PROMPT).reusable_blocks < 3
    cache.verify()


def test_a_duration_goes_on_across_a_restart(make_cache: MakeCache) -> None:
    now = [1000.0]
    cache = make_cache(8, 4, 16, clock=lambda: now[0])
    retention = RetentionConfig([TokenRange(0, None, 80, duration_seconds=60.0)])
    ToyEngine(cache).serve(Request(1, PROMPT, retention=retention))
    assert cache.flush()
    cache.close()
    later = [5.0]  # another clock, as after a reboot
    cache = make_cache(8, 4, 16, clock=lambda: later[0])
    warm = [block.id for block in cache._ledger.allocators[0].warm.values()]
    assert {cache.block(block).priority for block in warm} == {80}
    later[0] += 55.0
    cache.refresh()
    assert {cache.block(block).priority for block in warm} == {80}
    later[0] += 10.0
    cache.refresh()
    assert {cache.block(block).priority for block in warm} == {35}
    cache.verify()


def test_events_that_nobody_flushes_do_not_pile_up(make_cache: MakeCache) -> None:
    cache = make_cache(4, 2, event_buffer_max_size=16)
    for number in range(100):
        cache.add_sequence(Request(number, [number] * 8))
        cache.mark_computed(number, 8)
        cache.remove_sequence(number)
    cache.flush_events()
    events = cache.poll_events()
    assert len(events) == 16
    assert [event.event_id for event in events] == list(range(events[0].event_id, events[0].event_id + 16))
    assert cache.stats().dropped_events == events[0].event_id


def test_blocks_of_an_adapter_are_never_served_without_it_after_a_restart(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 16)
    ToyEngine(cache).serve(Request(1, PROMPT, lora_id=3, lora_digest=bytes(32)))
    assert cache.flush()
    cache.close()
    cache = make_cache(8, 4, 16)
    assert cache.match(PROMPT).reusable_blocks == 0
    assert cache.match(Request(1, PROMPT, lora_id=9, lora_digest=bytes(32))).reusable_blocks == 3


@pytest.mark.parametrize("timeout", [float("nan"), -1, "x", True])
def test_a_timeout_is_a_number_of_seconds(make_cache: MakeCache, timeout: object) -> None:
    cache = make_cache()
    cache.add_sequence(Request(1, PROMPT))
    for call in (lambda: cache.wait_ready(1, timeout=timeout), lambda: cache.flush(timeout), lambda: cache.poll_events(timeout),
                 lambda: cache.reset(timeout), lambda: cache.close(timeout)):
        with pytest.raises(RequestError, match="timeout"):
            call()
    assert cache.wait_ready(1, timeout=float("inf")) == 0


def test_endless_timeouts_are_allowed(make_cache: MakeCache) -> None:
    cache = make_cache()
    assert cache.flush(float("inf"))
    cache.close(float("inf"))


@pytest.mark.parametrize("report", [(float("nan"), 1.0), (10, float("inf")), ("x", 1), (0, 1), (10**400, 1.0)])
def test_a_nonsense_prefill_report_changes_nothing(make_cache: MakeCache, report: tuple[object, object]) -> None:
    cache = make_cache()
    cache.report_prefill(100, 0.5)
    with pytest.raises(RequestError):
        cache.report_prefill(*report)
    assert cache.stats().prefill_tokens_per_second == 200.0


def test_refused_bytes_leave_the_block_as_it_was(make_cache: MakeCache) -> None:
    cache = make_cache()
    cache.add_sequence(Request(1, PROMPT))
    cache.mark_computed(1, len(PROMPT))
    cache.store_context(1)
    before = cache.match(PROMPT).reusable_blocks
    for data in ("x" * cache.layout.groups[0].block_bytes, [300] * cache.layout.groups[0].block_bytes, b"short"):
        with pytest.raises(RequestError):
            cache.write_block(cache.block_ids(1)[0], data)
    assert cache.match(PROMPT).reusable_blocks == before > 0


def test_wrong_kinds_of_arguments_are_request_errors(make_cache: MakeCache) -> None:
    cache = make_cache()
    cache.add_sequence(Request(1, PROMPT))
    for call in (lambda: cache.add_sequences(None), lambda: cache.add_sequences([Request(2, [1]), None]), lambda: cache.block_table(None),
                 lambda: cache.append_step(None, [[1]]), lambda: cache.append_step([1], None), lambda: cache.match([1], zzz=1),
                 lambda: cache.step(None, None).__enter__()):
        with pytest.raises(RequestError):
            call()
    with pytest.raises(UnknownRequest):
        cache.remove_sequence([1])
    assert cache.stats().sequences == 1
    cache.verify()


def test_a_sequence_that_has_outgrown_the_pool_alone_is_not_to_be_pre_empted(make_cache: MakeCache) -> None:
    cache = make_cache(2, 0)
    cache.add_sequence(Request(1, PROMPT[:8]))
    cache.mark_computed(1, 8)
    with pytest.raises(CapacityError, match="enlarge primary") as refused:
        cache.append_tokens(1, [1])
    assert refused.value.preempt == ()


def test_ready_means_that_a_step_takes_the_sequence(make_cache: MakeCache) -> None:
    """Aborted requests leave copies that wait for a file; whoever gets their slots must not be told "ready" before."""
    cache = make_cache(6, 1, 8)
    engine = ToyEngine(cache)
    engine.serve(Request(1, [7] * 5))
    assert cache.flush()
    cache.close()
    cache = make_cache(6, 1, 8, faults=Faults([FaultRule(FaultKind.DELAY, FaultOperation.READ, seconds=0.5)]))
    engine = ToyEngine(cache)
    engine.serve(Request(2, [5] * 5))
    cache.offload(next(i for i in range(15) if cache.block(i).tokens == (5,) * 4))
    engine.serve(Request(3, [6] * 5))
    cache.add_sequence(Request(10, [7] * 4 + [1]))
    cache.add_sequence(Request(11, [7] * 3 + [8]))
    cache.remove_sequence(10, store=False)
    cache.remove_sequence(11, store=False)
    cache.add_sequence(Request(12, [5] * 4 + [1]))
    cache.add_sequence(Request(13, [3] * (4 * cache.num_free_blocks(Level.PRIMARY))))
    cache.wait_ready(13)
    with cache.step(None, [13]) as ready:
        assert ready == [13]
    assert cache.is_ready(13)
    cache.verify()


# -- what a running step forbids, and arguments of other types ---------------------------------------------------------------


def test_what_gives_blocks_back_or_copies_them_is_refused_in_a_running_step(make_cache: MakeCache) -> None:
    layout = KVLayout([LayerSpec.attention(1, 8, window=8)], "float32", 4)
    cache = make_cache(16, 0, layout=layout, max_beam_width=2)
    cache.add_sequences([Request(1, PROMPT[:12]), Request(2, PROMPT[:9], beam_width=2), Request(3, PROMPT[:3])])
    cache.mark_computed(1, 12)
    cache.mark_computed(2, 9)
    cache.append_tokens(2, [1, 2])
    calls = [lambda: cache.append_tokens(1, [1]), lambda: cache.append_step([3, 1], [[1], [1]]), lambda: cache.reorder_beams(2, [0, 0]),
             lambda: cache.propose_drafts(1, [1], [-1])]
    with cache.step(None, [1, 2]):
        before = [cache.block_ids(1), cache.block_ids(2, 0), cache.block_ids(2, 1), cache.block_ids(3)], cache.stats()
        for call in calls:
            with pytest.raises(RequestError, match="running step; leave the step first"):
                call()
        assert before == ([cache.block_ids(1), cache.block_ids(2, 0), cache.block_ids(2, 1), cache.block_ids(3)], cache.stats())
        cache.append_tokens(3, [1])  # takes no part in it
    for call in calls:
        call()
    cache.verify()


@pytest.mark.parametrize("call", [
    lambda cache: cache.mark_computed([], 1), lambda cache: cache.rewind([], 1), lambda cache: cache.drop_drafts({}),
    lambda cache: cache.accept_drafts([], [0]), lambda cache: cache.reorder_beams([], [0]), lambda cache: cache.layer_buffer([]),
    lambda cache: cache.layer_buffer(True), lambda cache: cache.layer_buffer(0.0), lambda cache: cache.wait_ready(1, layer=[]),
    lambda cache: cache.remove_sequence(1, "no"), lambda cache: cache.remove_sequence(1, np.array([1, 2])),
    lambda cache: cache.needed_blocks_one_step(1, np.array([1, 2])), lambda cache: cache.num_free_blocks(True),
    lambda cache: cache.num_free_blocks(1.0), lambda cache: cache.num_free_blocks(np.array([1, 2])), lambda cache: cache.set_inbound(5),
    lambda cache: Request(5, [1], skip_read="no"), lambda cache: Request(5, [1], skip_write=np.array([1, 2])),
    lambda cache: Request(5, [1], multimodal=np.array([1, 2])), lambda cache: RetentionConfig(transfer_mode="dram"),
    lambda cache: RetentionConfig(directory=5),
])
def test_arguments_of_another_type_are_refused_and_change_nothing(make_cache: MakeCache, call: Callable[[KVCacheManager], object]) -> None:
    cache = make_cache(8, 0)
    cache.add_sequence(Request(1, PROMPT[:8]))
    before = cache.stats()
    with pytest.raises(KVTierError):
        call(cache)
    assert cache.stats() == before
    cache.add_sequence(Request(2, PROMPT[:8]))
    cache.verify()
