"""Keys: what makes two blocks the same, inside the process and outside it."""

from __future__ import annotations

import hashlib
import itertools
import struct
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import RequestError
from kvtier.tiering.ledger.key import BlockKey, KeyRun, Namespace, TokenKeys, multimodal_keys, next_chain_key
from kvtier.tiering.ledger.request import MultimodalItem, Request, token_bytes

IMAGE = b"\x01" * 32
OTHER_IMAGE = b"\x02" * 32
DIGEST = b"\x03" * 32


def chain(tokens_per_block: int = 4, seed: bytes = b"model", **keywords: Any) -> list[bytes]:
    """Chain keys of a prompt's full blocks."""
    request = Request(1, **keywords)
    keys = TokenKeys(request, tokens_per_block)
    found = [Namespace(seed, request).chain_seed]
    for number in range(request.num_tokens // tokens_per_block):
        found.append(next_chain_key(found[-1], keys.block_key(number, tokens_per_block)))
    return found[1:]


# -- BlockKey -----------------------------------------------------------------------------------------------------------


def full_key(**changes: Any) -> BlockKey:
    fields: dict[str, Any] = {"tokens": (1, 2), "lora_id": 42, "cache_salt": "a", "extra_ids": (7, 8), "multimodal": ((IMAGE, 0),)}
    return BlockKey(**(fields | changes))


def test_case_B1_equal_keys_are_equal_and_hash_alike() -> None:
    assert full_key() == full_key()
    assert hash(full_key()) == hash(full_key())
    assert full_key() != (1, 2)


@pytest.mark.parametrize("change", [
    {"tokens": (1, 3)}, {"tokens": (1,), "extra_ids": (7,)}, {"lora_id": 43}, {"lora_id": None}, {"cache_salt": "b"}, {"cache_salt": None},
    {"extra_ids": (7, 9)}, {"extra_ids": None}, {"multimodal": ((OTHER_IMAGE, 0),)}, {"multimodal": ((IMAGE, 1),)}, {"multimodal": ()},
    {"encoder_digest": IMAGE},
])
def test_case_B1_each_field_alone_breaks_equality(change: dict[str, Any]) -> None:
    assert full_key(**change) != full_key()


def test_case_B2_matching_tokens_are_counted_up_to_the_first_difference() -> None:
    assert BlockKey((0, 0)).num_matching_tokens(BlockKey((0,))) == 1
    assert BlockKey((0, 1, 2)).num_matching_tokens(BlockKey((0, 1, 3))) == 2
    assert BlockKey((5,)).num_matching_tokens(BlockKey((0,))) == 0
    assert BlockKey((0, 0), extra_ids=(1, 1)).num_matching_tokens(BlockKey((0, 0), extra_ids=(1, 2))) == 1


@pytest.mark.parametrize("change", [{"lora_id": 1}, {"cache_salt": "b"}, {"extra_ids": None}, {"multimodal": ()},
                                    {"encoder_digest": IMAGE}])
def test_case_B2_no_token_matches_where_anything_but_the_tokens_differs(change: dict[str, Any]) -> None:
    assert full_key().num_matching_tokens(full_key(**change)) == 0
    assert full_key().num_matching_tokens(full_key()) == 2


def test_case_B3_a_shortened_key_keeps_everything_but_the_tokens() -> None:
    key = BlockKey((1, 2, 3), lora_id=42, cache_salt="a", extra_ids=(4, 5, 6), encoder_digest=IMAGE).shorten(2)
    assert key == BlockKey((1, 2), lora_id=42, cache_salt="a", extra_ids=(4, 5), encoder_digest=IMAGE)


def test_case_B3_a_multimodal_key_cannot_be_shortened() -> None:
    with pytest.raises(RequestError, match="multimodal"):
        full_key().shorten(1)


@pytest.mark.parametrize("num_tokens", [-1, 3])
def test_a_key_cannot_be_shortened_to_a_length_it_does_not_have(num_tokens: int) -> None:
    with pytest.raises(RequestError, match="between 0 and 2"):
        BlockKey((1, 2)).shorten(num_tokens)


def test_extra_ids_come_one_for_each_token() -> None:
    with pytest.raises(RequestError, match="one for each token"):
        BlockKey((1, 2), extra_ids=(1,))


def test_case_B4_the_64_bit_hash_is_equal_for_equal_keys_and_differs_with_token_adapter_or_parent() -> None:
    key = BlockKey((1, 2, 3), lora_id=42)
    assert key.hash64() == BlockKey((1, 2, 3), lora_id=42).hash64()
    assert 0 <= key.hash64() < 1 << 64
    others = [BlockKey((1, 2, 4), lora_id=42).hash64(), BlockKey((1, 2, 3), lora_id=43).hash64(), BlockKey((1, 2, 3)).hash64(),
              key.hash64(parent=1), BlockKey((1, 2), lora_id=42).hash64(), BlockKey((1, 2, 3), 42, None, (0, 0, 0)).hash64(),
              BlockKey((1, 2, 3), 42, None, None, ((IMAGE, 0),)).hash64(), BlockKey((1, 2, 3), 42, None, None, ((IMAGE, 1),)).hash64()]
    assert len({key.hash64(), *others}) == len(others) + 1


def test_case_B4_the_salt_counts_only_at_the_head_of_the_hash_chain() -> None:
    plain, salted = BlockKey((1, 2)), BlockKey((1, 2), cache_salt="a")
    assert plain.hash64() != salted.hash64()
    assert plain.hash64(parent=9) == salted.hash64(parent=9)


def test_negative_token_ids_have_a_hash() -> None:
    assert BlockKey((-1, 2)).hash64() != BlockKey((1, 2)).hash64()


# -- multimodal ----------------------------------------------------------------------------------------------------------


def test_case_B5_a_run_s_blocks_carry_the_offset_inside_the_item() -> None:
    items = (MultimodalItem(IMAGE, [(1, 2)]),)
    assert [multimodal_keys(items, t, t + 1) for t in range(4)] == [[], [(IMAGE, 0)], [(IMAGE, 1)], []]


def test_case_B5_a_second_run_continues_the_item_s_own_count() -> None:
    items = (MultimodalItem(IMAGE, [(1, 1), (3, 1)]),)
    assert [multimodal_keys(items, t, t + 1) for t in range(4)] == [[], [(IMAGE, 0)], [], [(IMAGE, 1)]]


def test_a_block_names_every_run_it_overlaps_in_prompt_order() -> None:
    items = (MultimodalItem(OTHER_IMAGE, [(6, 4)]), MultimodalItem(IMAGE, [(2, 2)]))
    assert multimodal_keys(items, 0, 8) == [(IMAGE, 0), (OTHER_IMAGE, 0)]
    assert multimodal_keys(items, 8, 16) == [(OTHER_IMAGE, 2)]


@pytest.mark.parametrize("runs", [[], [(0, 0)], [(-1, 2)], [(4, 2), (0, 2)], [(0, 4), (3, 2)], [(2, -1)]])
def test_runs_that_are_missing_empty_or_overlap_are_refused(runs: list[tuple[int, int]]) -> None:
    with pytest.raises(RequestError, match="runs"):
        MultimodalItem(IMAGE, runs)


@pytest.mark.parametrize("digest", [b"", b"\x01" * 31, b"\x01" * 33])
def test_a_digest_of_another_length_is_refused(digest: bytes) -> None:
    with pytest.raises(RequestError, match="32 bytes"):
        MultimodalItem(digest, [(0, 1)])


def test_a_run_beyond_the_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="ends at 5"):
        Request(1, [1, 2, 3, 4], multimodal=[MultimodalItem(IMAGE, [(3, 2)])])


