"""vLLM's part in the ledger benchmark: its KV cache manager and its CPU offloading manager, driven as its scheduler drives them.

Written against vLLM 0.32. Nothing here computes or allocates keys and values: like ours, these classes only keep books. Prefix
caching is on with SHA-256 block hashes, which is vLLM's default; its statistics are off, and so are its events, except where a
row says otherwise. A prompt comes as a list
of ints, the form that vLLM takes; its Request hashes it when it is made, inside the timed part unless a row says otherwise.
"""

from __future__ import annotations

import hashlib
from typing import Final

import torch
import vllm
from vllm.distributed.kv_events import BlockStored, KVCacheEvent
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.request import Request

from kvtier.bench.ledger_rig import TOKENS_PER_BLOCK, Prompts, Side
from kvtier.bench.ledger_workloads import blocks_of, branches_of

VERSION: Final[str] = vllm.__version__
SETTINGS: Final = {"prefix_caching_hash_algo": "sha256", "log_stats": False}

init_none_hash(sha256)
_HASHER: Final = get_request_block_hasher(TOKENS_PER_BLOCK, sha256)


def new_manager(num_blocks: int, max_tokens: int, events: bool = False) -> KVCacheManager:
    """A KV cache manager of one full-attention group; one block more, because vLLM keeps block 0 for itself."""
    spec = FullAttentionSpec(block_size=TOKENS_PER_BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    config = KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, max_model_len=max_tokens, scheduler_block_size=TOKENS_PER_BLOCK, hash_block_size=TOKENS_PER_BLOCK,
                          enable_caching=True, log_stats=SETTINGS["log_stats"], enable_kv_cache_events=events)


def new_request(number: int, tokens: list[int], max_new_tokens: int = 16) -> Request:
    """A request as the scheduler gets it: its block hashes are computed here."""
    return Request(str(number), tokens, SamplingParams(max_tokens=max_new_tokens), None, block_hasher=_HASHER)


def admit(manager: KVCacheManager, request: Request) -> int:
    """Match, allocate and compute the whole prompt. Returns the tokens that were reused."""
    blocks, num_cached, _ = manager.get_computed_blocks(request)
    new = request.num_tokens - num_cached
    allocated = manager.allocate_slots(request, new, num_cached, blocks)
    if allocated is None:
        raise RuntimeError(f"vLLM had no room for request {request.request_id}")
    request.num_computed_tokens = request.num_tokens
    return int(num_cached)


def store(manager: KVCacheManager, request: Request) -> None:
    """Serve a request that generates nothing; what it computed stays cached."""
    admit(manager, request)
    manager.free(request)


