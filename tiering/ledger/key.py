"""Keys: what makes two blocks the same (design: reuse is decided by content).

Inside the process a block is identified by its namespace and by the tokens themselves, compared as bytes. Outside (manifest,
events) it is named by a SHA-256 chain over the same bytes, seeded with the namespace.

Encoding of one block of tokens: 4 bytes per token (int32); 12 where the namespace carries extra ids (int32, uint64). A block
that multimodal items overlap gets a suffix: the letter ``M``, then per overlapping run the item's digest, the offset inside the
item, where in the block the run starts and how long it is there. Without the last two, an item one token further on would have
the same key where a text token happens to equal the item's placeholder. The letter makes the length odd, so such a key never
equals a plain one.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_right
from typing import Final

from kvtier.errors import RequestError
from kvtier.tiering.ledger.request import MultimodalItem, Request

TOKEN_BYTES: Final = 4
TOKEN_WITH_EXTRA_BYTES: Final = 12
_MASK64: Final = (1 << 64) - 1
_MASK32: Final = (1 << 32) - 1


SUFFIX_RECORD: Final = struct.Struct("<32sQII")  # digest, offset inside the item, first position in the block, tokens

Identity = tuple[int | str | bytes | None, ...]


class Namespace:
    """What must agree before tokens are even compared: LoRA adapter, salt, use of extra ids (and their stable digests), encoder input.

    ``identity`` is what the tree finds a namespace by; ``chain_seed`` (32 bytes) starts its chain of keys. ``seed`` names the
    model, layout and format, so that chain keys of different models never meet.
    """

    def __init__(self, seed: bytes, request: Request) -> None:
        self.seed = seed
        self.lora_id: int | None = request.lora_id
        self.cache_salt: str | None = request.cache_salt
        self.encoder_digest: bytes | None = request.encoder_digest
        uses_extra_ids = request.extra_ids is not None
        self.identity: Identity = (self.lora_id, self.cache_salt, uses_extra_ids, request.lora_digest, request.extra_ids_digest)
        if self.encoder_digest is not None:
            self.identity = (*self.identity, self.encoder_digest)
        self.token_width = TOKEN_WITH_EXTRA_BYTES if uses_extra_ids else TOKEN_BYTES
        self._lora_digest: bytes | None = request.lora_digest
        self._extra_ids_digest: bytes | None = request.extra_ids_digest
        self._chain_seed = b""

    @property
    def is_persistent(self) -> bool:
        """Process-local ids mean nothing to the next process: without a stable digest such blocks never reach NVMe."""
        return ((self.lora_id is None or self._lora_digest is not None)
                and (self.token_width == TOKEN_BYTES or self._extra_ids_digest is not None))

    @property
    def chain_seed(self) -> bytes:
        if not self._chain_seed:
            lora_id, salt, lora_digest, extra_ids_digest = self.lora_id, self.cache_salt, self._lora_digest, self._extra_ids_digest
            uses_extra_ids = self.token_width != TOKEN_BYTES
            parts = [
                self.seed,
                b"" if lora_id is None else (b"d" + lora_digest if lora_digest is not None else b"i%d" % lora_id),
                b"" if salt is None else b"s" + salt.encode("utf-8", "surrogatepass"),
                b"" if not uses_extra_ids else b"x" + (extra_ids_digest or b""),
            ]
            if self.encoder_digest is not None:
                parts.append(b"e" + self.encoder_digest)
            digest = hashlib.sha256(b"kvtier namespace 1")
            for part in parts:
                digest.update(struct.pack("<Q", len(part)))
                digest.update(part)
            self._chain_seed = digest.digest()
        return self._chain_seed


def next_chain_key(parent: bytes, block_key: bytes) -> bytes:
    """Chain key (32 bytes) of the block with this key behind the block or namespace whose chain key is ``parent``."""
    return hashlib.sha256(parent + block_key).digest()


def multimodal_runs(items: tuple[MultimodalItem, ...], start: int, end: int) -> list[tuple[int, int, bytes, int]]:
    """Each run that overlaps prompt positions [start, end): (position behind ``start``, tokens, digest, offset inside the item)."""
    found: list[tuple[int, int, bytes, int]] = []
    for item in items:
        before = 0  # the item's own tokens in its earlier runs
        for run_start, length in item.runs:
            first = max(start, run_start)
            last = min(end, run_start + length)
            if first < last:
                found.append((first - start, last - first, item.digest, before + first - run_start))
            before += length
    found.sort()  # the order in which a request lists its items means nothing
    return found


def multimodal_keys(items: tuple[MultimodalItem, ...], start: int, end: int) -> list[tuple[bytes, int]]:
    """(digest, offset inside the item) of each run that overlaps prompt positions [start, end), in prompt order."""
    return [(digest, offset) for _position, _tokens, digest, offset in multimodal_runs(items, start, end)]


NO_CHAIN: Final[list[bytes]] = []  # shared, never changed: of most runs nobody asks for a chain key


class KeyRun:
    """Keys of consecutive blocks behind a parent run: what chain keys and events are made of, when somebody asks.

    The content never changes, so that an event may refer to a run after the tree has changed, and read it without the ledger's
    lock. Two attributes are replaced, each by one assignment of something equal: ``parent`` by a run with the same end, when the
    tree splits the old one (which would otherwise be kept alive), and the list of chain keys by a longer one.

    Attributes:
        block_bytes: bytes of the tokens of each block; fewer than a full block's in a partial tail.
        label: keys of the blocks, back to back.
        num_blocks: one where the run is not plain.
        is_plain: full blocks without suffix.
        parent: the run whose last block precedes this one's first; None at the start of a prompt.
    """

    __slots__ = ("_chain", "block_bytes", "is_plain", "label", "namespace", "num_blocks", "parent")

    def __init__(self, namespace: Namespace, block_bytes: int, label: bytes, num_blocks: int, is_plain: bool, parent: KeyRun | None,
                 chain: list[bytes]) -> None:
        self.namespace = namespace
        self.block_bytes = block_bytes
        self.label = label
        self.num_blocks = num_blocks
        self.is_plain = is_plain
        self.parent = parent
        self._chain = chain  # chain keys of the first blocks, as far as somebody asked; never changed in place

    def upper(self, count: int) -> KeyRun:
        """The first ``count`` blocks of a plain run."""
        return KeyRun(self.namespace, self.block_bytes, self.label[:count * self.block_bytes], count, True, self.parent,
                      self._chain[:count] or NO_CHAIN)

    def lower(self, count: int, end: int, upper: KeyRun) -> KeyRun:
        """Blocks [count, end) of a plain run, behind ``upper`` which is what comes before them."""
        return KeyRun(self.namespace, self.block_bytes, self.label[count * self.block_bytes:end * self.block_bytes], end - count, True,
                      upper, self._chain[count:end] or NO_CHAIN)

    def grown(self, count: int, label: bytes, added: int) -> KeyRun:
        """The first ``count`` blocks of a plain run, and ``added`` more with these keys."""
        return KeyRun(self.namespace, self.block_bytes, self.label[:count * self.block_bytes] + label, count + added, True, self.parent,
                      self._chain[:count] or NO_CHAIN)

    def block_key(self, position: int) -> bytes:
        """Key of one block."""
        if not self.is_plain:
            return self.label
        return self.label[position * self.block_bytes:(position + 1) * self.block_bytes]

    def chain_key(self, position: int) -> bytes:
        """SHA-256 chain key of one block, computed when first asked for."""
        known = self._chain
        if position < len(known):
            return known[position]
        path: list[KeyRun] = []  # upwards to the first run whose chain is complete; a loop, for paths can be thousands of runs long
        run = self
        while True:
            path.append(run)
            before = run.parent
            if before is None:
                key = run.namespace.chain_seed
                break
            known = before._chain
            if len(known) == before.num_blocks:
                key = known[before.num_blocks - 1]
                break
            run = before
        while path:
            run = path.pop()
            chain = list(run._chain)  # a new list: another thread may be reading the old one
            end = run.num_blocks if path else position + 1
            if chain:
                key = chain[len(chain) - 1]
            while len(chain) < end:
                key = next_chain_key(key, run.block_key(len(chain)))
                chain.append(key)
            run._chain = chain
            key = chain[end - 1]
        return key

    def parent_chain_key(self, position: int) -> bytes | None:
        """Chain key of the block before, None at the start of a prompt."""
        if position > 0:
            return self.chain_key(position - 1)
        before = self.parent
        return None if before is None else before.chain_key(before.num_blocks - 1)

    def token_ids(self, position: int) -> tuple[int, ...]:
        """Token ids of one block."""
        chunk = self.label[position * self.block_bytes:(position + 1) * self.block_bytes]
        return tuple(_decode(chunk, self.namespace.token_width))

    def multimodal(self, position: int) -> tuple[tuple[bytes, int], ...]:
        """(digest, offset inside the item) of each item run that overlaps the block, in prompt order."""
        if self.is_plain or len(self.label) == self.block_bytes:
            return ()
        return tuple([(digest, offset) for digest, offset, _first, _tokens
                      in SUFFIX_RECORD.iter_unpack(self.label[self.block_bytes + 1:])])


def _encode(tokens: list[int], width: int) -> bytes:
    """Tokens without extra ids, in the width of their namespace."""
    if width == TOKEN_BYTES:
        return array("i", tokens).tobytes()
    return b"".join([struct.pack("<iQ", token, 0) for token in tokens])


def _decode(chunk: bytes, width: int) -> list[int]:
    if width == TOKEN_BYTES:
        return array("i", chunk).tolist()
    return [token for token, _extra in struct.iter_unpack("<iQ", chunk)]


class TokenKeys:
    """A sequence's tokens as bytes, growing, with the suffixes of its multimodal blocks.

    Decoding appends to a list and takes back from it; the tokens are joined with the prompt's bytes only when somebody needs them as
    one string, for that copies the prompt.
    """

    def __init__(self, request: Request, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        extra_ids: tuple[int, ...] | None = request.extra_ids
        self.width = TOKEN_BYTES if extra_ids is None else TOKEN_WITH_EXTRA_BYTES
        self.block_bytes = tokens_per_block * self.width
        self.num_tokens: int = request.num_tokens
        self._data: bytes = request.token_bytes
        if extra_ids is not None:
            ids = array("i", self._data)
            self._data = b"".join([struct.pack("<iQ", token, extra) for token, extra in zip(ids, extra_ids, strict=True)])
        self._appended: list[int] = []
        self.suffixes: dict[int, bytes] = {}
        self.suffix_blocks: list[int] = []  # ascending
        items: tuple[MultimodalItem, ...] = request.multimodal
        if items:
            touched: set[int] = set()
            for item in items:
                for start, length in item.runs:
                    touched.update(range(start // tokens_per_block, (start + length - 1) // tokens_per_block + 1))
            self.suffix_blocks = sorted(touched)
            for block in self.suffix_blocks:
                runs = multimodal_runs(items, block * tokens_per_block, (block + 1) * tokens_per_block)
                self.suffixes[block] = b"M" + b"".join(
                    [SUFFIX_RECORD.pack(digest, offset, position, tokens) for position, tokens, digest, offset in runs])

    def append(self, token: int) -> None:
        """One more token; the caller has checked that it fits int32."""
        self._appended.append(token)
        self.num_tokens += 1

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens``."""
        joined = len(self._data) // self.width
        if num_tokens >= joined:
            del self._appended[num_tokens - joined:]
        else:
            self._data = self._data[:num_tokens * self.width]
            self._appended = []
        self.num_tokens = num_tokens

    def data(self) -> bytes:
        """All tokens, encoded."""
        if self._appended:
            self._data = self._data + _encode(self._appended, self.width)
            self._appended = []
        return self._data

    def data_of(self, num_tokens: int) -> bytes:
        """At least the first ``num_tokens`` tokens, encoded."""
        return self._data if num_tokens * self.width <= len(self._data) else self.data()

    def _part(self, start: int, end: int) -> bytes:
        """Tokens [start, end), encoded, without joining all of them."""
        joined = len(self._data) // self.width
        part = self._data[start * self.width:end * self.width]
        if end > joined:
            part += _encode(self._appended[max(start - joined, 0):end - joined], self.width)
        return part

    def block_key(self, block: int, num_tokens: int) -> bytes:
        """Key of the first ``num_tokens`` (at most a block's) tokens of a block."""
        start = block * self.tokens_per_block
        key = self._part(start, start + num_tokens)
        suffix = self.suffixes.get(block)
        return key if suffix is None else key + suffix

    def plain_end(self, block: int, limit: int) -> int:
        """The first block behind ``block`` that has a suffix, at most ``limit``."""
        if not self.suffix_blocks:
            return limit
        place = bisect_right(self.suffix_blocks, block)
        return min(self.suffix_blocks[place], limit) if place < len(self.suffix_blocks) else limit

    def prefix_digest(self, block: int) -> bytes | None:
        """SHA-256 of everything before a block: tokens, extra ids and multimodal content. None for the first block."""
        if block == 0:
            return None
        digest = hashlib.sha256(self._part(0, block * self.tokens_per_block))
        for number in self.suffix_blocks:
            if number < block:
                digest.update(struct.pack("<Q", number) + self.suffixes[number])
        return digest.digest()

    def token_ids(self, start: int, end: int) -> list[int]:
        """Token ids [start, end) as integers."""
        return _decode(self._part(start, end), self.width)


