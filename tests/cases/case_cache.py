"""A manager with the verbs of the known-answer cases. Policy "lru", no backings, threshold 30; every change is followed by ``verify``.

Conventions: 4 tokens per block; what is said to be found is what was prepopulated right after adding; ids of blocks follow from: queues
start in id order, a sequence's tail is released before its head, what is not in the tree is taken first.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier import KVCacheManager, KVLayout, LayerSpec, Level, Request, TierConfig


def attention(window: int | None = None) -> LayerSpec:
    return LayerSpec.attention(num_kv_heads=1, head_dim=8, window=window)


class CaseCache:
    """``primary``, ``secondary``: blocks, or sizes as a configuration has them. ``layers``: two of full attention unless said otherwise."""

    def __init__(self, primary: object, secondary: object = 0, *, layers: list[LayerSpec] | None = None, tokens_per_block: int = 4,
                 **settings: object) -> None:
        values: dict[str, object] = {"policy": "lru", "keep_backing": False, "secondary_offload_min_priority": 30,
                                     "primary": _in_blocks(primary), "secondary": _in_blocks(secondary)} | settings
        layout = KVLayout(layers=layers or [attention(), attention()], dtype="float32", tokens_per_block=tokens_per_block)
        self.manager = KVCacheManager(layout, TierConfig(**values))
        self.lengths: dict[int, int] = {}

    def add(self, request_id: int, tokens: list[int], **keywords: object) -> int:
        """Prepopulated tokens."""
        return self.add_batch([Request(request_id, tokens, **keywords)])[0]

    def add_batch(self, requests: list[Request]) -> list[int]:
        admissions = self.manager.add_sequences(requests)
        self.manager.verify()
        self.lengths |= {request.id: request.num_tokens for request in requests}
        return [admission.prepopulated_tokens for admission in admissions]

    def ids(self, request_id: int) -> list[int]:
        return self.manager.block_ids(request_id)

    def append(self, request_id: int, *tokens: int) -> None:
        self.computed(request_id)
        for token in tokens:
            self.manager.append_tokens(request_id, [token])
        self.manager.verify()

    def computed(self, request_id: int) -> None:
        """The prompt has been computed."""
        length = self.lengths.pop(request_id, None)
        if length is not None:
            self.manager.mark_computed(request_id, length)

    def store(self, request_id: int) -> None:
        self.computed(request_id)
        self.manager.store_context(request_id)
        self.manager.verify()

    def release(self, *request_ids: int) -> None:
        for request_id in request_ids:
            self.computed(request_id)
            self.manager.remove_sequence(request_id, store=True)
            self.manager.verify()

    def drop(self, *request_ids: int) -> None:
        for request_id in request_ids:
            self.lengths.pop(request_id, None)
            self.manager.remove_sequence(request_id, store=False)
            self.manager.verify()

    def free(self, group: int = 0) -> int:
        return self.manager.num_free_blocks(Level.PRIMARY, group=group)

    def events(self) -> list[object]:
        self.manager.flush_events()
        return [event.data for event in self.manager.poll_events()]


def _in_blocks(size: object) -> object:
    return f"{size} blocks" if isinstance(size, int) else size


Make = Callable[..., CaseCache]
