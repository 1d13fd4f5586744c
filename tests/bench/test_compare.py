"""Two runs held against each other: what counts as worse, what is only listed, and what is refused (``bench/compare``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.bench.compare import LARGER_IS_BETTER, LEAST_CHANGE, MACHINE_MEANS, Figures, Verdict, compare, judge, read_figures
from kvtier.bench.report import Limit, ResultRow
from kvtier.errors import ConfigError

MACHINE = {"cpu": "A CPU", "cores": 2, "last_level_cache_bytes": 32 << 20, "memory_bytes": 100_000, "kernel": "Linux 6.1",
           "python": "3.11.7", "gpu": "none"}
UNITS = st.sampled_from([*LARGER_IS_BETTER, "x", "nonsense"])


def row(name: str = "copy/a", median: float = 10.0, unit: str = "GB/s") -> ResultRow:
    return beside(20.0, name, median, unit)


def beside(limit: float, name: str = "copy/a", median: float = 10.0, unit: str = "GB/s", called: str = "memcpy") -> ResultRow:
    """A row whose limit was measured in the same run."""
    ratio = median / limit if LARGER_IS_BETTER.get(unit, True) else limit / median
    return ResultRow(name, unit, median, median - 0.1, median + 0.1, Limit(called, limit), ratio)


def figures(rows: Sequence[ResultRow] = (), machine: dict | None = None, invalid: Sequence[str] = (), **config: object) -> Figures:
    return Figures.of({"kvtier": "0.1.0", "machine": MACHINE | (machine or {}),
                       "config": {"command": "copy", "quick": False, "notes": [],
                                  "invalid": [{"name": name, "reason": "wrong bytes"} for name in invalid], **config},
                       "results": [each.as_json() for each in rows]}, "some.json")


@st.composite
def rows(draw: st.DrawFn, unit: str | None = None) -> ResultRow:
    low, median, high = sorted(draw(st.lists(st.floats(0.0, 1e6), min_size=3, max_size=3)))
    return ResultRow("copy/a", draw(UNITS) if unit is None else unit, median, low, high)


@given(rows(), st.floats(0.0, 2.0))
def test_a_run_is_neither_better_nor_worse_than_itself(one: ResultRow, noise: float) -> None:
    assert judge(one, one, noise) in (Verdict.SAME, Verdict.NOT_JUDGED)


@given(st.sampled_from(list(LARGER_IS_BETTER)).flatmap(lambda unit: st.tuples(rows(unit), rows(unit))), st.floats(0.0, 2.0))
def test_what_is_worse_in_one_direction_is_better_in_the_other(pair: tuple[ResultRow, ResultRow], noise: float) -> None:
    opposite = {Verdict.WORSE: Verdict.BETTER, Verdict.BETTER: Verdict.WORSE, Verdict.SAME: Verdict.SAME}
    assert judge(pair[1], pair[0], noise) is opposite[judge(*pair, noise)]


@given(st.sampled_from(list(LARGER_IS_BETTER)).flatmap(lambda unit: st.tuples(rows(unit), rows(unit))))
def test_nothing_is_flagged_while_the_ranges_touch_or_the_medians_are_close(pair: tuple[ResultRow, ResultRow]) -> None:
    old, new = pair
    touch = old.low <= new.high and new.low <= old.high
    are_close = abs(new.median - old.median) <= LEAST_CHANGE * max(old.median, new.median)
    assert (judge(old, new) is Verdict.SAME) == (touch or are_close)


@given(rows("GB/s"), rows("GB/s"), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_more_noise_never_flags_more(old: ResultRow, new: ResultRow, one: float, other: float) -> None:
    if judge(old, new, max(one, other)) is not Verdict.SAME:
        assert judge(old, new, min(one, other)) is judge(old, new, max(one, other))


@pytest.mark.parametrize(("unit", "verdict"), [("GB/s", Verdict.WORSE), ("tokens/s", Verdict.WORSE), ("ms", Verdict.BETTER),
                                               ("us/block", Verdict.BETTER), ("B", Verdict.BETTER), ("x", Verdict.NOT_JUDGED)])
def test_less_is_worse_for_rates_and_better_for_times(unit: str, verdict: Verdict) -> None:
    assert judge(row(unit=unit), row(median=9.0, unit=unit)) is verdict


def test_a_wrong_byte_where_there_was_none_is_worse() -> None:
    none, one = (ResultRow("integrity/kill/wrong", "blocks", count, count, count) for count in (0.0, 1.0))
    assert judge(none, one) is Verdict.WORSE


def test_a_limit_that_differed_from_itself_by_more_than_the_change_excuses_it() -> None:
    noise = ResultRow("copy/a/noise", "x", 1.3, 1.2, 1.4)
    quiet, loud = figures([row()]), figures([row(), noise])
    slower = figures([row(median=8.0)])
    assert [change.name for change in compare(quiet, slower).regressions] == ["copy/a"]
    assert compare(loud, slower).regressions == []
    assert compare(quiet, figures([row(median=8.0), noise])).regressions == []


@pytest.mark.parametrize("unit", ["GB/s", "us/block"])
@pytest.mark.parametrize(("median", "limit"), [(6.0, 12.0), (20.0, 40.0), (6.0, 12.4), (6.0, 9.0), (20.0, 60.0)],
                         ids=["slower alike", "faster alike", "slower, ratio within 5 %", "less slower", "less faster"])
def test_a_row_that_moved_with_its_limit_is_of_the_machine_and_the_footer_says_so(unit: str, median: float, limit: float) -> None:
    comparison = compare(figures([row(unit=unit)]), figures([beside(limit, median=median, unit=unit)]))
    assert [change.verdict for change in comparison.changes] == [Verdict.MACHINE]
    assert comparison.regressions == []
    assert MACHINE_MEANS in list(comparison.lines())
    assert len(list(comparison.shown())) == 3  # a table, the count, the footer


@pytest.mark.parametrize("limit", [20.0, 18.0, 24.0], ids=["the limit stood still", "the limit fell less", "the limit rose"])
def test_a_row_that_is_worse_beside_its_limit_is_worse_however_the_machine_was(limit: float) -> None:
    comparison = compare(figures([row()]), figures([beside(limit, median=6.0)]))
    assert [change.verdict for change in comparison.changes] == [Verdict.WORSE]
    assert MACHINE_MEANS not in list(comparison.lines())
    assert [change.verdict for change in compare(figures([beside(limit, median=6.0)]), figures([row()])).changes] == [Verdict.BETTER]


def test_without_a_limit_or_beside_another_one_the_medians_alone_count() -> None:
    free = [ResultRow("copy/a", "GB/s", median, median, median) for median in (10.0, 6.0)]
    assert judge(*free) is Verdict.WORSE
    assert judge(row(), free[1]) is judge(free[0], beside(12.0, median=6.0)) is Verdict.WORSE
    assert judge(row(), beside(12.0, median=6.0, called="fio")) is Verdict.WORSE


def test_a_ratio_that_changed_by_less_than_the_noise_is_of_the_machine() -> None:
    worse = beside(15.0, median=6.0)  # 0.4 of the limit, 0.5 before
    assert judge(row(), worse) is Verdict.WORSE
    assert judge(row(), worse, 0.3) is Verdict.MACHINE
    assert judge(row(), worse, 0.5) is Verdict.SAME


def test_rows_that_came_went_or_did_not_hold_are_listed_and_only_the_last_is_a_regression() -> None:
    old = figures([row("copy/gone"), row("copy/bad/ttft"), row("copy/stays")])
    new = figures([row("copy/stays"), row("copy/fresh")], invalid=["copy/bad"])
    comparison = compare(old, new)
    assert {change.name: change.verdict for change in comparison.changes} == {
        "copy/stays": Verdict.SAME, "copy/fresh": Verdict.NEW, "copy/bad": Verdict.INVALID, "copy/gone": Verdict.MISSING,
        "copy/bad/ttft": Verdict.INVALID}
    assert {change.name for change in comparison.regressions} == {"copy/bad", "copy/bad/ttft"}
    assert any("INVALID now, copy/bad: wrong bytes" in line for line in comparison.lines())
    assert any("was INVALID before, copy/bad" in line for line in compare(new, old).lines())


def test_where_nothing_differs_it_says_over_how_many_rows() -> None:
    ratio, many = row("copy/ratio", unit="x"), figures([row("copy/a"), row("copy/b")])
    said = [str(part) for part in compare(many, many).shown()]
    assert said == ["compared with some.json: nothing differs beyond noise, over 2 rows"]
    assert list(compare(figures([row(), ratio]), figures([row(), ratio])).lines()) == [
        "compared with some.json: nothing differs beyond noise, over 1 row, 1 not judged"]
    assert len(list(compare(figures([row(median=8.0)]), figures([row()])).shown())) == 2  # a table, and the count
    assert list(compare(figures([row()]), figures([row(), row("copy/b")])).lines()) == ["1 row within noise, 1 new"]


@pytest.mark.parametrize(("key", "value"), [("cpu", "Another CPU"), ("cores", 4), ("gpu", "NVIDIA H200"), ("memory_bytes", 110_000),
                                            ("file_system", "xfs")])
def test_figures_of_two_machines_are_refused_with_what_differs_of_both(key: str, value: object) -> None:
    known = MACHINE | {"file_system": "ext4"}
    with pytest.raises(ConfigError, match=rf"another machine than .*: {key} {known[key]} there, {value} here"):
        compare(figures([row()], known), figures([row()], known | {key: value}))


def test_a_little_memory_more_another_kernel_and_what_is_not_said_are_the_same_machine() -> None:
    comparison = compare(figures([row()]), figures([row()], {"memory_bytes": 100_500, "kernel": "Linux 6.2", "mount": "/mnt"}))
    assert comparison.regressions == []
    assert "kernel was Linux 6.1, is Linux 6.2" in list(comparison.lines())


def test_a_short_run_beside_a_full_one_is_refused_and_other_settings_are_said() -> None:
    with pytest.raises(ConfigError, match=r"quick=False, .* quick=True; measure both alike"):
        compare(figures([row()]), figures([row()], quick=True))
    assert "copy: rounds was 9, is 5" in list(compare(figures([row()], rounds=9), figures([row()], rounds=5)).lines())


@pytest.mark.parametrize(("command", "config"), [("nvme", {}), ("copy", {"device": "cpu"}), ("kernels", {"device": "cpu"})])
def test_the_compiled_build_beside_the_plain_one_is_refused_with_how_to_measure_alike(command: str, config: dict) -> None:
    plain, compiled = (figures([row()], command=command, compiled=each, **config) for each in (False, True))
    for pair in ((plain, compiled), (compiled, plain)):
        with pytest.raises(ConfigError, match=r"compiled=.* alike: with the compiled build \(make bench, or PYTHONPATH=build/compiled\)"):
            compare(*pair)
    assert compare(compiled, compiled).regressions == []


@pytest.mark.parametrize("command", ["copy", "kernels"])
def test_copies_on_a_cpu_that_do_not_say_how_were_library_calls(command: str) -> None:
    silent = figures([row()], command=command, device="cpu")
    with pytest.raises(ConfigError, match=f"{command} was measured with compiled=False, .* compiled=True"):
        compare(silent, figures([row()], command=command, device="cpu", compiled=True))
    assert compare(silent, figures([row()], command=command, device="cpu", compiled=False)).regressions == []


@pytest.mark.parametrize(("command", "device"), [("nvme", "cpu"), ("copy", "cuda:0")])
def test_where_an_older_file_cannot_say_its_build_it_is_compared_and_a_line_says_what_is_not_known(command: str, device: str) -> None:
    silent, compiled = (figures([row()], command=command, device=device, **known) for known in ({}, {"compiled": True}))
    assert f"{command}: compiled was None, is True" in list(compare(silent, compiled).lines())


def test_one_benchmark_is_found_among_all_of_them() -> None:
    every = figures([row(), row("nvme/read")], command="all", sections={"copy": {"quick": False}, "nvme": {"quick": False}})
    assert [change.name for change in compare(every, figures([row()])).changes] == ["copy/a"]
    assert [change.name for change in compare(figures([row()]), every).changes] == ["copy/a"]
    with pytest.raises(ConfigError, match="has figures of copy, nvme, none of ledger"):
        compare(every, figures([row("ledger/W1")], command="ledger"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kvtier": "1", "machine": {}, "config": {"command": "x"}, "results": [{"name": 1}]}',
                                  '{"kvtier": "1", "machine": [1], "config": [], "results": []}', '{"config": {"sections": [1]}}', "1"])
def test_what_no_benchmark_has_written_is_a_config_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "old.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"old\.json: .*not .*kvtier bench"):
        read_figures(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_figures(tmp_path / "missing.json")


def test_the_committed_measurements_can_be_compared_and_are_as_good_as_themselves() -> None:
    for file in (Path(__file__).resolve().parents[2] / "docs" / "measurements").glob("*.json"):
        found = read_figures(file)
        assert len(found.rows) == len(json.loads(file.read_text())["results"])
        assert compare(found, found).regressions == []
