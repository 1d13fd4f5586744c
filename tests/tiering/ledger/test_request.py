"""Requests: checked once, when they are made. What is wrong is named, with its value and with what to pass instead."""

from __future__ import annotations

import copy
import inspect
import pickle
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtier.errors import KVTierError, RequestError
from kvtier.policies.retention import RetentionConfig
from kvtier.tiering.ledger.request import INT32_MAX, INT32_MIN, UINT64_MAX, MultimodalItem, Request, token_bytes

IMAGE = b"\x01" * 32
OTHER_IMAGE = b"\x02" * 32


class Tensor:
    """What a tensor of another library looks like: no buffer, but ``tolist()``."""

    def __init__(self, values: object) -> None:
        self.values = values

    def tolist(self) -> object:
        return self.values


# -- what is taken as it is given ----------------------------------------------------------------------------------------


def test_a_request_with_nothing_but_a_prompt_asks_for_nothing_special() -> None:
    request = Request(7, [1, 2, 3])
    assert (request.id, request.num_tokens) == (7, 3)
    assert (request.lora_id, request.cache_salt, request.extra_ids, request.multimodal) == (None, None, None, ())
    assert (request.lora_digest, request.extra_ids_digest, request.retention) == (None, None, None)
    assert (request.beam_width, request.max_new_tokens, request.num_draft_tokens, request.encoder_length) == (1, 16, 0, 0)
    assert (request.skip_read, request.skip_write) == (False, False)


def test_every_argument_is_kept() -> None:
    item = MultimodalItem(IMAGE, [(0, 2)])
    retention = RetentionConfig(decode_priority=80)
    request = Request(7, (1, 2, 3), lora_id=4, cache_salt="a", extra_ids=[5, 6, 7], multimodal=[item], retention=retention,
                      max_new_tokens=8, num_draft_tokens=9, skip_read=True, skip_write=True, lora_digest=IMAGE,
                      extra_ids_digest=OTHER_IMAGE)
    assert (request.lora_id, request.cache_salt, request.extra_ids, request.multimodal) == (4, "a", (5, 6, 7), (item,))
    assert (request.lora_digest, request.extra_ids_digest, request.retention) == (IMAGE, OTHER_IMAGE, retention)
    assert (request.max_new_tokens, request.num_draft_tokens, request.skip_read, request.skip_write) == (8, 9, True, True)


@pytest.mark.parametrize("request_id", [-1, 0, UINT64_MAX, 1 << 80])
def test_any_whole_number_is_a_request_id(request_id: int) -> None:
    assert Request(request_id, [1]).id == request_id


@pytest.mark.parametrize("token", [INT32_MIN, -1, 0, INT32_MAX])
def test_the_bounds_of_a_token_id_are_allowed(token: int) -> None:
    assert Request(1, [token]).token_bytes == array("i", [token]).tobytes()


@pytest.mark.parametrize("value", [0, UINT64_MAX])
def test_the_bounds_of_an_adapter_id_and_of_an_extra_id_are_allowed(value: int) -> None:
    request = Request(1, [1], lora_id=value, extra_ids=[value])
    assert (request.lora_id, request.extra_ids) == (value, (value,))


def test_an_empty_salt_is_a_salt() -> None:
    assert Request(1, [1], cache_salt="").cache_salt == ""


def test_an_item_may_reach_to_the_end_of_the_prompt() -> None:
    assert Request(1, [1, 2, 3], multimodal=[MultimodalItem(IMAGE, [(0, 1), (1, 2)])]).multimodal[0].runs == ((0, 1), (1, 2))


def test_items_may_be_woven_into_each_other() -> None:
    woven = [MultimodalItem(OTHER_IMAGE, [(1, 1)]), MultimodalItem(IMAGE, [(0, 1), (2, 1)])]
    assert Request(1, [1, 2, 3], multimodal=woven).multimodal == tuple(woven)


def test_changing_the_lists_a_request_was_made_from_does_not_change_the_request() -> None:
    tokens, extra_ids, runs = [1, 2], [3, 4], [(0, 1)]
    item = MultimodalItem(IMAGE, runs)
    items = [item]
    request = Request(1, tokens, extra_ids=extra_ids, multimodal=items)
    for given in (tokens, extra_ids, runs, items):
        given.clear()
    assert request.num_tokens == 2
    assert request.token_bytes == array("i", [1, 2]).tobytes()
    assert request.extra_ids == (3, 4)
    assert request.multimodal == (item,)
    assert item.runs == ((0, 1),)