class VllmMatch(Side):
    """W1, W1S: hashing the prompt and finding its longest cached prefix; ``ready``: the hashes are there."""

    def __init__(self, num_tokens: int, every: int, ready: bool, operations: int) -> None:
        super().__init__(operations)
        prompts = Prompts(1)
        prompt = prompts.new(num_tokens)
        branches = branches_of(prompt, every, prompts) if every else []
        self._manager = new_manager(blocks_of(num_tokens) + 2 * len(branches) + every + 2, num_tokens + 1)
        for number, branch in enumerate([prompt, *branches]):
            store(self._manager, new_request(number, branch.tolist()))
        self._expected = (num_tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
        self._prompt: list[int] = prompt.tolist()
        self._request = new_request(0, self._prompt) if ready else None
        self._found = 0

    def run(self) -> None:
        manager, prompt, request = self._manager, self._prompt, self._request
        for number in range(self.operations):
            _, self._found, _ = manager.get_computed_blocks(request if request is not None else new_request(number, prompt))

    def check(self) -> None:
        self.require("tokens matched", self._found, self._expected)
        self._found = 0


class VllmInsert(Side):
    """W2: new prompts into a free pool; W3 and growth: into a full one (``pool`` > 0), where every block taken evicts."""

    def __init__(self, num_tokens: int, inserts: int, pool: int = 0, events: bool = False) -> None:
        super().__init__(inserts)
        self._inserts = inserts
        self._num_tokens = num_tokens
        self._prompts = Prompts(2)
        self._is_full = pool > 0
        self._events = events
        self._batches: list[list[KVCacheEvent]] = []
        self._pool = pool if pool > 0 else inserts * blocks_of(num_tokens)
        self._manager = new_manager(self._pool, num_tokens + 1, events)
        for number in range(-(-self._pool // blocks_of(num_tokens)) if self._is_full else 0):
            store(self._manager, new_request(number, self._prompts.new(num_tokens).tolist()))
        self._manager.take_events()
        self._given: list[list[int]] = []

    def prepare(self) -> None:
        if not self._is_full:
            self._manager = new_manager(self._pool, self._num_tokens + 1, self._events)
        self._given = [self._prompts.new(self._num_tokens).tolist() for _ in range(self._inserts)]
        self._batches = []

    def run(self) -> None:
        manager = self._manager
        for number, tokens in enumerate(self._given):
            request = new_request(number, tokens)
            admit(manager, request)
            manager.free(request)
            if self._events:
                self._batches.append(manager.take_events())

    def check(self) -> None:
        expected = (self._num_tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
        for tokens in self._given:
            _, found, _ = self._manager.get_computed_blocks(new_request(0, tokens))
            self.require("tokens of an inserted prompt", found, expected)
        self.require("free blocks", self._manager.block_pool.get_num_free_blocks(), self._pool)
        cached = len(self._manager.block_pool.cached_block_hash_to_block)
        self.require("blocks cached", cached, self._pool // blocks_of(self._num_tokens) * (self._num_tokens // TOKENS_PER_BLOCK))
        stored = sum(len(event.block_hashes) for batch in self._batches for event in batch if isinstance(event, BlockStored))
        self.require("blocks that events tell of", stored,
                     self._inserts * (self._num_tokens // TOKENS_PER_BLOCK) if self._events else 0)


class VllmSiblings(Side):
    """growth/siblings: short prompts where many cached ones begin with the same token, which means nothing to a hash map."""

    def __init__(self, siblings: int, num_tokens: int, operations: int) -> None:
        super().__init__(operations)
        self._prompts = Prompts(8)
        self._num_tokens = num_tokens
        self._pool = (siblings + 2) * blocks_of(num_tokens)
        self._manager = new_manager(self._pool, num_tokens + 1)
        for number in range(siblings):
            store(self._manager, new_request(number, self._new()))
        self._tokens: list[list[int]] = []
        self._reused = 0

    def prepare(self) -> None:
        self._tokens = [self._new() for _ in range(self.operations)]

    def run(self) -> None:
        manager = self._manager
        for number, tokens in enumerate(self._tokens):
            request = new_request(number, tokens)
            self._reused += admit(manager, request)
            manager.free(request)

    def check(self) -> None:
        self.require("tokens reused", self._reused, 0)
        self.require("free blocks", self._manager.block_pool.get_num_free_blocks(), self._pool)

    def _new(self) -> list[int]:
        tokens: list[int] = self._prompts.new(self._num_tokens).tolist()
        tokens[0] = 1
        return tokens


class VllmDecode(Side):
    """W4: slots for the newest token of each sequence, then the sampled token is appended."""

    def __init__(self, num_sequences: int, num_tokens: int, steps: int) -> None:
        super().__init__(steps)
        prompts = Prompts(4)
        self._tokens: list[list[int]] = [prompts.new(num_tokens + number % TOKENS_PER_BLOCK).tolist()
                                         for number in range(num_sequences)]
        self._pool = sum(blocks_of(len(tokens) + steps) for tokens in self._tokens)
        self._longest = max(len(tokens) for tokens in self._tokens) + steps + 1
        self._manager = new_manager(self._pool, self._longest)
        self._requests: list[Request] = []

    def prepare(self) -> None:
        self._manager = new_manager(self._pool, self._longest)
        self._requests = [new_request(number, tokens, self.operations) for number, tokens in enumerate(self._tokens)]
        for request in self._requests:
            admit(self._manager, request)
            request.append_output_token_ids(0)

    def run(self) -> None:
        manager, requests = self._manager, self._requests
        for step in range(self.operations):
            for request in requests:
                manager.allocate_slots(request, 1)
            for request in requests:
                request.num_computed_tokens += 1
                request.append_output_token_ids(step)

    def check(self) -> None:
        for request, tokens in zip(self._requests, self._tokens, strict=True):
            length = len(tokens) + self.operations
            blocks = len(self._manager.get_block_ids(request.request_id)[0])
            self.require("tokens and blocks of a sequence", (request.num_tokens - 1, blocks), (length, blocks_of(length)))


class VllmTurns(Side):
    """W5: each turn's prompt is matched, admitted, computed and freed, which leaves it cached."""

    def __init__(self, users: int, history: int, added: int, turns: int) -> None:
        super().__init__(users * turns)
        self._lengths = [history + added * turn for turn in range(1, turns + 1)]
        self._before = [history, *self._lengths[:-1]]
        self._users = users
        self._history = history
        self._prompts = Prompts(5)
        self._pool = users * (blocks_of(self._lengths[-1]) + 1)
        self._manager = new_manager(self._pool, self._lengths[-1] + 1)
        self._turns: list[list[list[int]]] = []
        self._reused = 0

    def prepare(self) -> None:
        self._manager = new_manager(self._pool, self._lengths[-1] + 1)
        conversations: list[list[int]] = [self._prompts.new(self._lengths[-1]).tolist() for _ in range(self._users)]
        for user, tokens in enumerate(conversations):
            store(self._manager, new_request(user, tokens[:self._history]))
        self._turns = [[tokens[:length] for tokens in conversations] for length in self._lengths]
        self._reused = 0

    def run(self) -> None:
        manager = self._manager
        for prompts in self._turns:
            for user, tokens in enumerate(prompts):
                request = new_request(user, tokens)
                self._reused += admit(manager, request)
                manager.free(request)

    def check(self) -> None:
        full = sum(tokens // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK for tokens in self._before)  # vLLM reuses full blocks only
        self.require("tokens reused", self._reused, self._users * full)
        self.require("free blocks", self._manager.block_pool.get_num_free_blocks(), self._pool)


class VllmHostTier(Side):
    """W6: one request stores its blocks, and they are complete; another one finds them, loads them, and that is complete. The
    host level is full: each block stored evicts one. ``policy``: "lru" or "arc"."""

    def __init__(self, blocks: int, blocks_per_prompt: int, policy: str) -> None:
        super().__init__(blocks)
        self._per_prompt = blocks_per_prompt
        self._manager = CPUOffloadingManager(blocks, cache_policy=policy)
        self._next = 0
        self._evicted = self._loaded = 0
        self._prompts: list[list[bytes]] = []
        self.prepare()
        self.run()  # fills it

    def prepare(self) -> None:
        self._evicted = self._loaded = 0
        self._prompts = []
        for _ in range(self.operations // self._per_prompt):
            digests = [hashlib.sha256(b"%d" % number).digest() for number in range(self._next, self._next + self._per_prompt)]
            self._prompts.append([make_offload_key(digest, 0) for digest in digests])
            self._next += self._per_prompt

    def run(self) -> None:
        manager = self._manager
        for number, keys in enumerate(self._prompts):
            writer = ReqContext(f"{number}w")
            manager.on_new_request(writer)
            output = manager.prepare_store(keys, writer)
            manager.complete_store(output.keys_to_store, writer)
            manager.on_request_finished(writer)
            self._evicted += len(output.evicted_keys)
            reader = ReqContext(f"{number}r")
            manager.on_new_request(reader)
            for key in keys:
                if manager.lookup(key, reader) is not LookupResult.HIT:
                    break
            else:
                manager.prepare_load(keys, reader)
                manager.complete_load(keys, reader)
                self._loaded += len(keys)
            manager.on_request_finished(reader)

    def check(self) -> None:
        self.require("blocks loaded and evicted", (self._loaded, self._evicted), (self.operations, self.operations))
