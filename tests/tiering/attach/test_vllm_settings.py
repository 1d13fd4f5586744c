"""The vLLM adapter's settings, wishes, page arithmetic, identity, facts and interface check, none of which needs vLLM."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError, TransferError
from kvtier.tiering.attach import vllm_wishes
from kvtier.tiering.attach.interface_differences import differences
from kvtier.tiering.attach.rank_facts import Facts, check_dtype, collect_facts, leave_facts
from kvtier.tiering.attach.vllm_identity import ORIGIN, model_identity
from kvtier.tiering.attach.vllm_interface import check_interface, check_version
from kvtier.tiering.attach.vllm_pages import Part, pages_of
from kvtier.tiering.attach.vllm_settings import read_settings
from kvtier.tiering.attach.vllm_wishes import Wishes, read_wishes
from kvtier.tiering.attach.weight_files import WHOLE_BYTES, files_fingerprint

LINE = {"spec_name": "TieredSpec", "spec_module_path": "kvtier.tiering.attach.vllm", "secondary": "64MiB"}
FACTS = Facts(((4096, 4096), (2048,)), (False, True), {"dtype": "float32"}, "model@local:1")


# -- kv_connector_extra_config -------------------------------------------------------------------------------------------

def test_the_line_of_the_documentation_is_read(tmp_path: Path) -> None:
    settings = read_settings(LINE | {"nvme": "1GiB", "nvme_directory": str(tmp_path), "blocks_per_chunk": 4, "lookup_timeout": 2})
    assert (settings.tier.secondary, settings.tier.nvme_directory, settings.lookup_timeout) == ("64MiB", tmp_path, 2.0)


def test_everything_that_may_be_is_on_nvme_soon_unless_the_user_wants_otherwise(tmp_path: Path) -> None:
    with_nvme = LINE | {"nvme": "1GiB", "nvme_directory": str(tmp_path)}
    assert read_settings(with_nvme).tier.write_ahead_share == 1.0
    assert read_settings(with_nvme | {"write_ahead_share": 0.1}).tier.write_ahead_share == 0.1


@pytest.mark.parametrize(("key", "value", "said"), [
    ("seconday", "8GiB", "did you mean 'secondary'"),
    ("nvme_dir", "/x", "did you mean 'nvme_directory'"),
    ("block_per_chunk", 2, "did you mean 'blocks_per_chunk'"),
    ("lookup_timout", 2, "did you mean 'lookup_timeout'"),
    ("cpu_bytes_to_use", 1, "unknown key"),
    ("primary", "90%", "vLLM owns the device's memory"),
    ("canonical_layout", True, "not supported"),
    ("lookup_timeout", 0, "above 0"),
    ("lookup_timeout", "5", "number of seconds"),
    ("job_timeout", float("nan"), "number of seconds"),
    ("trusted_lora_names", "yes", "true or false"),
    ("model", "", "name@revision:digest"),
    ("secondary", "8GB of it", "secondary"),
    ("nvme", "1GiB", "nvme_directory"),
    ("secondary_offload_min_priority", 101, "at most 100"),
    ("faults", "nvme.reed.eio", "did you mean 'read'"),
])
def test_a_bad_key_or_value_is_an_error_that_says_what_to_write(key: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match="kv_connector_extra_config") as error:
        read_settings(LINE | {key: value})
    assert said in str(error.value)
    assert key in str(error.value)


def test_without_host_memory_there_is_no_tier() -> None:
    with pytest.raises(ConfigError, match="no host memory"):
        read_settings({"spec_name": "TieredSpec"})


# -- what a request asks for ---------------------------------------------------------------------------------------------

def test_a_requests_wishes_are_read() -> None:
    assert read_wishes(None) == read_wishes({"other": 1}) == Wishes()
    everything = {"priority": 80, "skip_read": True, "skip_write": True, "keep_off_nvme": True}
    assert read_wishes({"kvtier": everything}) == Wishes(80, True, True, True)


@pytest.mark.parametrize(("given", "said"), [
    ({"priority": 101}, "0 to 100"), ({"priority": True}, "0 to 100"), ({"priority": "high"}, "0 to 100"),
    ({"skip_read": 1}, "true or false"),
    ({"prioritty": 3}, "did you mean 'priority'"), ({7: 3}, "the keys are"), ("high", "mapping"), (3, "mapping"),
])
def test_a_bad_wish_is_left_out_and_said_once(given: object, said: str, caplog: pytest.LogCaptureFixture) -> None:
    vllm_wishes._said.clear()
    with caplog.at_level(logging.WARNING):
        assert read_wishes({"kvtier": given}) == read_wishes({"kvtier": given}) == Wishes()
    assert len(caplog.records) == 1
    assert said in caplog.text


def test_one_bad_wish_does_not_cost_the_others() -> None:
    assert read_wishes({"kvtier": {"priority": 500, "skip_write": True}}) == Wishes(skip_write=True)


# -- pages of a transfer -------------------------------------------------------------------------------------------------

def test_pages_are_given_to_the_chunks_of_their_group() -> None:
    found = pages_of([Part(7, 0, (3, 9)), Part(8, 2, (5,))], [10, 11, 12, 20, 21], [3, 0, 2], [5, 0, 6], 2, is_store=True)
    assert [(each.part.job_id, each.pages, each.skip) for each in found] == [(7, (10, 11, 12), 1), (8, (20, 21), 0)]


@given(per_chunk=st.integers(1, 5), chunks=st.lists(st.integers(0, 4), min_size=1, max_size=4), data=st.data())
def test_every_page_a_load_names_is_given_once_and_in_order(per_chunk: int, chunks: list[int], data: st.DataObject) -> None:
    parts, sizes, firsts = [], [], []
    for group, count in enumerate(chunks):
        if not count:
            sizes.append(0)
            firsts.append(0)
            continue
        skip = data.draw(st.integers(0, per_chunk - 1))
        missing = data.draw(st.integers(0, per_chunk - 1 if count > 1 else per_chunk - 1 - skip))
        parts.append(Part(group, group, tuple(range(count))))
        sizes.append(count * per_chunk - skip - missing)
        firsts.append(data.draw(st.integers(0, 3)) * per_chunk + skip)
    pages = list(range(sum(sizes)))
    found = pages_of(parts, pages, sizes, firsts, per_chunk, is_store=False)
    assert [page for each in found for page in each.pages] == pages


@pytest.mark.parametrize(("slots", "pages", "first", "is_store"), [
    ((0, 1), 3, 0, True),       # one page of the last chunk, or one in the middle, is missing: nobody can know which
    ((0, 1), 2, 0, False),      # the last chunk would not be needed at all
    ((0,), 3, 0, True),         # more pages than places
    ((0,), 2, 1, False),        # ... behind an unaligned start
    ((), 1, 0, True),           # pages without chunks
    ((0,), 0, 0, True),         # a chunk without pages
])
def test_pages_that_do_not_fit_their_chunks_are_refused(slots: tuple[int, ...], pages: int, first: int, is_store: bool) -> None:
    parts = [Part(1, 0, slots)] if slots else []
    with pytest.raises(TransferError, match="group 0"):
        pages_of(parts, list(range(pages)), [pages], [first], 2, is_store=is_store)


def test_a_part_of_an_unknown_group_is_refused() -> None:
    with pytest.raises(TransferError, match="groups"):
        pages_of([Part(1, 3, (0,))], [], [0], [0], 1, is_store=True)


# -- whose bytes they are ------------------------------------------------------------------------------------------------

def test_other_weights_are_another_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(WHOLE_BYTES + 100_000))
    first = model_identity(str(tmp_path), None, None)
    assert first == model_identity(str(tmp_path), "main", None)
    changed = bytearray(file.read_bytes())
    changed[-1] = 1
    file.write_bytes(changed)
    assert model_identity(str(tmp_path), None, None) != first
    file.rename(tmp_path / "model-00001.safetensors")
    assert len({first, model_identity(str(tmp_path), None, None), files_fingerprint(tmp_path, ORIGIN)}) == 3


def test_a_model_of_a_hub_is_known_by_its_commit_and_otherwise_not_at_all(tmp_path: Path) -> None:
    assert model_identity("org/model", None, "abc") == "org/model@main:abc"
    with pytest.raises(ConfigError, match='set "model"'):
        model_identity("org/model", None, None)
    with pytest.raises(ConfigError, match="no weights there"):
        model_identity(str(tmp_path), None, None)


@pytest.mark.parametrize("dtype", ["turboquant_3bit_nc", "auto", ""])
def test_a_dtype_whose_pages_may_not_be_all_is_refused(dtype: str) -> None:
    check_dtype("bfloat16")
    with pytest.raises(ConfigError, match="use one of float32"):
        check_dtype(dtype)


# -- from the workers to the scheduler -----------------------------------------------------------------------------------

def test_the_facts_of_all_ranks_arrive_once(tmp_path: Path) -> None:
    kept = [leave_facts("engine/1", rank, FACTS, tmp_path) for rank in range(2)]
    assert collect_facts("engine/1", 2, tmp_path) == FACTS
    assert list(tmp_path.iterdir()) == []
    layout = FACTS.layout(4, 2)
    assert [(group.rank_bytes, group.is_state) for group in layout.groups] == [(4 * 8192, False), (4 * 2048, True)]
    assert json.loads(FACTS.fingerprint()) == {"dtype": "float32"}
    for stream in kept:
        stream.close()


def test_a_rank_elsewhere_or_of_another_size_is_named(tmp_path: Path) -> None:
    with leave_facts("one", 0, FACTS, tmp_path):
        with pytest.raises(ConfigError, match=r"ranks 1 of 2 .* several nodes"):
            collect_facts("one", 2, tmp_path)
        with (leave_facts("one", 1, Facts(((4096,), (2048,)), (False, True), {"dtype": "float32"}), tmp_path),
              pytest.raises(ConfigError, match="rank 1 has other pages")):
            collect_facts("one", 2, tmp_path)


def test_what_an_engine_that_never_started_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    leave_facts("dead", 0, FACTS, tmp_path).close()
    with leave_facts("alive", 0, FACTS, tmp_path), leave_facts("new", 0, FACTS, tmp_path):
        assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"page_bytes": 3}'])
def test_damaged_facts_count_as_missing(tmp_path: Path, text: str) -> None:
    leave_facts("one", 0, FACTS, tmp_path).close()
    next(tmp_path.iterdir()).write_text(text)
    with pytest.raises(ConfigError, match="ranks 0 of 1"):
        collect_facts("one", 1, tmp_path)


def test_facts_that_cannot_be_left_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shared memory"):
        leave_facts("one", 0, FACTS, tmp_path / "none")


# -- the interface -------------------------------------------------------------------------------------------------------

class _Theirs:
    def find(self, key: bytes, context: object) -> int: ...

    def end(self) -> None: ...


class _Fits:
    def find(self, key: bytes, context: object, more: int = 0) -> int: ...


class _Renamed:
    def find(self, key: bytes, request: object) -> int: ...


class _WantsMore:
    def find(self, key: bytes, context: object, more: int) -> int: ...


def test_a_drifted_interface_is_named_with_the_supported_releases() -> None:
    check_interface([(_Fits, _Theirs)], "0.32.0")
    for ours in (_Renamed, _WantsMore):
        assert len(differences(ours, _Theirs)) == 1
        with pytest.raises(ConfigError, match=r"find.*Supported: vLLM 0\.32 to 0\.33"):
            check_interface([(ours, _Theirs)], "0.33.1")


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0rc1", "1.0", "dev"])
def test_another_release_is_refused_with_the_remedy(version: str) -> None:
    check_version("0.32.0+cpu")
    with pytest.raises(ConfigError, match=r"supports vLLM 0\.32 to 0\.33.*pip install 'vllm>=0\.32,<0\.34'"):
        check_version(version)
