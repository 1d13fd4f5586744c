"""Blocks computed by one cache are read by another, byte for byte, through both kinds of folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from group_engine import LAYOUTS
from handover_rig import Decode, Prefill, both_folders, files

from kvtier import BlockExporter, BlockImporter, CapacityError, ConfigError, HandoverFolder, KVLayout, Request, RequestError, UnknownRequest
from kvtier.tiering.handover import exporting

Make = Callable[..., Any]

KINDS = [name for name in LAYOUTS if "state" not in name and name != "encoder"]
SOME = ["sinks", "mla"]
DIGEST = b"\x07" * 32


def tokens_of(start: int, count: int) -> list[int]:
    return [start * 1000 + number for number in range(count)]


# -- the way of a prompt ---------------------------------------------------------------------------------------------------


@both_folders
@pytest.mark.parametrize("count", [3, 21])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_computed_there_is_answered_here_without_computing_it(kind: str, count: int, prefill: Make, decode: Make,
                                                                       folder: HandoverFolder) -> None:
    here, there = decode(LAYOUTS[kind]), prefill(LAYOUTS[kind])
    known, ticket = there.hand_over(tokens_of(1, count))
    assert here.importer.offer(ticket.to_json())
    assert here.fill(known) == count, "all but the newest token"
    assert files(folder) == [], "it was handed over"
    assert here.finish()[:len(known)] == known
    [ended] = there.exporter.poll()
    assert ended.was_taken
    assert ended.ticket == ticket
    assert there.exporter.outstanding == 0
    assert here.importer.stats().tokens == count


def test_the_admission_says_what_is_announced(prefill: Make, decode: Make) -> None:
    here = decode()
    known, ticket = prefill().hand_over(tokens_of(1, 14))
    here.importer.offer(ticket)
    [admission] = here.engine.admit(Request(1, known))
    assert (admission.prepopulated_tokens, admission.external_tokens) == (0, 12)
    assert here.importer.fill(1) == 14


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_taken_in_is_found_again_by_others(kind: str, prefill: Make, decode: Make) -> None:
    here = decode(LAYOUTS[kind])
    known, ticket = prefill(LAYOUTS[kind]).hand_over(tokens_of(1, 21))
    here.importer.offer(ticket)
    assert here.fill(known) == 21
    history = here.finish()
    [admission] = here.engine.admit(Request(2, [*history, 5, 6, 7]))
    assert admission.prepopulated_tokens >= 28
    assert admission.external_tokens == 0
    assert here.engine.learn(2) >= 28
    here.finish(2)


@pytest.mark.parametrize("kind", SOME)
def test_what_was_taken_in_goes_down_and_comes_back_like_everything_else(kind: str, prefill: Make, decode: Make) -> None:
    here = decode(LAYOUTS[kind], primary=16, secondary=30)
    known, ticket = prefill(LAYOUTS[kind]).hand_over(tokens_of(1, 21))
    here.importer.offer(ticket)
    assert here.fill(known) == 21
    history = here.finish()
    for number in range(2, 4):
        here.serve(tokens_of(number, 21), number)
    assert here.serve([*history, 5], 9) >= 28
    assert sum(here.cache.stats().onboard_blocks.values()) > 0


@pytest.mark.parametrize("kind", SOME)
def test_the_prompt_alone_leaves_its_last_token_to_be_computed(kind: str, prefill: Make, decode: Make) -> None:
    here, there = decode(LAYOUTS[kind]), prefill(LAYOUTS[kind])
    prompt = tokens_of(1, 14)
    _known, ticket = there.hand_over(prompt, sample=False)
    here.importer.offer(ticket)
    assert here.serve(prompt) == 13


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("common", [0, 3, 4, 11, 20])
def test_of_another_prompt_only_the_common_blocks_are_used(kind: str, common: int, prefill: Make, decode: Make) -> None:
    here = decode(LAYOUTS[kind])
    known, ticket = prefill(LAYOUTS[kind]).hand_over(tokens_of(1, 21))
    here.importer.offer(ticket)
    taken = here.serve([*known[:common], *tokens_of(2, 20)])
    expected = common // 4 * 4
    assert taken in ({expected} if kind == "mla" else {expected, 0}), "windows may lack what a shorter prefix reads"


def test_a_prefix_that_is_here_already_is_not_taken_again(prefill: Make, decode: Make) -> None:
    here = decode()
    here.serve(tokens_of(1, 10), answer=0)
    known, ticket = prefill().hand_over(tokens_of(1, 22))
    here.importer.offer(ticket)
    [admission] = here.engine.admit(Request(1, known))
    assert (admission.prepopulated_tokens, admission.external_tokens) == (8, 12)
    assert here.importer.fill(1) == 22
    here.engine.sequences[1].computed = 22
    assert here.importer.stats().bytes == 4 * here.cache.pool(0).group.block_bytes
    here.finish()


def test_a_tail_that_is_known_in_part_is_filled_as_a_whole(prefill: Make, decode: Make) -> None:
    here = decode()
    here.serve(tokens_of(1, 11), answer=0)  # two blocks, and the first tokens of the third
    known, ticket = prefill().hand_over(tokens_of(1, 12))
    here.importer.offer(ticket)
    [admission] = here.engine.admit(Request(1, known))
    assert admission.prepopulated_tokens + admission.external_tokens >= 10
    assert here.importer.fill(1) == 12
    here.engine.sequences[1].computed = 12
    here.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_of_a_conversation_hands_over_what_is_new(kind: str, prefill: Make, decode: Make) -> None:
    here, there = decode(LAYOUTS[kind]), prefill(LAYOUTS[kind])
    known, ticket = there.hand_over(tokens_of(1, 17))
    here.importer.offer(ticket)
    for turn in range(2, 6):
        assert here.fill(known, turn) == len(known) - 1
        history = here.finish(turn, answer=3)
        known, ticket = there.hand_over([*history, *tokens_of(turn, 6)], turn)
        here.importer.offer(ticket)


@pytest.mark.parametrize("kind", ["sinks", "mla"])
def test_what_is_there_already_need_not_be_handed_over(kind: str, prefill: Make, decode: Make, folder: HandoverFolder) -> None:
    here, there, elsewhere = decode(LAYOUTS[kind]), prefill(LAYOUTS[kind]), decode(LAYOUTS[kind])
    history = tokens_of(1, 14)
    here.serve(history, answer=0)
    prompt = tokens_of(1, 30)
    known, ticket = there.hand_over(prompt, skip_tokens=here.cache.probe_prefix_tokens(Request(1, prompt)))
    sizes = [sum(end - begin for begin, end in ranges) for ranges in ticket.positions]
    assert max(sizes) == 5, "three blocks of eight are there"
    for side in (here, elsewhere):
        side.importer.offer(ticket)
    assert elsewhere.serve(known) == 0, "it lacks what was left out"
    assert len(files(folder)) == 1
    assert here.serve(known, 2) == 30
    assert files(folder) == []


@pytest.mark.parametrize("skip_tokens", [-1, 14, 15, True, None, 4.0])
def test_something_must_be_left_to_hand_over(skip_tokens: Any, prefill: Make) -> None:
    there = prefill()
    there.compute(tokens_of(1, 14))
    with pytest.raises(RequestError, match="skip_tokens"):
        there.exporter.export(1, skip_tokens)
    assert there.exporter.export(1, 13).positions == (((3, 4),),)
    there.engine.remove(1)


def test_of_several_tickets_the_longest_is_used_and_the_others_stay(prefill: Make, decode: Make, folder: HandoverFolder) -> None:
    here, there = decode(), prefill()
    tickets = [there.hand_over(tokens_of(1, count), count) for count in (9, 17, 13)]
    for _known, ticket in tickets:
        here.importer.offer(ticket)
    assert here.serve(tickets[1][0]) == 17
    assert here.importer.poll() == 2
    assert len(files(folder)) == 2


def test_beams_take_in_the_full_blocks_that_they_share(prefill: Make, decode: Make) -> None:
    here = decode(max_beam_width=2)
    known, ticket = prefill().hand_over(tokens_of(1, 14))
    here.importer.offer(ticket)
    assert here.serve(known, beam_width=2) == 12


def test_blocks_may_be_taken_in_ahead_of_their_request(prefill: Make, decode: Make, folder: HandoverFolder) -> None:
    here = decode()
    known, ticket = prefill().hand_over(tokens_of(1, 14))
    here.importer.offer(ticket)
    assert here.importer.take_in(Request(7, known)) == 14
    assert files(folder) == []
    assert here.cache.stats().sequences == 0
    here.engine.admit(Request(1, known))
    assert here.engine.learn(1) == 14
    here.finish()


@pytest.mark.parametrize("kind", SOME)
def test_several_requests_of_one_step_are_filled(kind: str, prefill: Make, decode: Make) -> None:
    here, there = decode(LAYOUTS[kind], primary=60), prefill(LAYOUTS[kind])
    told = [there.hand_over(tokens_of(number, 9 + number), number) for number in (1, 2, 3)]
    for _known, ticket in told:
        here.importer.offer(ticket)
    here.engine.admit(*(Request(number, known) for number, (known, _ticket) in enumerate(told)))
    for number, (known, _ticket) in enumerate(told):
        here.engine.sequences[number].computed = here.importer.fill(number)
        assert here.engine.sequences[number].computed == len(known) - 1
    for number in range(3):
        here.finish(number)


# -- whose blocks ------------------------------------------------------------------------------------------------------------


def test_caches_without_reuse_hand_over_all_the_same(prefill: Make, decode: Make) -> None:
    here, there = (make(enable_block_reuse=False, secondary=0) for make in (decode, prefill))
    known, ticket = there.hand_over(tokens_of(1, 14))
    here.importer.offer(ticket)
    [admission] = here.engine.admit(Request(1, known))
    assert admission.external_tokens == 0, "nothing is asked for"
    assert here.importer.fill(1) == 14
    here.engine.sequences[1].computed = 14
    here.finish()


def test_namespaces_are_kept_apart(prefill: Make, decode: Make) -> None:
    here, there = decode(), prefill()
    same = {"cache_salt": "tenant", "lora_id": 3, "lora_digest": DIGEST}
    known, ticket = there.hand_over(tokens_of(1, 14), **same)
    here.importer.offer(ticket)
    for other in ({}, {"cache_salt": "tenant"}, same | {"lora_digest": b"\x08" * 32}, same | {"cache_salt": "other"},
                  {"lora_id": 3, "cache_salt": "tenant"}):
        [admission] = here.engine.admit(Request(1, known, **other))
        assert admission.external_tokens == 0
        assert here.importer.fill(1) == 0
        here.engine.remove(1, store=False)
    assert here.serve(known, **same) == 14


def test_a_request_that_reads_nothing_takes_nothing_in(prefill: Make, decode: Make) -> None:
    here = decode()
    known, ticket = prefill().hand_over(tokens_of(1, 14))
    here.importer.offer(ticket)
    assert here.serve(known, skip_read=True) == 0
    assert here.importer.poll() == 1


def test_a_declined_ticket_is_left_to_others(prefill: Make, decode: Make) -> None:
    here, elsewhere = decode(), decode()
    known, ticket = prefill().hand_over(tokens_of(1, 14))
    here.importer.offer(ticket)
    here.importer.decline(ticket.to_json())
    assert here.importer.poll() == 0
    assert here.serve(known) == 0
    elsewhere.importer.offer(ticket)
    assert elsewhere.serve(known) == 14


def test_an_importer_that_is_closed_is_no_longer_asked(prefill: Make, decode: Make) -> None:
    here = decode()
    known, ticket = prefill().hand_over(tokens_of(1, 14))
    with here.importer as importer:
        importer.offer(ticket)
    importer.close()
    [admission] = here.engine.admit(Request(1, known))
    assert admission.external_tokens == 0
    BlockImporter(here.cache, importer.folder)
    with pytest.raises(ConfigError, match="close that"):
        BlockImporter(here.cache, importer.folder)
    importer.close()  # not the other one
    with pytest.raises(ConfigError, match="close that"):
        BlockImporter(here.cache, importer.folder)
    here.cache.close()
    importer.close()


# -- exporting ---------------------------------------------------------------------------------------------------------------


def test_only_what_is_computed_is_handed_over(prefill: Make, decode: Make) -> None:
    here, there = decode(), prefill()
    tokens = tokens_of(1, 20)
    there.engine.admit(Request(1, tokens))
    there.engine.learn(1)
    with pytest.raises(RequestError, match="nothing of it is computed"):
        there.exporter.export(1)
    there.engine.forward([1], chunk=10)
    here.importer.offer(there.exporter.export(1))
    assert here.serve(tokens) == 10


@pytest.mark.parametrize(("keywords", "message"), [
    ({"beam_width": 2}, "beam_width=2"), ({"lora_id": 1}, "lora_digest"), ({"extra_ids": list(range(14))}, "extra_ids_digest"),
])
def test_what_would_mean_nothing_there_is_refused(keywords: dict[str, Any], message: str, prefill: Make, folder: HandoverFolder) -> None:
    there = prefill(max_beam_width=2)
    there.compute(tokens_of(1, 14), sample=False, **keywords)
    with pytest.raises(RequestError, match=message):
        there.exporter.export(1)
    with pytest.raises(UnknownRequest):
        there.exporter.export(2)
    assert there.cache.stats().leases == 0
    assert files(folder) == []


def test_the_sequence_may_end_while_it_is_exported(prefill: Make, decode: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease holds its blocks: others get other ones."""
    here, there = decode(), prefill(primary=12, secondary=0)
    known = list(there.compute(tokens_of(1, 21)))
    read_rows = exporting.read_rows

    def meanwhile(*arguments: Any) -> Any:
        assert there.cache.stats().leases == 1
        there.engine.remove(1, store=False)
        there.engine.serve(Request(2, tokens_of(2, 20)))
        return read_rows(*arguments)

    monkeypatch.setattr(exporting, "read_rows", meanwhile)
    here.importer.offer(there.exporter.export(1))
    assert there.cache.stats().leases == 0
    assert here.serve(known) == 21