def test_a_tensor_of_another_library_is_read_through_its_list() -> None:
    assert token_bytes(Tensor([1, -2])) == array("i", [1, -2]).tobytes()


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keywords", "message"), [
    ({"lora_id": -1}, r"lora_id=-1; pass a whole number from 0 to 2\^64-1"),
    ({"lora_id": UINT64_MAX + 1}, "lora_id=18446744073709551616; pass a whole number"),
    ({"extra_ids": []}, "0 extra_ids for 3 tokens; pass one for each token"),
    ({"extra_ids": [1, 2, 3, 4]}, "4 extra_ids for 3 tokens; pass one for each token"),
    ({"extra_ids": [1, -1, 2]}, r"extra_ids\[1\]=-1; pass whole numbers from 0 to 2\^64-1"),
    ({"extra_ids": [1, 2, UINT64_MAX + 1]}, r"extra_ids\[2\]=18446744073709551616; pass whole numbers"),
    ({"multimodal": [MultimodalItem(IMAGE, [(2, 2)])]}, "run ends at 4, the prompt has 3 tokens"),
    ({"multimodal": [MultimodalItem(IMAGE, [(3, 1)])]}, "run ends at 4, the prompt has 3 tokens"),
    ({"multimodal": [MultimodalItem(IMAGE, [(0, 1)]), MultimodalItem(OTHER_IMAGE, [(1, 1), (2, 9)])]}, "run ends at 11"),
    ({"multimodal": [MultimodalItem(IMAGE, [(0, 2)]), MultimodalItem(OTHER_IMAGE, [(1, 2)])]}, "begins at 1, another is at 0 to 1"),
    ({"multimodal": [MultimodalItem(OTHER_IMAGE, [(2, 1)]), MultimodalItem(IMAGE, [(0, 3)])]}, "begins at 2, another is at 0 to 2"),
    ({"multimodal": [MultimodalItem(IMAGE, [(0, 1)]), MultimodalItem(IMAGE, [(0, 1)])]}, "begins at 0, another is at 0 to 0"),
    ({"multimodal": [MultimodalItem(IMAGE, [(0, 1), (2, 1)]), MultimodalItem(OTHER_IMAGE, [(1, 2)])]}, "overlap"),
    ({"beam_width": 0}, "beam_width=0; must be a whole number of at least 1"),
    ({"max_new_tokens": -1}, "max_new_tokens=-1; must be a whole number of at least 0"),
    ({"num_draft_tokens": -1}, "num_draft_tokens=-1; must be a whole number of at least 0"),
    ({"encoder_length": -1}, "encoder_length=-1; must be a whole number of at least 0"),
    ({"encoder_length": 5, "encoder_digest": b"x"}, "encoder_digest=b'x'; a digest is 32 bytes"),
    ({"encoder_digest": bytes(32)}, "encoder_digest without encoder_length; pass both or neither"),
])
def test_each_bad_argument_is_refused_by_name_with_its_value_and_the_request(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^request 7: .*{message}"):
        Request(7, [1, 2, 3], **keywords)


@pytest.mark.parametrize(("keywords", "message"), [
    ({"lora_id": True}, "lora_id=True; pass a whole number"),
    ({"extra_ids": [True, 2, 3]}, r"extra_ids\[0\]=True; pass whole numbers"),
    ({"extra_ids": [1, 2.0, 3]}, r"extra_ids\[1\]=2.0; pass whole numbers"),
    ({"extra_ids": [1, None, 3]}, r"extra_ids\[1\]=None; pass whole numbers"),
    ({"extra_ids": ["a", 2, 3]}, r"extra_ids\[0\]='a'; pass whole numbers"),
    ({"beam_width": True}, "beam_width=True; must be a whole number"),
    ({"max_new_tokens": True}, "max_new_tokens=True; must be a whole number"),
    ({"num_draft_tokens": False}, "num_draft_tokens=False; must be a whole number"),
    ({"encoder_length": True}, "encoder_length=True; must be a whole number"),
    ({"lora_id": "1"}, "lora_id='1'; pass a whole number"),
    ({"lora_id": 1.0}, "lora_id=1.0; pass a whole number"),
    ({"cache_salt": 5}, "cache_salt=5; pass a string"),
    ({"cache_salt": b"a"}, "cache_salt=b'a'; pass a string"),
    ({"beam_width": None}, "beam_width=None; must be a whole number"),
    ({"max_new_tokens": 1.5}, "max_new_tokens=1.5; must be a whole number"),
    ({"num_draft_tokens": 0.0}, "num_draft_tokens=0.0; must be a whole number"),
    ({"encoder_length": "0"}, "encoder_length='0'; must be a whole number"),
])
def test_an_argument_of_another_type_is_refused_by_name_with_its_value(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^request 7: {message}"):
        Request(7, [1, 2, 3], **keywords)


@pytest.mark.parametrize("request_id", [True, False, "7", 7.0, None])
def test_a_request_id_of_another_type_is_refused(request_id: Any) -> None:
    with pytest.raises(RequestError, match=f"id={request_id!r}: a request id is a whole number"):
        Request(request_id, [1])


@pytest.mark.parametrize("tokens", [[], (), range(0), array("i"), np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64), Tensor([])],
                         ids=lambda tokens: type(tokens).__name__)
def test_a_prompt_has_at_least_one_token(tokens: object) -> None:
    with pytest.raises(RequestError, match=r"request 7: .*at least one token"):
        Request(7, tokens)


@pytest.mark.parametrize(("tokens", "message"), [
    ([1, INT32_MAX + 1], r"tokens\[1\]=2147483648: outside int32 .*vocabulary"),
    ([INT32_MIN - 1, 1], r"tokens\[0\]=-2147483649: outside int32"),
    (range(INT32_MAX, INT32_MAX + 2), r"tokens\[1\]=2147483648: outside int32"),
    (np.array([1, 2**31], dtype=np.uint32), r"tokens\[1\]=2147483648: outside int32"),
    ([1, True], r"tokens\[1\]=True: token ids are whole numbers"),
    ([1, 2.5], r"tokens\[1\]=2.5: token ids are whole numbers"),
    (np.zeros((3, 2), dtype=np.int64), "2 dimensions; pass one dimension"),
    (np.zeros(3, dtype=np.float16), "format 'e'; pass int32"),
    (Tensor([[1, 2], [3, 4]]), r"tokens\[0\] is a list: pass one dimension of token ids"),
    (Tensor([1.0]), r"tokens\[0\]=1.0: token ids are whole numbers"),
    (Tensor([True]), r"tokens\[0\]=True: token ids are whole numbers"),
    (Tensor(5), "tokens=Tensor: pass a sequence of ints"),
    ("hello", "tokens=str: pass a sequence of ints"),
    ({1, 2}, "tokens=set: pass a sequence of ints"),
    (b"\x01\x00\x00\x00", "format 'B'; pass int32"),
    (None, "tokens=NoneType: pass a sequence of ints"),
])
def test_a_prompt_that_is_no_row_of_int32_is_refused_with_what_is_wrong_in_it(tokens: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Request(7, tokens)


def test_the_caller_s_name_for_the_tokens_is_in_the_message() -> None:
    with pytest.raises(RequestError, match=r"draft\[0\]=2.0"):
        token_bytes([2.0], "draft")
    with pytest.raises(RequestError, match="draft: a buffer of format 'd'"):
        token_bytes(np.array([2.0]), "draft")


# -- items ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("runs", "message"), [
    ([], r"runs=\[\]"),
    ([(0, 0)], r"\(0, 0\) after position 0; .*positive length"),
    ([(0, -1)], r"\(0, -1\) after position 0"),
    ([(-1, 2)], r"\(-1, 2\) after position 0"),
    ([(0, 4), (3, 1)], r"\(3, 1\) after position 4; runs ascend, do not overlap"),
    ([(4, 2), (0, 2)], r"\(0, 2\) after position 6"),
])
def test_an_item_s_runs_ascend_do_not_overlap_and_are_not_empty(runs: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        MultimodalItem(IMAGE, runs)


@pytest.mark.parametrize("digest", [b"", IMAGE[1:], IMAGE + b"\x01"])
def test_an_item_s_digest_is_32_bytes_long(digest: bytes) -> None:
    with pytest.raises(RequestError, match=r"digest=b.*: a content digest is 32 bytes"):
        MultimodalItem(digest, [(0, 1)])


def test_a_refused_request_is_one_of_our_own_errors() -> None:
    with pytest.raises(KVTierError):
        Request(7, [])


@pytest.mark.parametrize("keywords", [
    {"lora_id": 1, "lora_digest": "abc"}, {"lora_id": 1, "lora_digest": b"short"},
    {"lora_digest": bytes(32)}, {"extra_ids": [1], "extra_ids_digest": b""}, {"extra_ids_digest": bytes(32)}])
def test_a_digest_is_32_bytes_and_belongs_to_ids(keywords: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="digest"):
        Request(1, [5], **keywords)


@pytest.mark.parametrize("runs", [[(0, 1.5)], [(0, 1, 2)], [0, 1], 5, []])
def test_a_malformed_run_is_refused_when_the_item_is_made(runs: object) -> None:
    with pytest.raises(RequestError, match="run"):
        MultimodalItem(bytes(32), runs)


@pytest.mark.parametrize("keywords", [{"multimodal": [5]}, {"retention": "x"}, {"extra_ids": 5}])
def test_an_argument_of_another_kind_is_refused(keywords: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        Request(1, [5], **keywords)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_request_can_be_copied_and_sent_to_another_process(again: Callable[[Any], Any]) -> None:
    keywords: dict[str, Any] = {
        "lora_id": 3, "cache_salt": "tenant", "extra_ids": (1, UINT64_MAX), "retention": RetentionConfig(decode_priority=7),
        "beam_width": 2, "max_new_tokens": 9, "num_draft_tokens": 4, "encoder_length": 6, "skip_read": True, "skip_write": True,
        "lora_digest": b"\x03" * 32, "extra_ids_digest": b"\x04" * 32, "encoder_digest": b"\x05" * 32}
    made = Request(7, [5, INT32_MIN], multimodal=[MultimodalItem(IMAGE, [(0, 1), (1, 1)])], **keywords)
    assert keywords.keys() | {"id", "tokens", "multimodal"} == inspect.signature(Request).parameters.keys(), "every argument is looked at"
    other = again(made)
    assert other is not made
    assert (other.id, other.token_bytes, other.num_tokens) == (7, made.token_bytes, 2)
    assert {name: getattr(other, name) for name in keywords} == keywords
    [item] = other.multimodal
    assert (item.digest, item.runs) == (IMAGE, ((0, 1), (1, 1)))
