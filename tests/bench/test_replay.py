"""A trace through the real ledger: exactly LRU where that is asked for, every block accounted for, and what the command says."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.bench import slow_stages
from kvtier.bench.replay import ReplaySettings, replay
from kvtier.bench.replay_report import ReplayOptions, replay_rows, run_replay
from kvtier.bench.trace import Trace
from kvtier.bench.trace_synthetic import SHAPES, synthetic_trace, write_synthetic
from kvtier.errors import ConfigError
from kvtier.policies.curves import lru_curve
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY
from kvtier.tiering.ledger.rules import LedgerRules


def lru(trace: Trace, capacity: int) -> int:
    """Hit blocks of textbook LRU: one list of blocks. Of a request, the last block is used first, so that a prefix outlives what is
    behind it; the whole prompt takes its place while it is served."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in trace.prompts():
        prompt = ids.tolist()[:capacity]
        reused = 0
        while reused < len(prompt) - 1 and prompt[reused] in cached:
            reused += 1
        hits += reused
        for block in prompt[:reused]:
            cached.move_to_end(block)
        while len(cached) + len(prompt) - reused > capacity:
            cached.popitem(last=False)
        for block in reversed(prompt[:-1]):
            cached[block] = None
            cached.move_to_end(block)
    return hits


def settings(*num_blocks: int, policy: str = "lru", **rules: object) -> ReplaySettings:
    primary, secondary, nvme = (*num_blocks, 0, 0)[:3]
    return ReplaySettings((primary, secondary, nvme), LedgerRules(max_events=0, policy=policy, **rules))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("percent", [0.5, 3, 10, 40])
def test_lru_is_exactly_textbook_lru(shape: str, percent: float) -> None:
    trace = synthetic_trace(shape, 400, seed=2)
    capacity = int(trace.num_unique * percent / 100) + 1
    found = replay(trace, settings(capacity))
    assert found.hit_blocks == [lru(trace, capacity), 0, 0]
    assert found.hit_tokens == [found.hit_blocks[0] * trace.block, 0, 0]
    assert found.moves == {}


def test_levels_together_hold_what_one_level_of_their_size_does() -> None:
    trace = synthetic_trace("chats", 600)
    for sizes in ((200, 600, 0), (100, 300, 400)):
        found = replay(trace, settings(*sizes))
        assert sum(found.hit_blocks) == pytest.approx(lru(trace, sum(sizes)), rel=0.1)
        assert sum(found.hit_blocks) > 1.3 * lru(trace, sizes[0])


def test_every_block_that_comes_up_is_counted_on_its_level_and_its_way() -> None:
    trace = synthetic_trace("chats", 600)
    found = replay(trace, settings(100, 200, 600))
    assert found.moves[SECONDARY, PRIMARY] == found.hit_blocks[SECONDARY]
    assert found.moves[NVME, PRIMARY] == found.hit_blocks[NVME] > 0
    assert found.writes_per_hit == found.moves[SECONDARY, NVME] / found.hit_blocks[NVME]
    assert sum(moment.input_tokens for moment in found.moments) == found.input_tokens == trace.input_tokens
    assert [sum(moment.hit_tokens[level] for moment in found.moments) for level in range(3)] == found.hit_tokens
    assert sum(moment.dropped for moment in found.moments) == found.dropped
    assert sum(moment.nvme_writes for moment in found.moments) == found.nvme_writes
    assert found.moments[-1].content[PRIMARY] <= 100


def test_without_backings_more_is_written() -> None:
    trace = synthetic_trace("chats", 600)
    assert replay(trace, settings(100, 300, 900)).nvme_writes < replay(trace, settings(100, 300, 900, keep_backing=False)).nvme_writes


def test_simulated_time_makes_requests_wait_and_changes_no_count_of_input() -> None:
    trace = synthetic_trace("chats", 300)
    at_once = replay(trace, settings(100, 200, 600))
    slow = replay(trace, ReplaySettings((100, 200, 600), LedgerRules(policy="lru"), {(NVME, PRIMARY): 0.01, (SECONDARY, NVME): 0.02,
                                                                                     (SECONDARY, PRIMARY): 0.001}))
    assert at_once.load_seconds == 0.0
    assert slow.load_seconds >= 0.01 * slow.hit_blocks[NVME] > 0
    assert slow.input_tokens == at_once.input_tokens
    assert sum(slow.hit_blocks) <= sum(at_once.hit_blocks) * 1.02