def test_a_sequence_goes_on_after_it_was_exported(prefill: Make, decode: Make) -> None:
    here, there = decode(), prefill()
    known = list(there.compute(tokens_of(1, 14)))
    here.importer.offer(there.exporter.export(1))
    there.engine.forward([1])
    there.engine.sample(1)
    there.engine.forward([1])
    there.engine.remove(1)
    there.cache.verify()
    assert here.serve(known) == 14


def test_windows_that_have_moved_on_are_handed_over_as_far_as_they_are_read(prefill: Make, decode: Make) -> None:
    layout = LAYOUTS["sinks"]
    here, there = decode(layout), prefill(layout)
    there.compute(tokens_of(1, 14))
    for _ in range(12):
        there.engine.forward([1])
        there.engine.sample(1)
    known = list(there.engine.sequences[1].beams[0])
    ticket = there.exporter.export(1)
    assert len(ticket.positions[0]) == 2, "the sinks, and the window"
    here.importer.offer(ticket)
    assert here.serve(known) == len(known) - 1


def test_chunks_of_a_prompt_may_be_computed_there_but_not_taken_in_here(prefill: Make, decode: Make, folder: HandoverFolder) -> None:
    layout = LAYOUTS["window and full"]
    here, there = decode(layout), prefill(layout, chunk_size=8)
    known, ticket = there.hand_over(tokens_of(1, 30))
    here.importer.offer(ticket)
    assert here.serve(known) == 30
    with pytest.raises(ConfigError, match="leave chunk_size out"):
        decode(layout, chunk_size=8)


