"""``HandoverTicket``: what the exporting process tells the importing one. Small, and nothing in it is believed before it is checked.

It names content, not tokens: a chain key for each block. Who has the same tokens finds that they are the same; who has not learns nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvtier.errors import RequestError
from kvtier.tiering.ledger.key import Namespace, TokenKeys, next_chain_key
from kvtier.tiering.ledger.request import Request

Ranges = tuple[tuple[int, int], ...]
"""Block positions ``[begin, end)``, ascending."""

_FILE: Final = re.compile(r"[0-9a-f]{32}-[0-9]{1,16}\.kv")
_KEY_BYTES: Final = 32
_DIGEST_BYTES: Final = 16
_MOST_RANKS: Final = 2048


@dataclass(frozen=True)
class HandoverPiece:
    """Where one exporting rank's blocks lie. ``file``: a name in the folder of handovers; "" where other ranks own all of it. ``digest``:
    of its checksums."""

    rank: int
    file: str
    digest: bytes


@dataclass(frozen=True)
class HandoverTicket:
    """A prompt's blocks, ready to be taken by another process.

    Attributes:
        content: the whole model's cache in words: model, block size, groups of layers with the heads of all ranks.
        num_ranks: exporting ranks.
        num_tokens: leading tokens whose keys and values are handed over; those behind the last full block are its *tail*.
        keys: a chain key for each block, and for the tail.
        positions: by group, which blocks there are. Of windows only what is still read.
        deadline: wall-clock seconds after which nothing is there any more.
        pieces: by exporting rank. A rank's own ticket has one; :meth:`joined` puts all ranks' together.
    """

    content: dict[str, Any]
    num_ranks: int
    num_tokens: int
    keys: tuple[bytes, ...]
    positions: tuple[Ranges, ...]
    deadline: float
    pieces: tuple[HandoverPiece, ...]

    @property
    def tokens_per_block(self) -> int:
        number: int = self.content["tokens_per_block"]
        return number

    @property
    def missing_ranks(self) -> list[int]:
        """Exporting ranks whose pieces are not in this ticket."""
        return sorted(set(range(self.num_ranks)) - {piece.rank for piece in self.pieces})

    @staticmethod
    def joined(tickets: Sequence[HandoverTicket]) -> HandoverTicket:
        """One ticket from those of several exporting ranks, which computed the same tokens.

        Raises:
            RequestError: none, of different tokens, layouts or numbers of ranks, or a rank twice.
        """
        if not isinstance(tickets, Sequence) or not tickets or not all(isinstance(ticket, HandoverTicket) for ticket in tickets):
            raise RequestError(f"tickets={tickets!r}: pass the tickets of all exporting ranks")
        first = tickets[0]
        pieces = [piece for ticket in tickets for piece in ticket.pieces]
        for ticket in tickets[1:]:
            if replace(ticket, pieces=(), deadline=0.0) != replace(first, pieces=(), deadline=0.0):
                raise RequestError(f"tickets of ranks {[piece.rank for piece in pieces]}: they are of different tokens or layouts; export "
                                   "the same request, equally far computed, on each rank, and join those")
        if len({piece.rank for piece in pieces}) != len(pieces):
            raise RequestError(f"tickets of ranks {[piece.rank for piece in pieces]}: a rank comes twice; join one ticket of each")
        return replace(first, pieces=tuple(sorted(pieces, key=lambda piece: piece.rank)),
                       deadline=min(ticket.deadline for ticket in tickets))

    def to_json(self) -> str:
        """In one line, to be sent to the importing process."""
        return json.dumps({
            "content": self.content, "num_ranks": self.num_ranks, "num_tokens": self.num_tokens, "keys": b"".join(self.keys).hex(),
            "positions": self.positions, "deadline": self.deadline,
            "pieces": [{"rank": piece.rank, "file": piece.file, "digest": piece.digest.hex()} for piece in self.pieces]})

    @classmethod
    def from_json(cls, text: str | bytes) -> HandoverTicket:
        """What :meth:`to_json` has made. Raises RequestError for anything else, naming the field."""
        try:
            found = json.loads(text)
            keys = bytes.fromhex(found["keys"])
            ticket = cls(found["content"], found["num_ranks"], found["num_tokens"],
                         tuple(keys[start:start + _KEY_BYTES] for start in range(0, len(keys), _KEY_BYTES)),
                         tuple(tuple((begin, end) for begin, end in ranges) for ranges in found["positions"]), found["deadline"],
                         tuple(HandoverPiece(piece["rank"], piece["file"], bytes.fromhex(piece["digest"])) for piece in found["pieces"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RequestError(f"ticket: {type(error).__name__}: {error}; pass what to_json() of the exporting side has given") from error
        ticket.check()
        return ticket

    @staticmethod
    def read(ticket: HandoverTicket | str | bytes) -> HandoverTicket:
        """A ticket, checked, in whatever form it came. Raises RequestError when it is none."""
        if isinstance(ticket, str | bytes):
            return HandoverTicket.from_json(ticket)
        if not isinstance(ticket, HandoverTicket):
            raise RequestError(f"ticket={ticket!r}: pass a HandoverTicket, or what its to_json() gave")
        ticket.check()
        return ticket

    def check(self) -> None:
        """Raise RequestError naming the first field that cannot be: it may come from anywhere."""
        try:
            self._check()
        except (TypeError, ValueError, AttributeError) as error:
            raise RequestError(f"ticket: {type(error).__name__}: {error}; pass what the exporting side has given") from error

    def _check(self) -> None:
        content = self.content
        if not isinstance(content, dict) or not _is_count(content.get("tokens_per_block"), 1, 1 << 16):
            raise RequestError("ticket: content has no tokens_per_block")
        if not _is_count(self.num_ranks, 1, _MOST_RANKS):
            raise RequestError(f"ticket: num_ranks={self.num_ranks!r}; there are 1 to {_MOST_RANKS}")
        if not _is_count(self.num_tokens, 1, 1 << 31):
            raise RequestError(f"ticket: num_tokens={self.num_tokens!r}; at least one token is handed over")
        num_blocks = -(-self.num_tokens // self.tokens_per_block)
        if len(self.keys) != num_blocks or any(not isinstance(key, bytes) or len(key) != _KEY_BYTES for key in self.keys):
            raise RequestError(f"ticket: {len(self.keys)} keys for {num_blocks} blocks; there is one of {_KEY_BYTES} bytes for each")
        for ranges in self.positions:
            before = 0
            for begin, end in ranges:
                if not _is_count(begin, before, num_blocks) or not _is_count(end, begin + 1, num_blocks):
                    raise RequestError(f"ticket: positions={ranges!r}; ranges ascend within {num_blocks} blocks")
                before = end
        if isinstance(self.deadline, bool) or not isinstance(self.deadline, int | float) or not 0 <= self.deadline < 1e12:
            raise RequestError(f"ticket: deadline={self.deadline!r}; it is a time in seconds")
        ranks = [piece.rank for piece in self.pieces]
        if not ranks or any(not _is_count(rank, 0, self.num_ranks - 1) for rank in ranks) or len(set(ranks)) != len(ranks):
            raise RequestError(f"ticket: pieces of ranks {ranks!r}; there is one of each rank from 0 to {self.num_ranks - 1}")
        for piece in self.pieces:
            if (not isinstance(piece.file, str) or (piece.file and not _FILE.fullmatch(piece.file))
                    or not isinstance(piece.digest, bytes) or len(piece.digest) != _DIGEST_BYTES):
                raise RequestError(f"ticket: file={piece.file!r}; it is the name of a file of handovers, with a digest of "
                                   f"{_DIGEST_BYTES} bytes")


class BlockNames:
    """Chain keys of a prompt's blocks under a seed that names the content: names under which every process with this content knows them,
    whatever its number of ranks."""

    def __init__(self, seed: bytes, request: Request, keys: TokenKeys) -> None:
        self._keys = keys
        self._names = [Namespace(seed, request).chain_seed]  # and then one for each full block

    def name(self, number: int, num_tokens: int) -> bytes:
        """Of a block's first ``num_tokens`` tokens, behind all before it."""
        keys = self._keys
        while len(self._names) <= number:
            self._names.append(next_chain_key(self._names[-1], keys.block_key(len(self._names) - 1, keys.tokens_per_block)))
        return next_chain_key(self._names[number], keys.block_key(number, num_tokens))


def _is_count(number: object, least: int, most: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and least <= number <= most
