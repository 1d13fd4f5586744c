"""kvtier's side of the ledger benchmark's workloads (what each of them is: docs/performance.md).

A prompt is turned into a ``Request`` inside the timed part unless a row says otherwise, because a server does that once for
each request. Moves and events are fetched inside it as well: whoever runs the ledger has to.
"""

from __future__ import annotations

from typing import Final

from kvtier.bench.ledger_rig import (
    DOWN,
    TOKENS_PER_BLOCK,
    UP,
    Prompts,
    Side,
    Tokens,
    count_moves,
    count_stored,
    free_primary,
    new_ledger,
    num_cached,
    num_dropped,
    store,
)
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.capacity import PrefixReuse
from kvtier.tiering.ledger.events import Event
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Discard, Move
from kvtier.tiering.ledger.request import Request

BUFFER: Final = "buffer"
LIST: Final = "list"
READY: Final = "ready"
"""How a prompt comes: an int32 array, a list of ints, or as a Request made before."""


def blocks_of(num_tokens: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-num_tokens // TOKENS_PER_BLOCK)


def branches_of(prompt: Tokens, every: int, prompts: Prompts) -> list[Tokens]:
    """Prompts that share the first ``every``, 2 x ``every``, ... blocks and go on for one block of their own, and one token."""
    step = every * TOKENS_PER_BLOCK
    found = []
    for shared in range(step, len(prompt), step):
        branch = prompts.new(shared + TOKENS_PER_BLOCK + 1)
        branch[:shared] = prompt[:shared]
        found.append(branch)
    return found


class Match(Side):
    """Matching one prompt whose every block is cached; with ``every`` > 0, others branch off after each so many blocks (W1, W1S)."""

    def __init__(self, num_tokens: int, every: int, form: str, operations: int) -> None:
        super().__init__(operations)
        prompts = Prompts(1)
        prompt = prompts.new(num_tokens)
        branches = branches_of(prompt, every, prompts) if every else []
        blocks = blocks_of(num_tokens) + 2 * len(branches) + every + 2
        self.ledger = new_ledger(blocks, blocks, blocks)
        for number, branch in enumerate([prompt, *branches]):
            store(self.ledger, Request(number, branch))
        self._expected = (num_tokens - 1) // TOKENS_PER_BLOCK
        self._prompt: object = prompt.tolist() if form == LIST else prompt
        # Each its own: what is remembered of the request asked about last must not answer for it.
        self._requests = [Request(number, prompt) for number in range(operations)] if form == READY else []
        self._found: PrefixReuse | None = None

    def run(self) -> None:
        ledger, prompt = self.ledger, self._prompt
        if self._requests:
            for request in self._requests:
                self._found = capacity.match(ledger, request)
            return
        for number in range(self.operations):
            self._found = capacity.match(ledger, Request(number, prompt))

    def check(self) -> None:
        found = self._found
        self.require("blocks matched", None if found is None else found.reusable_blocks, self._expected)
        self.require("tokens by level", None if found is None else found.tokens_by_level,
                     (self._expected * TOKENS_PER_BLOCK, 0, 0))
        self._found = None


class Compare(Side):
    """The least that matching by content can cost: comparing the prompt's bytes with equal bytes elsewhere."""

    def __init__(self, num_tokens: int, operations: int) -> None:
        super().__init__(operations)
        self._left = Prompts(1).new(num_tokens).tobytes()
        self._right = bytes(bytearray(self._left))
        self._equal = 0

    def run(self) -> None:
        for _ in range(self.operations):
            self._equal += self._left == self._right

    def check(self) -> None:
        self.require("equal comparisons", self._equal, self.operations)
        self._equal = 0


class Insert(Side):
    """Admit, compute and store new prompts into a pool that is free (W2), made anew for every turn.

    What an event tells is made when somebody asks for its ``data``; ``read`` does, for every event.
    """

    def __init__(self, num_tokens: int, form: str, inserts: int, events: bool = True, read: bool = False) -> None:
        super().__init__(inserts)
        self._inserts = inserts
        self._num_tokens = num_tokens
        self._form = form
        self._events = events
        self._read = read
        self._prompts = Prompts(2)
        self.ledger = self._fresh()
        self._tokens: list[Tokens] = []
        self._given: list[object] = []
        self._batches: list[list[Event]] = []
        self._moves: list[Move | Discard] = []

    def prepare(self) -> None:
        self.ledger = self._fresh()
        self._draw()

    def run(self) -> None:
        ledger = self.ledger
        for number, tokens in enumerate(self._given):
            request = Request(number, tokens)
            ledger.add_sequences([request])
            ledger.mark_computed(number, request.num_tokens)
            ledger.remove_sequence(number, True)
            self._moves += ledger.moves.take()
            batch = ledger.events.flush()
            self._batches.append(batch)
            if self._read:
                self._told += [event.data for event in batch]

    def check(self) -> None:
        self._check_stored()
        self.require("Moves", count_moves(self._moves), {})
        self.require("free blocks", free_primary(self.ledger), self._pool)

    def _fresh(self) -> Ledger:
        return new_ledger(self._pool, self._pool, self._pool, events=self._events)

    @property
    def _pool(self) -> int:
        return self._inserts * blocks_of(self._num_tokens)

    def _draw(self) -> None:
        """New prompts, in the form in which they are given."""
        self._tokens = [self._prompts.new(self._num_tokens) for _ in range(self._inserts)]
        self._given = [tokens.tolist() if self._form == LIST else tokens for tokens in self._tokens]
        self._batches = []
        self._told: list[object] = []
        self._moves = []

    def _check_stored(self) -> None:
        full = (self._num_tokens - 1) // TOKENS_PER_BLOCK
        for tokens in self._tokens:
            self.require("blocks of an inserted prompt", capacity.match(self.ledger, Request(0, tokens)).reusable_blocks, full)
        if self._events:
            stored = sum(count_stored(batch) for batch in self._batches)
            self.require("blocks that events tell of", stored, self._inserts * blocks_of(self._num_tokens - 1))


class Evict(Insert):
    """The same into a full pool: every block taken evicts cached content (W3, growth).

    The content is dropped, or goes down to a secondary level that is full too and drops its coldest.
    """

    def __init__(self, num_tokens: int, inserts: int, pool: int, lower: int, offload: bool, events: bool = True,
                 read: bool = False) -> None:
        self._pool_blocks = pool
        self._lower = lower
        self._offload = offload
        super().__init__(num_tokens, BUFFER, inserts, events, read)
        each = blocks_of(num_tokens)
        kept = pool + (lower if offload else 0)
        for number in range(-(-kept // each)):
            store(self.ledger, Request(number, self._prompts.new(num_tokens)))
            self.ledger.moves.take()
        self.ledger.events.flush()
        self._dropped = 0

    def prepare(self) -> None:
        self._draw()
        self._dropped = num_dropped(self.ledger)

    def check(self) -> None:
        self._check_stored()
        taken = self._inserts * blocks_of(self._num_tokens)
        self.require("blocks dropped", num_dropped(self.ledger) - self._dropped, taken)
        self.require("Moves", count_moves(self._moves), {DOWN: taken} if self._offload else {})
        self.require("free blocks", free_primary(self.ledger), self._pool)

    def _fresh(self) -> Ledger:
        return new_ledger(self._pool, self._lower, self._lower, offload=self._offload, events=self._events)

    @property
    def _pool(self) -> int:
        return self._pool_blocks


class Siblings(Side):
    """Admitting short prompts where many cached ones begin with the same token, as all of a model's prompts do that begins
    every prompt with a token of its own (growth/siblings). Their blocks are candidates for partial reuse."""

    def __init__(self, siblings: int, num_tokens: int, operations: int) -> None:
        super().__init__(operations)
        self._prompts = Prompts(8)
        self._num_tokens = num_tokens
        self._pool = (siblings + 2) * blocks_of(num_tokens)
        self.ledger = new_ledger(self._pool, self._pool, self._pool)
        for number in range(siblings):
            store(self.ledger, Request(number, self._new()))
        self._before = num_cached(self.ledger)
        self._tokens: list[Tokens] = []
        self._blocks = 0

    def prepare(self) -> None:
        self._tokens = [self._new() for _ in range(self.operations)]
        self._blocks = 0
        self.ledger.moves.take()
        self.ledger.events.flush()

    def run(self) -> None:
        ledger = self.ledger
        for number, tokens in enumerate(self._tokens):
            admitted = ledger.add_sequences([Request(number, tokens)])
            self._blocks += len(admitted[0].blocks)
            ledger.remove_sequence(number, False)
            ledger.moves.take()

    def check(self) -> None:
        self.require("blocks admitted", self._blocks, self.operations * blocks_of(self._num_tokens))
        self.require("blocks cached", num_cached(self.ledger), self._before)
        self.require("free blocks", free_primary(self.ledger), self._pool)

    def _new(self) -> Tokens:
        tokens = self._prompts.new(self._num_tokens)
        tokens[0] = 1
        return tokens


class Decode(Side):
    """One token more for each of many sequences in one call (W4). Their lengths are staggered, so that in each step a part of
    them begins a block."""

    def __init__(self, num_sequences: int, num_tokens: int, steps: int) -> None:
        super().__init__(steps)
        prompts = Prompts(4)
        self._tokens = [prompts.new(num_tokens + number % TOKENS_PER_BLOCK) for number in range(num_sequences)]
        pool = sum(blocks_of(len(tokens) + steps) for tokens in self._tokens)
        self.ledger = new_ledger(pool, pool, pool)
        self._ids = list(range(num_sequences))
        self._steps = [[[step] for _ in self._ids] for step in range(steps)]

    def prepare(self) -> None:
        ledger = self.ledger
        for number in list(ledger.sequences):
            ledger.remove_sequence(number, False)
        ledger.add_sequences([Request(number, tokens, max_new_tokens=self.operations) for number, tokens in enumerate(self._tokens)])
        for number, tokens in enumerate(self._tokens):
            ledger.mark_computed(number, len(tokens))

    def run(self) -> None:
        ledger, ids = self.ledger, self._ids
        for tokens in self._steps:
            ledger.append_step(ids, tokens)
            ledger.moves.take()

    def check(self) -> None:
        for number, tokens in enumerate(self._tokens):
            sequence = self.ledger.sequence(number)
            length = len(tokens) + self.operations
            self.require("tokens and blocks of a sequence", (sequence.num_tokens, len(sequence.blocks)), (length, blocks_of(length)))


class Turns(Side):
    """Conversations that grow: in turn, each user's prompt is matched, admitted, computed and stored (W5). A turn repeats all
    of the conversation so far and adds to it."""

    def __init__(self, users: int, history: int, added: int, turns: int) -> None:
        super().__init__(users * turns)
        self._lengths = [history + added * turn for turn in range(1, turns + 1)]
        self._before = [history, *self._lengths[:-1]]
        self._users = users
        self._history = history
        self._prompts = Prompts(5)
        self._pool = users * (blocks_of(self._lengths[-1]) + 1)
        self.ledger = new_ledger(self._pool, self._pool, self._pool)
        self._turns: list[list[Tokens]] = []
        self._matched = 0
        self._prepopulated = 0

    def prepare(self) -> None:
        self.ledger = new_ledger(self._pool, self._pool, self._pool)
        conversations = [self._prompts.new(self._lengths[-1]) for _ in range(self._users)]
        for user, tokens in enumerate(conversations):
            store(self.ledger, Request(user, tokens[:self._history].copy()))
        self.ledger.events.flush()
        self._turns = [[tokens[:length].copy() for tokens in conversations] for length in self._lengths]
        self._matched = self._prepopulated = 0

    def run(self) -> None:
        ledger = self.ledger
        for prompts in self._turns:
            for user, tokens in enumerate(prompts):
                request = Request(user, tokens)
                found = capacity.match(ledger, request)
                admitted = ledger.add_sequences([request])
                ledger.mark_computed(user, request.num_tokens)
                ledger.remove_sequence(user, True)
                ledger.moves.take()
                ledger.events.flush()
                self._matched += found.reusable_blocks
                self._prepopulated += admitted[0].prepopulated

    def check(self) -> None:
        # The newest token of a turn is not stored; what follows the last full block is reused as part of a block.
        self.require("blocks matched", self._matched, self._users * sum((tokens - 1) // TOKENS_PER_BLOCK for tokens in self._before))
        self.require("tokens reused", self._prepopulated, self._users * sum(tokens - 1 for tokens in self._before))
        self.require("free blocks", free_primary(self.ledger), self._pool)


class HostTier(Side):
    """Prompts that lie on the secondary level are looked up and admitted (W6): each block is promoted, and for each of them
    another one goes down. Twice as many blocks are cached as the primary level holds, and no content is lost."""

    def __init__(self, blocks: int, blocks_per_prompt: int) -> None:
        super().__init__(blocks)
        prompts = Prompts(6)
        self._count = blocks // blocks_per_prompt
        # One token more than the blocks hold: the newest token is never stored, so its block is empty again afterwards.
        self._tokens = [prompts.new(blocks_per_prompt * TOKENS_PER_BLOCK + 1) for _ in range(2 * self._count)]
        # Within one admission the slots that promotions leave cannot be used yet: the lower level has room for one prompt more.
        self.ledger = new_ledger(blocks + 1, blocks + blocks_per_prompt, blocks)
        for number, tokens in enumerate(self._tokens):
            store(self.ledger, Request(number, tokens))
        self.ledger.moves.take()
        self.ledger.events.flush()
        self._next = 0
        self._found: list[PrefixReuse] = []
        self._moves: list[Move | Discard] = []

    def prepare(self) -> None:
        self._found = []
        self._moves = []

    def run(self) -> None:
        ledger = self.ledger
        for number in range(self._next, self._next + self._count):
            request = Request(number, self._tokens[number])
            self._found.append(capacity.match(ledger, request))
            ledger.add_sequences([request])
            ledger.mark_computed(number, request.num_tokens)
            ledger.remove_sequence(number, True)
            self._moves += ledger.moves.take()
            ledger.events.flush()

    def check(self) -> None:
        on_secondary = sum(found.tokens_by_level[1] for found in self._found)
        self.require("tokens found on the secondary level", on_secondary, self.operations * TOKENS_PER_BLOCK)
        self.require("Moves", count_moves(self._moves), {UP: self.operations, DOWN: self.operations})
        self.require("blocks dropped", num_dropped(self.ledger), 0)
        self._next = self._count - self._next  # the other half of the prompts has gone down meanwhile
