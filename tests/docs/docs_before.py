"""What a page takes for granted: code that runs before one of its ``python`` blocks, by page and number of the block, from 0."""

from __future__ import annotations

_SMALL = """
from kvtier import KVCacheManager, KVLayout, LayerSpec, Level, Request, RetentionConfig, TierConfig, TokenRange, TransferMode
"""

_CACHE = _SMALL + """
cache = KVCacheManager(KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", tokens_per_block=4),
                       TierConfig(primary="40 blocks", secondary="20 blocks", max_batch_size=4, max_seq_len=4096))
"""

BEFORE: dict[tuple[str, int], str] = {
    ("README.md", 0): "prompt, next_token = list(range(100)), 5",
    ("docs/drafts.md", 0): _CACHE + "cache.add_sequence(Request(7, [1, 2, 3, 4, 5, 6], max_new_tokens=20))",
    ("docs/drafts.md", 1): "cache.remove_sequence(7); cache.add_sequence(Request(7, [1, 2, 3, 4, 5, 6], max_new_tokens=20))",
    ("docs/loading.md", 0): _CACHE + "request = Request(1, [1, 2, 3, 4, 5, 6])",
    ("docs/loading.md", 1): "tokens = list(range(20))",
    ("docs/loading.md", 2): "cache.close(); layout = cache.layout",
    ("docs/gpudirect.md", 0): _CACHE,
    ("docs/metrics.md", 0): _CACHE,
}