def test_a_block_with_an_item_never_has_the_key_of_one_without() -> None:
    tokens = [9] * 8
    plain = TokenKeys(Request(1, tokens), 4)
    with_item = TokenKeys(Request(1, tokens, multimodal=[MultimodalItem(IMAGE, [(4, 4)])]), 4)
    assert plain.block_key(0, 4) == with_item.block_key(0, 4)
    assert plain.block_key(1, 4) != with_item.block_key(1, 4)
    assert len(with_item.block_key(1, 4)) % 2 == 1


def test_an_item_one_token_further_on_is_another_block_though_the_token_ids_agree() -> None:
    tokens = [9] * 8  # the placeholder's id also occurs as text
    keys = {TokenKeys(Request(1, tokens, multimodal=[MultimodalItem(IMAGE, [(start, length)])]), 8).block_key(0, 8)
            for start, length in ((0, 2), (1, 2), (0, 3), (2, 2))}
    assert len(keys) == 4


def test_the_order_in_which_a_request_lists_its_items_means_nothing() -> None:
    items = [MultimodalItem(IMAGE, [(0, 2)]), MultimodalItem(OTHER_IMAGE, [(2, 2)])]
    keys = [TokenKeys(Request(1, [9] * 4, multimodal=listed), 4).block_key(0, 4) for listed in (items, items[::-1])]
    assert keys[0] == keys[1]


