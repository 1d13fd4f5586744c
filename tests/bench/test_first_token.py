"""Time to first token of a stored prefix: the row, and that a prefix which was not read back is no measurement."""

from __future__ import annotations

import pytest

from kvtier.bench.demo_model import load_demo_model
from kvtier.bench.first_token import OURS, RECOMPUTE, ROW_NAME, _FirstToken, first_token_row, measure_first_token
from kvtier.errors import TransferError


@pytest.fixture(scope="module")
def loaded(chat_model_folder):
    return load_demo_model(chat_model_folder)


def test_the_row_holds_reading_against_recomputing(loaded, tmp_path):
    said: list[str] = []
    row = first_token_row(tmp_path / "nvme", quick=True, model=loaded, prefix_tokens=300, say=said.append)
    assert row.name == ROW_NAME
    assert row.unit == "s"
    assert 0 < row.low <= row.median <= row.high
    assert row.limit is not None
    assert row.limit.name.startswith("recomputing 320 tokens")
    assert row.ratio is not None
    assert said[-7].startswith("storing 320 tokens;")
    assert said[-6:] == ["a round to warm up", *(f"round {number} of 5" for number in range(1, 6))]


def test_both_ways_are_timed_in_every_round(loaded, tmp_path):
    measured = measure_first_token(loaded, tmp_path / "nvme", list(range(3, 67)), [5, 6, 7], rounds=3)
    assert measured.rounds == 3
    assert measured.has(OURS)
    assert measured.has(RECOMPUTE)


def test_a_prefix_that_did_not_come_from_nvme_is_no_measurement(loaded, tmp_path):
    with _FirstToken(loaded, tmp_path / "nvme", list(range(3, 67)), [5, 6, 7]) as bench:
        bench.store()
        slab = tmp_path / "nvme" / "group-0.slab"
        content = bytearray(slab.read_bytes())
        for position in range(4096, len(content), 997):
            content[position] ^= 1
        slab.write_bytes(content)
        bench.open()
        with pytest.raises(TransferError, match="0 tokens came from NVMe instead of 64"):
            bench.time(skip_read=False)


def test_a_first_token_that_differs_is_an_error(loaded, tmp_path):
    with _FirstToken(loaded, tmp_path / "nvme", list(range(3, 67)), [5, 6, 7]) as bench:
        bench.store()
        bench.open()
        bench.time(skip_read=True)
        bench._reference.tokens[0] += 1
        bench._reference.top_gaps[0] = 1.0
        bench.close()
        bench.open()
        with pytest.raises(TransferError, match="blocks read back differ"):
            bench.time(skip_read=False)


def test_the_model_is_given_back(loaded, tmp_path):
    attention = loaded.model.config._attn_implementation
    bench = _FirstToken(loaded, tmp_path / "nvme", list(range(3, 67)), [5])
    bench.open()
    assert loaded.model.config._attn_implementation == "kvtier"
    bench.close()
    assert loaded.model.config._attn_implementation == attention
