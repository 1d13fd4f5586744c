"""Several ranks under one root: each has its own folder, and a root made for others is refused aloud."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.io.rank_directories import in_order_of_ranks, missing_ranks, occupied_by_ranks, prepare_rank_directory, rank_directory
from kvtier.io.store_directory import IDENTITY_NAME


def test_one_rank_has_the_root_itself_and_several_have_folders_that_say_of_how_many(tmp_path: Path) -> None:
    assert prepare_rank_directory(tmp_path / "root", 0, 1) == tmp_path / "root"
    assert not (tmp_path / "root").exists()
    assert prepare_rank_directory(tmp_path / "root", 1, 2) == rank_directory(tmp_path / "root", 1, 2) == tmp_path / "root" / "rank-1-of-2"
    assert stat.S_IMODE((tmp_path / "root").stat().st_mode) == 0o700


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_root_of_another_number_of_ranks_is_refused(tmp_path: Path, num_ranks: int) -> None:
    (tmp_path / "rank-0-of-2").mkdir()
    with pytest.raises(ConfigError, match=rf"holds stores of 2 ranks, configured is num_ranks={num_ranks}\. Give another directory"):
        prepare_rank_directory(tmp_path, 0, num_ranks)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rank-0-of-2"]


def test_the_store_of_one_rank_is_no_root_of_several(tmp_path: Path) -> None:
    (tmp_path / IDENTITY_NAME).write_text("{}")
    with pytest.raises(ConfigError, match="is the store of one rank, configured is num_ranks=2"):
        prepare_rank_directory(tmp_path, 0, 2)


def test_a_folder_of_somebody_else_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / "lost+found").mkdir()
    with pytest.raises(ConfigError, match=r"holds 1 other entries \(thesis.tex, ...\): it is not a root of kvtier stores"):
        prepare_rank_directory(tmp_path, 0, 2)
    (tmp_path / "thesis.tex").unlink()
    prepare_rank_directory(tmp_path, 0, 2)


def test_what_cannot_be_a_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="A file is in the way where a folder belongs"):
        prepare_rank_directory(tmp_path / "file" / "root", 0, 2)
    with pytest.raises(ConfigError, match="cannot be used"):
        prepare_rank_directory(tmp_path / "file", 0, 2)


def test_ranks_are_listed_in_the_order_of_their_numbers_and_the_missing_ones_are_named(tmp_path: Path) -> None:
    names = [f"rank-{rank}-of-12" for rank in range(12) if rank not in (3, 11)]
    found = in_order_of_ranks(sorted(tmp_path / name for name in names))
    assert [path.name for path in found] == names
    assert missing_ranks(found) == ["rank-3-of-12", "rank-11-of-12"]
    assert missing_ranks([tmp_path / "store"]) == []


def test_what_all_ranks_occupy_counts_their_slabs_only(tmp_path: Path) -> None:
    for name in ("rank-0-of-2", "rank-1-of-2", "rank-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "group-0.slab").write_bytes(b"x" * 8192)
    one = (tmp_path / "rank-x" / "group-0.slab").stat().st_blocks * 512
    assert occupied_by_ranks(tmp_path) == 2 * one > 0