class BlockKey:
    """The identity of one block as a value: for callers outside the ledger (``match().first_new_key``) and for events.

    Equality compares every field, tokens and encoder input included. ``prefix`` is a digest of what comes before the block in its prompt;
    None at a prompt's start, and where nobody has said. ``hash64`` is the 64-bit block hash of TensorRT-LLM's first KV event
    format ("v1"), an option for event consumers that still use it; it never decides reuse.
    """

    def __init__(self, tokens: tuple[int, ...], lora_id: int | None = None, cache_salt: str | None = None,
                 extra_ids: tuple[int, ...] | None = None, multimodal: tuple[tuple[bytes, int], ...] = (),
                 encoder_digest: bytes | None = None, prefix: bytes | None = None) -> None:
        if extra_ids is not None and len(extra_ids) != len(tokens):
            raise RequestError(f"{len(extra_ids)} extra_ids for {len(tokens)} tokens; pass one for each token")
        self.tokens = tokens
        self.lora_id = lora_id
        self.cache_salt = cache_salt
        self.extra_ids = extra_ids
        self.multimodal = multimodal
        self.encoder_digest = encoder_digest
        self.prefix = prefix

    def _fields(self) -> tuple[object, ...]:
        return (self.tokens, self.lora_id, self.cache_salt, self.extra_ids, self.multimodal, self.encoder_digest, self.prefix)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockKey) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return f"BlockKey{self._fields()}"

    def num_matching_tokens(self, other: BlockKey) -> int:
        """Equal leading tokens; 0 unless adapter, salt, multimodal keys, encoder's input and use of extra ids are all equal."""
        if (self.lora_id != other.lora_id or self.cache_salt != other.cache_salt or self.multimodal != other.multimodal
                or self.encoder_digest != other.encoder_digest or (self.extra_ids is None) != (other.extra_ids is None)):
            return 0
        matching = 0
        for position in range(min(len(self.tokens), len(other.tokens))):
            if self.tokens[position] != other.tokens[position]:
                break
            if self.extra_ids is not None and other.extra_ids is not None and self.extra_ids[position] != other.extra_ids[position]:
                break
            matching += 1
        return matching

    def shorten(self, num_tokens: int) -> BlockKey:
        """The key of the first ``num_tokens`` tokens. Multimodal blocks cannot be shortened: RequestError."""
        if self.multimodal:
            raise RequestError("a block with multimodal content cannot be shortened: part of an item is not that item")
        if not 0 <= num_tokens <= len(self.tokens):
            raise RequestError(f"num_tokens={num_tokens}: must be between 0 and {len(self.tokens)}")
        extra = None if self.extra_ids is None else self.extra_ids[:num_tokens]
        return BlockKey(self.tokens[:num_tokens], self.lora_id, self.cache_salt, extra, (), self.encoder_digest, self.prefix)

    def hash64(self, parent: int = 0) -> int:
        """64-bit hash chained to ``parent`` (0 at the start of a prompt). The salt enters once, at the head of the chain."""
        seed = (len(self.tokens) ^ (parent * 0xBF58476D1CE4E5B9)) & _MASK64
        if parent == 0 and self.cache_salt is not None:
            salt = int.from_bytes(hashlib.sha256(self.cache_salt.encode("utf-8", "surrogatepass")).digest()[:8], "little")
            seed = _mix64(seed, salt)
        for position, token in enumerate(self.tokens):
            seed = _mix32(seed, token & _MASK32)
            if self.extra_ids is not None:
                seed = _mix64(seed, self.extra_ids[position])
        if self.lora_id is not None:
            seed = _mix64(seed, self.lora_id)
        for digest, offset in self.multimodal:
            for word in struct.unpack("<8I", digest):
                seed = _mix32(seed, word)
            seed = _mix64(seed, offset)
        return seed


def _combine(seed: int, value: int) -> int:
    return (seed ^ (value + 0x9E3779B9 + (seed << 6) + (seed >> 2))) & _MASK64


def _mix32(seed: int, value: int) -> int:
    value = (((value >> 16) ^ value) * 0x45D9F3B) & _MASK32
    value = (((value >> 16) ^ value) * 0x45D9F3B) & _MASK32
    return _combine(seed, (value >> 16) ^ value)


def _mix64(seed: int, value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return _combine(seed, value ^ (value >> 31))