def test_a_prompt_larger_than_the_primary_level_is_cut_and_counted() -> None:
    trace = synthetic_trace("agents", 200)
    found = replay(trace, settings(8))
    assert found.cut == trace.num_requests
    assert found.input_tokens == trace.input_tokens


@pytest.mark.parametrize(("sizes", "said"), [((0, 5, 0), "primary=0 blocks"), ((5, 0, 5), "nvme=5 blocks without a secondary")])
def test_levels_that_cannot_be_are_refused(sizes: tuple[int, int, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replay(synthetic_trace("scan", 5), settings(*sizes))


def options(folder: Path, **given: object) -> ReplayOptions:
    file = folder / "trace.jsonl"
    if not file.exists():
        write_synthetic(file, "chats", 200)
    return ReplayOptions(file, **({"primary": "200 blocks"} | given))  # type: ignore[arg-type]


def test_the_command_prints_a_table_and_writes_the_figures_and_the_time_line(tmp_path: Path) -> None:
    console = Console(record=True, width=100)
    json_file = tmp_path / "out.json"
    assert run_replay(options(tmp_path, secondary="20%", nvme="64GiB", json_file=json_file, model="llama-3.1-8b"), console) == 0
    said = console.export_text()
    assert "secondary" in said
    assert "evicted for good" in said
    document = json.loads(json_file.read_text())
    rows = {row["name"]: row["median"] for row in document["results"]}
    parts = [rows[f"hit_token_ratio/{level}"] for level in ("primary", "secondary", "nvme")]
    assert rows["hit_token_ratio"] == pytest.approx(sum(parts))
    assert document["config"]["blocks"]["primary"] == 200
    assert document["config"]["blocks"]["nvme"] == (64 << 30) // (512 * 131072)
    assert document["config"]["block_bytes"] == 512 * 131072
    assert len(document["timeline"]) >= 100


def test_without_a_terminal_a_long_replay_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(slow_stages, "EVERY", 1e9)
    run_replay(options(tmp_path), Console(quiet=True))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(slow_stages, "EVERY", 0.0)
    run_replay(options(tmp_path), Console(quiet=True))
    assert re.search(r"^kvtier: replay: \d+ of \d+ requests$", capsys.readouterr().err, re.MULTILINE)


def test_rows_are_in_bytes_of_the_models_blocks(tmp_path: Path) -> None:
    trace = synthetic_trace("chats", 300)
    found = replay(trace, settings(100, 200, 600))
    rows = {row.name: row.median for row in replay_rows(found, 1000)}
    assert rows["moved/secondary->nvme"] == pytest.approx(found.nvme_writes * 1000 / 1e9)
    assert rows["written/primary"] == pytest.approx((found.moves[1, 0] + found.moves[2, 0]) * 1000 / 1e9)


@pytest.mark.parametrize(("given", "said"), [
    ({"json_file": Path(__file__, "out.json")}, "cannot be written"), ({"primary": "5"}, "--primary='5': a size needs a unit"),
    ({"policy": "best"}, "--policy='best': unknown"), ({"model": "llama-3-8"}, "--model='llama-3-8': .*did you mean llama-3-8b"),
    ({"secondary": "1KiB"}, "--secondary='1KiB': less than one block"),
    ({"primary": "0.001%"}, "--primary='0.001%': less than one of the trace's"),
    ({"primary": "2000000000 blocks"}, "2000000000 blocks, more than the 16777216 that can be replayed"),
    ({"secondary": "9000TiB"}, "--secondary='9000TiB': .* more than the 16777216 that can be replayed"),
    ({"dtype": "int3"}, "--dtype='int3'"), ({"write_ahead_share": 2.0}, "--write-ahead-share=2.0: a share from 0"),
    ({"copy_bandwidth": "fast"}, "--copy-bandwidth='fast': a rate is"),
    ({"nvme_bandwidth": "1GB"}, "--nvme-bandwidth='1GB': a rate is"),
    ({"primary": "0 blocks"}, "--primary='0 blocks': the primary level needs"),
    ({"secondary": "0 blocks", "nvme": "5 blocks"}, "give --secondary at least 1 block"), ({"block": 16}, "--block 512"),
])
def test_bad_input_is_refused_and_nothing_is_written(tmp_path: Path, given: dict[str, object], said: str) -> None:
    before = options(tmp_path)
    files = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=said):
        run_replay(options(tmp_path, **({"json_file": tmp_path / "out.json"} | given)), Console(quiet=True))
    assert sorted(tmp_path.iterdir()) == files == [before.trace]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_time_lines_are_drawn(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot.{kind}"
    assert run_replay(options(tmp_path, plot_file=file), Console(quiet=True)) == 0
    assert file.stat().st_size > 5000
    with pytest.raises(ConfigError, match="nonsense"):
        run_replay(options(tmp_path, plot_file=tmp_path / "plot.nonsense"), Console(quiet=True))
    assert not (tmp_path / "plot.nonsense").exists()


def test_the_curve_in_one_pass_is_what_replays_of_each_size_find() -> None:
    trace = synthetic_trace("chats", 500, seed=3)
    curve = lru_curve(trace.reusable_prompts(), trace.num_unique)
    for capacity in (60, 200, 500, 1500):
        assert curve.at(capacity - 1) == replay(trace, settings(capacity)).hit_blocks[0]  # one slot is left empty by the last block


@pytest.mark.parametrize("shape", SHAPES)
def test_the_default_policy_never_finds_much_less_than_lru(shape: str) -> None:
    trace = synthetic_trace(shape, 1500, seed=5)
    for percent in (1, 3, 10, 30):
        capacity = int(trace.num_unique * percent / 100)
        default, plain = (replay(trace, settings(capacity, policy=policy)).hit_ratio for policy in ("default", "lru"))
        assert default >= plain - 0.003, f"{percent} %"


def test_the_default_policy_finds_much_more_where_popular_documents_meet_a_stream_of_others() -> None:
    trace = synthetic_trace("documents", 3000, seed=6)
    capacity = trace.num_unique // 50
    default, plain = (replay(trace, settings(capacity, policy=policy)).hit_ratio for policy in ("default", "lru"))
    assert default > plain + 0.02


def test_a_replay_is_the_same_every_time() -> None:
    trace = synthetic_trace("documents", 600)
    first, second = (replay(trace, settings(60, 120, 300, policy="default")) for _ in range(2))
    assert (first.hit_blocks, first.moves, first.dropped) == (second.hit_blocks, second.moves, second.dropped)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rules", [{}, {"keep_backing": False}, {"nvme_min_uses": 1}, {"nvme_max_depth": 6}],
                         ids=["plain", "no backings", "min uses", "max depth"])
def test_moves_that_end_at_once_leave_behind_what_moves_that_take_no_time_do(shape: str, rules: dict[str, object]) -> None:
    """Those that take no time go the way of simulated time, one by one."""
    trace = synthetic_trace(shape, 500, seed=4)
    sizes = int(0.03 * trace.num_unique) + 20, int(0.1 * trace.num_unique) + 40, int(0.3 * trace.num_unique)
    for policy in ("default", "lru"):
        at_once = settings(*sizes, policy=policy, **rules)
        one_by_one = settings(*sizes, policy=policy, **rules)
        assert replay(trace, at_once) == replay(trace, ReplaySettings(sizes, one_by_one.rules, {(PRIMARY, SECONDARY): 0.0}))


def test_what_is_kept_off_nvme_is_not_written_there() -> None:
    trace = synthetic_trace("chats", 900)
    everything = replay(trace, settings(60, 120, 600))
    seen = replay(trace, settings(60, 120, 600, nvme_min_uses=1))
    shallow = replay(trace, settings(60, 120, 600, nvme_max_depth=5))
    assert 0 < seen.nvme_writes < 0.6 * everything.nvme_writes
    assert 0 < shallow.nvme_writes < everything.nvme_writes / 2
    assert replay(trace, settings(60, 120, 600, nvme_offload_min_priority=36)).nvme_writes == 0
