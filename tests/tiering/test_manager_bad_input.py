"""Bad input at the front door: a clear error that names the value and the limit or the remedy, nothing changed, and everything goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_engine import MakeCache

from kvtier import (
    ConfigError,
    KVCacheManager,
    KVLayout,
    KVTierError,
    LayerSpec,
    Level,
    MultimodalItem,
    Request,
    RequestError,
    RetentionConfig,
    TierConfig,
    TokenRange,
    UnknownBlock,
    UnknownRequest,
)
from kvtier.tiering import core
from kvtier.tiering.handles import Lease

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")

LAYOUT = KVLayout([LayerSpec.attention(1, 8, window=8), LayerSpec.attention(1, 8)], "float32", 4)
DIGEST = b"d" * 32


@pytest.mark.parametrize(("folder", "free"), [("/proc/kvtier/store", None), ("below-a-file", 0)])
def test_a_directory_that_cannot_be_made_is_not_taken_for_a_full_one(make_cache: MakeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                     folder: str, free: int | None) -> None:
    if free is not None:
        monkeypatch.setattr(core, "free_disk_bytes", lambda _directory: free)
        (tmp_path / folder).write_text("")
        folder = str(tmp_path / folder / "store")
    with pytest.raises(ConfigError, match=f"^nvme_directory='{folder}' cannot be created: .* [Gg]ive a"):
        make_cache(8, 4, "2MiB", nvme_directory=Path(folder))


def test_a_full_drive_is_told_from_a_directory_that_cannot_be_made(make_cache: MakeCache, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "free_disk_bytes", lambda _directory: 0)
    with pytest.raises(ConfigError, match=r"0 B available .* lower nvme="):
        make_cache(8, 4, "2MiB", nvme_directory=tmp_path / "new" / "store")
    assert list(tmp_path.iterdir()) == [], "what was tried is gone again"


class Scene:
    """Request 1 has generated 13 tokens (its window has moved on), of 2 half the prompt is computed, 3 has two beams, 4 has ended."""

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache
        for request in (Request(1, range(9)), Request(2, range(100, 120)), Request(3, range(300, 306), beam_width=2), Request(4, [7])):
            cache.add_sequence(request)
        cache.mark_computed(1, 9)
        for token in range(13):
            cache.append_tokens(1, [token])
        cache.store_context(1)
        cache.mark_computed(2, 10)
        cache.mark_computed(3, 6)
        cache.append_tokens(3, [1, 2])
        cache.remove_sequence(4)
        self.lease: Lease = cache.pin(1)
        self.lease.release()
        for request_id in (1, 2, 3):  # copies of diverging beams have ended: their time is part of the statistics
            cache.wait_ready(request_id, timeout=10.0)

    def picture(self) -> object:
        """Everything that a call could have changed."""
        cache = self.cache
        blocks = [cache.block(block_id, group) for group in (0, 1) for block_id in range(48)]
        rows = [cache.block_ids(request_id, beam, group) for request_id, beams in ((1, 1), (2, 1), (3, 2))
                for beam in range(beams) for group in (0, 1)]
        free = [cache.num_free_blocks(level, group) for level in Level for group in (0, 1)]
        return blocks, rows, free, cache.stats(), [cache.request_stats(request_id) for request_id in (1, 2, 3)]


@pytest.fixture
def scene(make_cache: MakeCache) -> Scene:
    return Scene(make_cache(40, 8, layout=LAYOUT, max_batch_size=3, max_beam_width=2, max_seq_len=64))


def shares(**settings: Any) -> Callable[[Scene], object]:
    return lambda _scene: KVCacheManager(LAYOUT, TierConfig(primary="1MiB", secondary="1MiB", max_batch_size=3, max_seq_len=64, **settings))


def keep(*ranges: tuple[Any, ...], **settings: Any) -> Callable[[Scene], object]:
    return lambda scene: scene.cache.add_sequence(
        Request(9, range(9), retention=RetentionConfig([TokenRange(*given) for given in ranges], **settings)))


def pictures(*items: tuple[bytes, list[Any]]) -> Callable[[Scene], object]:
    return lambda scene: scene.cache.add_sequence(
        Request(9, range(10), multimodal=[MultimodalItem(digest, runs) for digest, runs in items]))


def on(name: str, *arguments: Any, **keywords: Any) -> Callable[[Scene], object]:
    return lambda scene: getattr(scene.cache, name)(*arguments, **keywords)


BAD: dict[str, tuple[Callable[[Scene], object], type[KVTierError], list[str]]] = {
    "overlapping retention ranges": (keep((0, 64, 35), (32, 96, 35)), RequestError, ["(32, 96)", "64", "must not overlap"]),
    "an open-ended range before another": (keep((0, None, 35), (64, 128, 35)), RequestError, ["(64, 128)", "only the last"]),
    "a range that ends before it begins": (keep((8, 4, 35)), RequestError, ["(8, 4)", "greater than start"]),
    "a range before the prompt": (keep((-1, 4, 35)), RequestError, ["(-1, 4)", "negative"]),
    "a priority above 100 in a range": (keep((0, None, 101)), RequestError, ["101", "0 (drop first) to 100"]),
    "a priority below 0 for what is generated": (keep(decode_priority=-1), RequestError, ["-1", "0 (drop first) to 100"]),
    "a priority above 100 for a block": (on("set_priority", 0, 101), RequestError, ["101", "0 (drop first) to 100"]),
    "a priority that is no number": (keep((0, None, 50.5)), RequestError, ["50.5", "whole number"]),
    "an unknown level of priority": (keep((0, None, "urgent")), RequestError, ["urgent", "HIGH, MEDIUM, LOW"]),
    "a threshold above 100": (shares(secondary_offload_min_priority=101), ConfigError, ["secondary_offload_min_priority=101", "100"]),
    "a share list of another length": (shares(group_shares=[1.0]), ConfigError, ["[1.0]", "1 shares for 2 groups", "one per group"]),
    "a share outside 0..1": (shares(group_shares=[1.5, -0.5]), ConfigError, ["[1.5, -0.5]", "between 0 and 1"]),
    "shares that are all zero": (shares(group_shares=[0, 0]), ConfigError, ["[0, 0]", "more than 0"]),
    "shares that are no numbers": (shares(group_shares="0.4;0.6"), ConfigError, ["0.4;0.6", "list of numbers"]),
    "a multimodal run beyond the prompt": (pictures((DIGEST, [(8, 3)])), RequestError, ["ends at 11", "10 tokens"]),
    "multimodal runs that overlap": (pictures((DIGEST, [(0, 3), (2, 2)])), RequestError, ["(2, 2)", "do not overlap"]),
    "multimodal runs out of order": (pictures((DIGEST, [(4, 2), (0, 2)])), RequestError, ["(0, 2)", "ascend"]),
    "a multimodal item without runs": (pictures((DIGEST, [])), RequestError, ["runs=[]", "(start, length)"]),
    "a multimodal run of no length": (pictures((DIGEST, [(3, 0)])), RequestError, ["(3, 0)", "positive"]),
    "a multimodal digest of another length": (pictures((b"d" * 31, [(0, 3)])), RequestError, ["32 bytes"]),
    "fewer beams in a step": (on("append_tokens", 3, [1]), RequestError, ["request 3", "1 tokens for 2 beams", "one token for each"]),
    "more beams in a step": (on("append_step", [1, 3], [[5], [1, 2, 3]]), RequestError, ["request 3", "3 tokens for 2 beams"]),
    "fewer parents than beams": (on("reorder_beams", 3, [0]), RequestError, ["request 3", "1 parents for 2 beams"]),
    "a parent that is no beam": (on("reorder_beams", 3, [0, 2]), RequestError, ["request 3", "parent 2", "0..1"]),
    "another beam width under the same id": (lambda scene: scene.cache.add_sequence(Request(3, range(300, 306))), RequestError,
                                             ["request 3", "active already", "another id"]),
    "more beams than configured": (lambda scene: scene.cache.add_sequence(Request(9, range(5), beam_width=3)), RequestError,
                                   ["beam_width=3", "max_beam_width is 2", "raise"]),
    "a beam that there is not": (on("block_ids", 3, beam=2), RequestError, ["beam=2", "0..1"]),
    "rewinding past the prompt": (on("rewind", 1, 14), RequestError, ["request 1", "rewind(14)", "13 tokens", "prompt stays"]),
    "rewinding where nothing was generated": (on("rewind", 2, 1), RequestError, ["request 2", "rewind(1)", "0 tokens", "prompt stays"]),
    "rewinding further than a window allows": (on("rewind", 1, 13), RequestError, ["rewind(13)", "at most 3"]),
    "rewinding forwards": (on("rewind", 1, -1), RequestError, ["rewind(-1)", "13 tokens"]),
    "computed beyond the sequence": (on("mark_computed", 2, 21), RequestError, ["mark_computed(21)", "20 tokens"]),
    "computed backwards": (on("mark_computed", 2, 9), RequestError, ["mark_computed(9)", "10 are computed", "rewind()"]),
    "releasing a sequence twice": (on("remove_sequence", 4), UnknownRequest, ["request 4", "active: 3"]),
    "storing a sequence that has ended": (on("store_context", 4), UnknownRequest, ["request 4", "active: 3"]),
    "releasing a lease twice": (lambda scene: scene.lease.release(), RequestError, ["lease 0", "request 1", "released already"]),
    "a table with too few rows": (on("block_table", [1, 2, 3, 1, 2, 3]), RequestError, ["8 rows", "made for 6", "max_batch_size"]),
    "a prompt longer than a table's row": (lambda scene: scene.cache.add_sequence(Request(9, range(65))), RequestError,
                                           ["request 9", "65 tokens", "max_seq_len is 64", "raise it"]),
    "growing beyond a table's row": (on("append_step", [1], [[0] * 50]), RequestError, ["72 tokens", "max_seq_len is 64", "raise it"]),
    "drafts beyond a table's row": (on("propose_drafts", 1, [0] * 50, [-1] * 50), RequestError, ["72 tokens", "64", "propose fewer"]),
    "an unknown block": (on("block", 9999), UnknownBlock, ["9999", "0..47"]),
    "a negative block": (on("block", -1, 1), UnknownBlock, ["-1", "group 1", "0..47"]),
    "offloading an unknown block": (on("offload", 48), UnknownBlock, ["48", "0..47"]),
    "onboarding an unknown block": (on("onboard", 48, group=1), UnknownBlock, ["48", "0..47"]),
    "reading an unknown block": (on("read_block", 48), UnknownBlock, ["48", "0..47"]),
    "writing an unknown block": (on("write_block", 48, bytes(LAYOUT.groups[0].block_bytes)), UnknownBlock, ["48", "0..47"]),
    "the priority of an unknown block": (on("set_priority", -2, 5), UnknownBlock, ["-2", "0..47"]),
    "a block of an unknown group": (on("block", 0, group=2), RequestError, ["group=2", "0..1"]),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_is_a_clear_error_and_changes_nothing(scene: Scene, name: str) -> None:
    call, error, words = BAD[name]
    before = scene.picture()
    with pytest.raises(error) as caught:
        call(scene)
    for word in words:
        assert word in str(caught.value)
    cache = scene.cache
    assert scene.picture() == before
    cache.verify()
    cache.append_step([1, 3], [[5], [6, 7]])
    cache.mark_computed(2, 20)
    for request_id in (1, 2, 3):
        cache.remove_sequence(request_id)
    cache.verify()
    assert [cache.num_free_blocks(Level.PRIMARY, group) for group in (0, 1)] == [40, 40]
    assert cache.stats().leases == 0


@pytest.mark.parametrize("verb", ["store_context", "store_and_pin", "remove_sequence"])
def test_nothing_is_stored_beyond_what_was_computed(scene: Scene, verb: str) -> None:
    """Not an error: there is always something to store, and it is what the engine has really computed."""
    result = getattr(scene.cache, verb)(2)
    assert scene.cache.match(list(range(100, 120))).reusable_tokens == 8
    assert scene.cache.match([*range(100, 110), 5, 5, 5]).reusable_tokens == 8
    scene.cache.verify()
    if isinstance(result, Lease):
        result.release()


def test_a_lease_that_was_released_inside_its_block_is_an_error_at_its_end(scene: Scene) -> None:
    with pytest.raises(RequestError, match="released already"), scene.cache.pin(1) as lease:
        lease.release()
    scene.cache.verify()
    assert scene.cache.stats().leases == 0
