"""Sizes from a trace: the curve, what is recommended and why, and what the command writes."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from kvtier import TierConfig
from kvtier.bench.report import write_json
from kvtier.bench.trace_synthetic import synthetic_trace, write_synthetic
from kvtier.bench.tune import Curve, Point, Speeds, capacities_of, curve_of, recommend, speeds_from
from kvtier.bench.tune_report import TuneOptions, run_tune, written_size
from kvtier.errors import ConfigError
from kvtier.pools.sizing import parse_size

TRACE = synthetic_trace("chats", 300)
FAST = Speeds(1e12, 1e11, 1e11, ())
BLOCK_BYTES = 1 << 20


def line(*shares: float) -> Curve:
    """A curve through (100, 200, ... blocks; these shares)."""
    return Curve([Point(100 * number, share, share) for number, share in enumerate(shares, 1)], 1.0, 0.0)


def test_the_curve_rises_to_what_is_reused_with_everything_kept_and_stays_below_the_optimum() -> None:
    curve = curve_of(TRACE)
    assert curve.rate == 1.0
    assert curve.error == 0.0
    assert all(before.lru <= after.lru for before, after in zip(curve.points, curve.points[1:], strict=False))
    assert all(point.lru <= point.optimum + 1e-9 for point in curve.points)
    assert curve.points[-1].lru == pytest.approx(curve.points[-1].optimum, abs=0.002)
    assert curve.at(curve.points[3].blocks) == curve.points[3].lru
    assert [point.blocks for point in curve.points] == capacities_of(TRACE.num_unique)


def test_a_sampled_curve_says_its_error_and_keeps_it() -> None:
    exact = curve_of(TRACE)
    sampled = curve_of(TRACE, 0.5)
    assert 0 < sampled.error < 0.2
    assert max(abs(left.lru - right.lru) for left, right in zip(exact.points, sampled.points, strict=True)) < 1.5 * sampled.error
    with pytest.raises(ConfigError, match=r"sample=1\.5: a share"):
        curve_of(TRACE, 1.5)


def test_each_level_ends_where_twice_as_much_buys_next_to_nothing() -> None:
    curve = line(0.1, 0.3, 0.5, 0.505, 0.505, 0.506, 0.506)
    secondary, nvme = recommend(curve, TRACE, BLOCK_BYTES, 100, 600, 600, FAST, 1000.0)
    assert 150 <= secondary.blocks <= 220
    assert secondary.added == pytest.approx(curve.at(100 + secondary.blocks) - 0.1)
    assert secondary.seconds_saved > 0
    assert "twice as much would add less than 1 %" in secondary.reason
    assert nvme.blocks == 0
    assert "it would add" in nvme.reason


def test_too_little_room_is_said_and_the_next_level_takes_the_rest() -> None:
    secondary, nvme = recommend(line(0.1, 0.3, 0.5, 0.7, 0.9, 0.9), TRACE, BLOCK_BYTES, 100, 100, 5000, FAST, 1000.0)
    assert secondary.blocks == 100
    assert secondary.reason == "all there is room for"
    assert secondary.next_gain == pytest.approx(0.2)
    assert nvme.reused == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(("speeds", "room", "why"), [
    (Speeds(1e12, None, None, ()), 100, "its speed was not measured"), (Speeds(1e12, 1e5, None, ()), 100, "loading a block takes"),
    (FAST, 0, "there is no room for it")])
def test_a_level_that_does_not_pay_is_not_recommended(speeds: Speeds, room: int, why: str) -> None:
    nvme = recommend(line(0.1, 0.3, 0.5, 0.7), TRACE, BLOCK_BYTES, 100, 100, room, speeds, 1000.0)[1]
    assert nvme.blocks == 0
    assert why in nvme.reason


def figures(folder: Path, **rows: float) -> Path:
    names = {"copy": "copy/secondary->primary/2MiB", "read": "nvme/read/2MiB", "write": "nvme/write/2MiB"}
    file = folder / f"{'-'.join(rows)}.json"
    write_json(file, {"results": [{"name": names[key], "unit": "GB/s", "median": value} for key, value in rows.items()]})
    return file


def test_speeds_come_from_the_figures_of_the_benchmarks(tmp_path: Path) -> None:
    speeds = speeds_from([figures(tmp_path, copy=20.0), figures(tmp_path, read=4.0, write=3.0)])
    assert (speeds.copy, speeds.nvme_read, speeds.nvme_write) == (20e9, 4e9, 3e9)
    assert len(speeds.sources) == 3
    (tmp_path / "other.json").write_text('{"results": []}')
    (tmp_path / "broken.json").write_text('{"results"')
    for name, said in (("other", "has neither"), ("broken", "not the figures of a benchmark"), ("missing", "cannot be read")):
        with pytest.raises(ConfigError, match=said):
            speeds_from([tmp_path / f"{name}.json"])


def options(folder: Path, **given: object) -> TuneOptions:
    file = folder / "trace.jsonl"
    if not file.exists():
        write_synthetic(file, "chats", 300)
    measured = [figures(folder, copy=20.0), figures(folder, read=4.0, write=3.0)]
    usual = {"primary": "8GiB", "host_limit": "30GiB", "nvme_limit": "500GiB", "measured": measured, "endurance": "100TB"}
    return TuneOptions(file, **(usual | given))  # type: ignore[arg-type]


class Page(HTMLParser):
    """Which elements a page has; every one that needs an end has one, in order; and what it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        named = [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.fetched += [value for value in named if not value.startswith("#")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_command_says_what_each_size_buys_and_writes_figures_and_a_configuration(tmp_path: Path,
                                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    console = Console(record=True, width=300)
    json_file, config_file = tmp_path / "out.json", tmp_path / "tier.yaml"
    assert run_tune(options(tmp_path, json_file=json_file, config_file=config_file, nvme_directory=Path('a "folder"')), console) == 0
    said = console.export_text()
    assert "of input tokens reused" in said
    assert "saves" in said
    assert "written a day" in said
    assert "an endurance of 100TB lasts" in said
    document = json.loads(json_file.read_text())
    rows = {row["name"]: row["median"] for row in document["results"]}
    assert rows["tune/secondary"] <= 30 << 30
    assert rows["tune/nvme/written"] > 0
    assert len(document["curve"]) > 20
    config = TierConfig.from_file(config_file)
    assert parse_size(config.secondary, "secondary").amount == rows["tune/secondary"]
    assert config.primary == "8GiB"
    assert config.policy == "default"
    assert config.nvme_directory == tmp_path / 'a "folder"', "wherever the engine is started"


def test_sparing_the_drive_is_offered_with_what_it_costs_and_not_done_by_itself(tmp_path: Path) -> None:
    """The file is what was replayed. What would make the drive last longer stands beside it, replayed as well."""
    console = Console(record=True, width=300)
    config_file = tmp_path / "tier.yaml"
    run_tune(options(tmp_path, config_file=config_file, endurance="1TB"), console)
    said = console.export_text()
    [offered] = [line for line in said.splitlines() if line.startswith("with nvme_min_uses: 1 the drive ")]
    reused = re.search(r"([\d.]+) % of input tokens reused, replayed with these sizes", said)
    assert reused
    assert f"are reused instead of {reused[1]} %" in offered
    assert TierConfig.from_file(config_file).nvme_min_uses == 0
    assert f"{offered}:\n# nvme_min_uses: 1\n" in config_file.read_text()
    run_tune(options(tmp_path, config_file=config_file, endurance="900000TB"), console)
    assert "nvme_min_uses" not in config_file.read_text(), "a drive that lasts needs no sparing"


def test_a_level_that_was_not_measured_says_so_and_how_to_instead_of_figures(tmp_path: Path) -> None:
    console = Console(record=True, width=300)
    run_tune(options(tmp_path, measured=[], json_file=tmp_path / "x.json"), console)
    said = console.export_text().splitlines()
    for level, here, benchmark in (("secondary", "--measure", "copy"), ("nvme", "--measure --nvme-directory DIR", "nvme")):
        row, sentence = (line.strip() for line in said if line.strip().startswith(level))
        assert row.split() == [level, "not", "measured"], "no size, and no figures of it"
        assert sentence == (f"{level}: its speed was not measured; measure it here with {here}, or give --measured FILE, which "
                            f"kvtier bench {benchmark} --json FILE writes")
    document = json.loads((tmp_path / "x.json").read_text())
    assert [row["name"] for row in document["results"]] == ["tune/primary", "tune/hit_token_ratio"]
    assert [purchase["measured"] for purchase in document["purchases"]] == [False, False]


def test_a_level_that_was_measured_and_does_not_pay_has_figures(tmp_path: Path) -> None:
    console = Console(record=True, width=300)
    run_tune(options(tmp_path, host_limit="0GB"), console)
    row = next(line.split() for line in console.export_text().splitlines() if line.strip().startswith("secondary"))
    assert row[:2] == ["secondary", "none"]
    assert row[-2:] == ["0.00", "s"]


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "report.html"
    assert run_tune(options(tmp_path, html_file=file), Console(quiet=True)) == 0
    page = Page()
    page.feed(file.read_text())
    page.close()
    assert page.open == []
    assert page.fetched == []
    assert {"svg", "table", "pre", "h1"} <= set(page.tags)
    assert "script" not in page.tags


def test_what_the_replay_found_stands_first_and_what_is_read_from_the_curve_says_so(tmp_path: Path) -> None:
    console = Console(record=True, width=300)
    json_file, html_file = tmp_path / "out.json", tmp_path / "out.html"
    run_tune(options(tmp_path, json_file=json_file, html_file=html_file if find_spec("matplotlib") else None), console)
    said = [line.strip() for line in console.export_text().splitlines() if line.strip()]
    rows = {row["name"]: row["median"] for row in json.loads(json_file.read_text())["results"]}
    headline = f"{100 * rows['tune/hit_token_ratio']:.1f} % of input tokens reused, replayed with these sizes"
    assert said[:2] == ["kvtier tune trace.jsonl", headline]
    assert "reused (LRU curve)" in said[2]
    assert [line for line in said if "of input tokens reused" in line] == [headline, next(line for line in said if "(the curve is" in line)]
    if html_file.exists():
        page = html_file.read_text()
        assert page.index(headline) < page.index("<svg"), "before the picture"
        assert f"<h2>Levels: {headline}</h2>" in page


@pytest.mark.parametrize(("blocks", "block_bytes", "text"), [
    (0, 1 << 20, "0 blocks"), (2048, 1 << 20, "2GiB"), (2049, 1 << 20, "2049MiB"), (3, 1 << 40, "3TiB"), (3, 1536, "4608 B"),
    (2, 1536, "3KiB")])
def test_sizes_of_the_configuration_are_exact_and_as_short_as_that_allows(blocks: int, block_bytes: int, text: str) -> None:
    assert written_size(blocks, block_bytes) == text
    assert parse_size(text, "nvme").amount == (blocks * block_bytes)


def test_a_folder_that_nobody_named_is_marked_as_one_to_change(tmp_path: Path) -> None:
    file = tmp_path / "tier.yaml"
    remark = "  # change this: a folder on the drive\n"
    run_tune(options(tmp_path, config_file=file), Console(quiet=True))
    assert f'nvme_directory: "/mnt/nvme/kvtier"{remark}' in file.read_text()
    assert TierConfig.from_file(file).nvme_directory == Path("/mnt/nvme/kvtier")
    run_tune(options(tmp_path, config_file=file, nvme_directory=tmp_path), Console(quiet=True))
    assert f'nvme_directory: "{tmp_path}"\n' in file.read_text()


@pytest.mark.parametrize(("given", "said"), [
    ({"json_file": Path(__file__, "x.json")}, "cannot be written"), ({"html_file": Path(__file__, "x.html")}, "cannot be written"),
    ({"config_file": Path("tier.toml")}, r"name a \.yaml file"), ({"model": "gpt-oss-21b"}, "did you mean gpt-oss-20b"),
    ({"endurance": "5%"}, "--endurance='5%': must be a size in bytes"), ({"endurance": "0TB"}, "at least 1 byte"),
    ({"nvme_directory": Path(__file__)}, "not a folder"), ({"prefill_rate": 0.0}, "--prefill-rate=0.0"), ({"sample": 2.0}, "--sample=2.0"),
    ({"primary": "lots"}, "--primary='lots'"),
    ({"endurance": "600"}, 'write for example "600GB"'), ({"block": 16}, "--block 512"),
    ({"host_limit": "5"}, "--host-limit='5': a size needs a unit"), ({"nvme_limit": "5%"}, "--nvme-limit='5%': must be a size in bytes"),
    ({"measure": True, "nvme_directory": Path("/nonexistent")}, "--nvme-directory /nonexistent: does not exist, and --measure"),
    ({"tokenizer": "none.json"}, "--tokenizer='none.json'"), ({"measured": [Path("/nonexistent.json")]}, "cannot be read"),
])
def test_bad_input_is_refused_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, object],
                                                     said: str) -> None:
    monkeypatch.chdir(tmp_path)
    options(tmp_path)
    files = sorted(tmp_path.iterdir())
    written = {"json_file": tmp_path / "out.json", "config_file": tmp_path / "o.yaml"}
    with pytest.raises(ConfigError, match=said):
        run_tune(options(tmp_path, **(written | given)), Console(quiet=True))
    assert sorted(tmp_path.iterdir()) == files