# -- chain keys ----------------------------------------------------------------------------------------------------------

NAMESPACE_PARTS: list[dict[str, Any]] = [
    {}, {"lora_id": 0}, {"lora_id": 1}, {"lora_id": 1, "lora_digest": DIGEST}, {"lora_id": 1, "lora_digest": IMAGE}, {"cache_salt": ""},
    {"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_ids": [0] * 8}, {"extra_ids": [1] * 8},
    {"extra_ids": [0] * 8, "extra_ids_digest": DIGEST}, {"extra_ids": [0] * 8, "extra_ids_digest": IMAGE},
    {"lora_id": 1, "cache_salt": "a"}, {"multimodal": [MultimodalItem(IMAGE, [(0, 1)])]},
    {"multimodal": [MultimodalItem(OTHER_IMAGE, [(0, 1)])]},
]


def test_chain_keys_differ_when_any_part_of_the_namespace_does() -> None:
    chains = [chain(tokens=range(8), **part) for part in NAMESPACE_PARTS]
    chains.append(chain(tokens=range(8), seed=b"another model"))
    for left, right in itertools.combinations(chains, 2):
        assert not set(left) & set(right)


def test_a_chain_key_depends_on_everything_before_it_and_on_nothing_behind() -> None:
    base, other_head, other_tail = chain(tokens=range(8)), chain(tokens=[9, *range(1, 8)]), chain(tokens=[*range(7), 9])
    assert not set(base) & set(other_head)
    assert base[0] == other_tail[0]
    assert base[1] != other_tail[1]
    assert all(len(key) == 32 for key in base)