@pytest.mark.parametrize("kind", ["states", "encoder"])
def test_kinds_of_layers_that_are_not_handed_over_are_said_at_the_start(kind: str, make_cache: Make, folder: HandoverFolder) -> None:
    cache = make_cache(layout=LAYOUTS[kind])
    for side in (BlockExporter, BlockImporter):
        with pytest.raises(ConfigError, match="not included"):
            side(cache, folder)


@pytest.mark.parametrize("lifetime", [0, -1, "60", None, float("nan"), True])
def test_a_lifetime_is_a_positive_number(lifetime: Any, make_cache: Make, folder: HandoverFolder) -> None:
    with pytest.raises(RequestError, match="lifetime"):
        BlockExporter(make_cache(), folder, lifetime=lifetime)


def test_a_very_long_lifetime_is_one(make_cache: Make, decode: Make, folder: HandoverFolder) -> None:
    here, there = decode(), Prefill(make_cache(), folder, lifetime=1e200)
    known, ticket = there.hand_over(tokens_of(1, 14))
    assert here.importer.offer(ticket.to_json())
    assert here.serve(known) == 14


def test_prompts_are_handed_over_while_others_are_served(prefill: Make, decode: Make) -> None:
    """A thread of its own exports and fills; both engines go on meanwhile."""
    layout = KVLayout.uniform(2, 1, 8, "float32", 4)
    here, there = decode(layout, primary=100, secondary=40), prefill(layout, primary=100, secondary=40)
    told: list[tuple[list[int], Any]] = []
    errors: list[BaseException] = []

    def busy(side: Prefill | Decode, stop: threading.Event) -> None:
        number = 1000
        try:
            while not stop.is_set():
                number += 1
                side.cache.add_sequence(Request(number, tokens_of(number, 9)))
                side.cache.wait_ready(number)
                side.cache.remove_sequence(number, store=False)
                side.cache.refresh()
                time.sleep(0.002)
        except BaseException as error:
            errors.append(error)

    stop = threading.Event()
    threads = [threading.Thread(target=busy, args=(side, stop)) for side in (here, there)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 8):
            told.append(there.hand_over(tokens_of(number, 9 + number), number))
        for number, (known, ticket) in enumerate(told, start=1):
            here.importer.offer(ticket)
            assert here.serve(known, number) == len(known) - 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors


@both_folders
def test_a_pool_too_small_for_the_prompt_changes_nothing_and_the_ticket_stays(prefill: Make, decode: Make, folder: HandoverFolder) -> None:
    here = decode(primary=6, secondary=0)
    known, ticket = prefill().hand_over(tokens_of(1, 14))
    here.importer.offer(ticket)
    here.cache.add_sequence(Request(5, tokens_of(5, 12)))
    for _ in range(2):
        with pytest.raises(CapacityError) as caught:
            here.fill(known)
        assert caught.value.preempt == (5,)
        with pytest.raises(CapacityError):
            here.importer.take_in(Request(1, known))
        assert len(files(folder)) == 1
        here.cache.verify()
    here.cache.remove_sequence(5)
    assert here.serve(known, answer=2) == 14
    assert files(folder) == []
