"""What governs a ledger: thresholds, reuse, backings (design: ledger rules). Plain values; ``TierConfig`` has their documentation."""

from __future__ import annotations

from kvtier.policies.retention import DEFAULT_PRIORITY


class TierRules:
    """What governs the steps down: thresholds (inclusive), backings, share of the secondary level kept clean."""

    def __init__(self, secondary_offload_min_priority: int = DEFAULT_PRIORITY, nvme_offload_min_priority: int = DEFAULT_PRIORITY,
                 keep_backing: bool = True, write_ahead_share: float = 0.25, nvme_min_uses: int = 0, nvme_max_depth: int = 0) -> None:
        self.secondary_offload_min_priority = secondary_offload_min_priority
        self.nvme_offload_min_priority = nvme_offload_min_priority
        self.keep_backing = keep_backing
        self.write_ahead_share = write_ahead_share
        self.nvme_min_uses = nvme_min_uses    # earlier uses of a prompt, as far as they are remembered, before it is written to NVMe
        self.nvme_max_depth = nvme_max_depth  # blocks behind so many of their prompt stay off NVMe; 0: none do


class LedgerRules(TierRules):
    """All that governs a ledger."""

    def __init__(self, enable_block_reuse: bool = True, enable_partial_reuse: bool = True, copy_on_partial_reuse: bool = True,
                 secondary_offload_min_priority: int = DEFAULT_PRIORITY, nvme_offload_min_priority: int = DEFAULT_PRIORITY,
                 keep_backing: bool = True, write_ahead_share: float = 0.25, policy: str = "default", max_events: int = 1024,
                 namespace_seed: bytes = b"", chunk_size: int = 0,
                 window_scratch_blocks: int | None = None, history_stride: int = 0,
                 nvme_min_uses: int = 0, nvme_max_depth: int = 0) -> None:
        super().__init__(secondary_offload_min_priority, nvme_offload_min_priority, keep_backing, write_ahead_share, nvme_min_uses,
                         nvme_max_depth)
        self.enable_block_reuse = enable_block_reuse
        self.enable_partial_reuse = enable_partial_reuse
        self.copy_on_partial_reuse = copy_on_partial_reuse
        self.policy = policy
        self.max_events = max_events
        self.namespace_seed = namespace_seed
        self.chunk_size = chunk_size  # tokens that are prefilled at a time; 0: the whole prompt
        self.window_scratch_blocks = window_scratch_blocks  # per group; None: enough for two chunks
        self.history_stride = history_stride  # blocks of a prompt for one key of the history; 0: as many as have 1,024 tokens