def test_chain_keys_are_a_sha256_over_what_the_documentation_says_and_so_the_same_in_every_process() -> None:
    parts = (b"model", b"i7", b"stenant", b"")
    seed = hashlib.sha256(b"kvtier namespace 1" + b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()
    first = hashlib.sha256(seed + struct.pack("<4i", 0, 1, 2, 3)).digest()
    second = hashlib.sha256(first + struct.pack("<4i", 4, 5, 6, 7)).digest()
    assert chain(tokens=range(8), lora_id=7, cache_salt="tenant") == [first, second]


def test_neither_parts_nor_tokens_can_be_shifted_into_each_other() -> None:
    assert chain(tokens=range(4), lora_id=1, lora_digest=b"a" * 32) != chain(tokens=range(4), cache_salt="d" + "a" * 32)
    assert chain(tokens=range(4), cache_salt="s") != chain(tokens=range(4), seed=b"models")


@pytest.mark.parametrize(("part", "expected"), [
    ({}, True), ({"cache_salt": "a"}, True), ({"lora_id": 1}, False), ({"lora_id": 1, "lora_digest": DIGEST}, True),
    ({"extra_ids": [0, 0]}, False), ({"extra_ids": [0, 0], "extra_ids_digest": DIGEST}, True),
    ({"lora_id": 1, "lora_digest": DIGEST, "extra_ids": [0, 0]}, False),
])
def test_process_local_ids_persist_only_with_a_stable_digest(part: dict[str, Any], expected: bool) -> None:
    assert Namespace(b"", Request(1, [1, 2], **part)).is_persistent is expected


def test_a_surrogate_in_a_salt_is_a_salt_like_any_other() -> None:
    assert chain(tokens=range(4), cache_salt="\udc80") != chain(tokens=range(4), cache_salt="\udc81")


# -- tokens ----------------------------------------------------------------------------------------------------------------

EXPECTED = array("i", [1, -2, 2**31 - 1, -(2**31)]).tobytes()


@pytest.mark.parametrize("tokens", [
    [1, -2, 2**31 - 1, -(2**31)],
    (1, -2, 2**31 - 1, -(2**31)),
    array("i", [1, -2, 2**31 - 1, -(2**31)]),
    array("q", [1, -2, 2**31 - 1, -(2**31)]),
    np.array([1, -2, 2**31 - 1, -(2**31)], dtype=np.int32),
    np.array([1, -2, 2**31 - 1, -(2**31)], dtype=np.int64),
    np.array([1, -2, 2**31 - 1, -(2**31)], dtype=">i4"),
    np.array([1, 0, -2, 0, 2**31 - 1, 0, -(2**31), 0], dtype=np.int32)[::2],
    [np.int32(1), np.int64(-2), np.int64(2**31 - 1), np.int32(-(2**31))],
    memoryview(array("i", [1, -2, 2**31 - 1, -(2**31)])),
    memoryview(array("i", [1, -2, 2**31 - 1, -(2**31)]).tobytes()).cast("i"),
], ids=lambda tokens: type(tokens).__name__)
def test_every_kind_of_token_sequence_gives_the_same_bytes(tokens: object) -> None:
    assert token_bytes(tokens) == EXPECTED


def test_a_range_is_a_token_sequence() -> None:
    assert token_bytes(range(3)) == array("i", [0, 1, 2]).tobytes()


def test_tokens_are_copied() -> None:
    tokens = np.array([1, 2], dtype=np.int32)
    request = Request(1, tokens)
    tokens[0] = 9
    assert request.token_bytes == array("i", [1, 2]).tobytes()


@pytest.mark.parametrize(("tokens", "message"), [
    ([1, 2**31], r"tokens\[1\]=2147483648: outside int32"),
    ([-(2**31) - 1], r"tokens\[0\]=-2147483649: outside int32"),
    (np.array([1, 2**40]), r"tokens\[1\]=1099511627776: outside int32"),
    ([1, np.int64(2**40)], r"tokens\[1\].*outside int32"),
    ([1, 2.0], r"tokens\[1\]=2.0: token ids are whole numbers"),
    (["a"], r"tokens\[0\]='a'"),
    ([1, None], r"tokens\[1\]=None"),
    ([True, False], r"tokens\[0\]=True"),
    ([3, True], r"tokens\[1\]=True"),
    (np.array([True, False]), "format"),
    (np.array([1.0, 2.0]), "format"),
    (np.array([1.0, 2.0], dtype=np.float32), "format"),
    (np.zeros((2, 2), dtype=np.int32), "2 dimensions"),
    (np.int32(5), "0 dimensions"),
    (b"\x01\x00\x00\x00", "format"),
    ("hello", "str"),
    ({1: 2}, "dict"),
    (5, "int"),
    (None, "NoneType"),
    (iter([1, 2]), "pass a sequence"),
])
def test_what_is_no_sequence_of_int32_is_refused_and_the_position_is_named(tokens: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        token_bytes(tokens)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1))
def test_tokens_come_back_as_they_went_in(tokens: list[int]) -> None:
    keys = TokenKeys(Request(1, tokens), 4)
    assert keys.token_ids(0, len(tokens)) == tokens


@given(st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**64 - 1)), min_size=1))
def test_tokens_with_extra_ids_come_back_as_they_went_in(pairs: list[tuple[int, int]]) -> None:
    tokens = [token for token, _extra in pairs]
    keys = TokenKeys(Request(1, tokens, extra_ids=[extra for _token, extra in pairs]), 4)
    assert keys.token_ids(0, len(tokens)) == tokens


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20),
       st.lists(st.one_of(st.integers(0, 9), st.tuples(st.integers(0, 20))), max_size=20), st.booleans())
def test_appending_and_cutting_is_the_same_as_a_new_prompt(prompt: list[int], changes: list[Any], with_extra: bool) -> None:
    extra = [7] * len(prompt) if with_extra else None
    keys = TokenKeys(Request(1, prompt, extra_ids=extra), 4)
    tokens, extras = list(prompt), list(extra or [])
    for change in changes:
        if isinstance(change, tuple):
            keep = min(max(change[0], 1), len(tokens))
            keys.truncate(keep)
            del tokens[keep:], extras[keep:]
        else:
            keys.append(change)
            tokens.append(change)
            extras.append(0)
    expected = TokenKeys(Request(1, tokens, extra_ids=extras[:len(tokens)] if with_extra else None), 4)
    assert keys.num_tokens == len(tokens)
    assert keys.data() == expected.data()
    assert keys.block_key(0, min(4, len(tokens))) == expected.block_key(0, min(4, len(tokens)))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.lists(st.integers(0, 9), max_size=12), st.booleans(), st.integers(0, 24))
def test_parts_of_a_growing_sequence_are_the_same_before_and_after_its_tokens_are_joined(
        prompt: list[int], appended: list[int], with_extra: bool, asked: int) -> None:
    keys = TokenKeys(Request(1, prompt, extra_ids=[7] * len(prompt) if with_extra else None), 4)
    for token in appended:
        keys.append(token)
    tokens = prompt + appended
    blocks = [(number, min(4, len(tokens) - 4 * number)) for number in range((len(tokens) + 3) // 4)]
    before = [keys.block_key(number, num_tokens) for number, num_tokens in blocks]
    assert [keys.token_ids(start, len(tokens)) for start in range(len(tokens))] == [tokens[start:] for start in range(len(tokens))]
    count = min(asked, len(tokens))
    start = keys.data_of(count)[:count * keys.width]
    assert keys.data().startswith(start)
    assert len(start) == count * keys.width
    assert [keys.block_key(number, num_tokens) for number, num_tokens in blocks] == before
    assert b"".join(before) == keys.data()


# -- runs ------------------------------------------------------------------------------------------------------------------


def chain_of(run: KeyRun) -> list[bytes]:
    return [run.chain_key(position) for position in range(run.num_blocks)]


def plain_run(tokens: list[int], parent: KeyRun | None = None, **keywords: Any) -> KeyRun:
    """Blocks of two tokens."""
    request = Request(1, tokens, **keywords)
    keys = TokenKeys(request, 2)
    return KeyRun(Namespace(b"model", request), keys.block_bytes, keys.data(), len(tokens) // 2, True, parent, [])


def test_a_run_names_its_blocks_as_a_prompt_does() -> None:
    run = plain_run([1, 2, 3, 4, 5, 6])
    assert chain_of(run) == chain(2, tokens=[1, 2, 3, 4, 5, 6])
    assert [run.token_ids(position) for position in range(3)] == [(1, 2), (3, 4), (5, 6)]
    assert [run.multimodal(position) for position in range(3)] == [()] * 3
    assert [run.parent_chain_key(position) for position in range(3)] == [None, run.chain_key(0), run.chain_key(1)]


@pytest.mark.parametrize("asked", [None, 0, 1, 3])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_parts_of_a_run_have_its_chain_keys_whoever_asked_before(asked: int | None, cut: int) -> None:
    expected = chain(2, tokens=list(range(8)))
    run = plain_run(list(range(8)))
    if asked is not None:
        run.chain_key(asked)
    upper = run.upper(cut)
    lower = run.lower(cut, 4, upper)
    grown = run.grown(cut, array("i", [90, 91]).tobytes(), 1)
    assert lower.parent_chain_key(0) == expected[cut - 1]
    assert chain_of(lower) == expected[cut:]
    assert chain_of(upper) == expected[:cut]
    assert chain_of(grown) == chain(2, tokens=[*range(2 * cut), 90, 91])
    assert chain_of(run) == expected


def test_a_parent_may_be_exchanged_for_an_equal_one() -> None:
    """As when the tree splits it; the run below is the same afterwards, whether it was asked before or not."""
    expected = chain(2, tokens=list(range(8)))
    above = plain_run(list(range(6)))
    below = plain_run([6, 7], above)
    upper = above.upper(1)
    below.parent = above.lower(1, 3, upper)
    assert chain_of(below) == expected[3:]


def test_a_run_with_an_item_tells_tokens_and_item_apart() -> None:
    """Also where the tokens' bytes look like a suffix."""
    tokens = [int.from_bytes(b"MMMM", "little")] * 40
    items = (MultimodalItem(OTHER_IMAGE, [(30, 4)]), MultimodalItem(IMAGE, [(2, 2), (20, 3)]))
    request = Request(1, tokens, multimodal=items)
    keys = TokenKeys(request, 32)
    for block, num_tokens in ((0, 32), (1, 8)):
        run = KeyRun(Namespace(b"", request), num_tokens * 4, keys.block_key(block, num_tokens), 1, False, None, [])
        assert run.token_ids(0) == tuple(tokens[:num_tokens])
        assert run.multimodal(0) == tuple(multimodal_keys(items, block * 32, block * 32 + 32))
        assert run.block_key(0) == keys.block_key(block, num_tokens)


def test_a_run_with_extra_ids_gives_the_token_ids_alone() -> None:
    run = plain_run([1, 2, 3, 4], extra_ids=[2**64 - 1, 0, 5, 6])
    assert [run.token_ids(position) for position in range(2)] == [(1, 2), (3, 4)]


# -- requests --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keywords", "message"), [
    ({"tokens": []}, "at least one token"),
    ({"tokens": [1], "lora_id": -1}, "lora_id=-1"),
    ({"tokens": [1], "lora_id": 1 << 64}, "lora_id"),
    ({"tokens": [1], "lora_id": True}, "lora_id"),
    ({"tokens": [1, 2], "extra_ids": [1]}, "1 extra_ids for 2 tokens"),
    ({"tokens": [1, 2], "extra_ids": [1, -1]}, r"extra_ids\[1\]=-1"),
    ({"tokens": [1, 2], "extra_ids": [1, 1 << 64]}, r"extra_ids\[1\]"),
    ({"tokens": [1], "beam_width": 0}, "beam_width=0"),
    ({"tokens": [1], "max_new_tokens": -1}, "max_new_tokens=-1"),
    ({"tokens": [1], "num_draft_tokens": -1}, "num_draft_tokens=-1"),
    ({"tokens": [1], "encoder_length": -1}, "encoder_length=-1"),
])
def test_a_malformed_request_is_refused_with_the_value_that_is_wrong(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Request(7, **keywords)


def test_a_request_id_is_a_whole_number() -> None:
    with pytest.raises(RequestError, match="id=True"):
        Request(True, [1])
