"""``Drafting``: speculative tokens that branch, for engines that verify several alternatives in one step (design: sequences)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier.errors import RequestError
from kvtier.kernels.token_moves import move_tokens
from kvtier.pools.block_sections import INDEXER
from kvtier.pools.layout import LayerGroup
from kvtier.pools.pool_index import slot_of
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering import arguments
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.request import token_bytes
from kvtier.tiering.readiness import Readiness

Move = tuple[int, int]
"""Source place and destination place of one token."""


@dataclass(frozen=True)
class DraftTable:
    """What each draft attends to beside the sequence's own tokens, all of which it sees.

    Attributes:
        places: int32 ``[drafts, longest path]``. Row i holds the places of the drafts on the path to draft i, itself included, in the
            order of the text; -1 behind the last. Place p is entry ``p % tokens_per_block`` of the block at position
            ``p // tokens_per_block`` of the sequence's row of the block table (in groups with sinks, with the bubble added as for
            any token).
        depths: int32 ``[drafts]``: drafts before each of them on its path, from 0. Row i of ``places`` has ``depths[i] + 1`` entries.
    """

    places: torch.Tensor
    depths: torch.Tensor


class Drafting(Readiness):
    """Drafts: propose, verify in a step, accept one path."""

    def propose_drafts(self, request_id: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Give k draft tokens places behind the sequence's newest token: draft i gets place ``num_tokens + i``.

        Draft i continues draft ``parents[i]``, one with a lower number, or the newest token where that is -1. Block tables of the next
        step reach to the last draft; :meth:`draft_table` says which drafts see which. The drafts are not part of the sequence until
        they are accepted, and meanwhile it can be neither appended to nor rewound. ``needed_blocks_one_step`` counts with as many as
        ``num_draft_tokens`` of them, and no more than are left of ``max_new_tokens``.

        Raises:
            RequestError: lists that describe no tree, drafts pending already, several beams, recurrent layers, places beyond
                ``max_seq_len``, or a sequence in a running step.
            CapacityError: too few primary blocks; names whom to pre-empt. Nothing has changed.
        """
        arguments.sequence_of("parents", parents)
        drafted = array("i", token_bytes(tokens)).tolist()
        with self.locked() as ledger:
            self._require_no_step(request_id, "propose_drafts")
            end = ledger.sequence(request_id).num_tokens + len(drafted)
            if end > self.config.max_seq_len:
                raise RequestError(f"request {request_id}: places for {end} tokens with {len(drafted)} drafts; max_seq_len is "
                                   f"{self.config.max_seq_len}, raise it or propose fewer")
            ledger.propose_drafts(request_id, drafted, parents)

    def draft_table(self, request_id: int) -> DraftTable:
        """Who sees whom among the pending drafts, on the cache's device; see :class:`DraftTable`. RequestError without any."""
        with self.locked() as ledger:
            tree = ledger.pending_drafts(request_id)
            visible, depths = tree.visible_places(), tree.depths
        longest = max(depths) + 1
        padded = [row + [-1] * (longest - len(row)) for row in visible]
        device = self._device.name
        return DraftTable(torch.tensor(padded, dtype=torch.int32, device=device), torch.tensor(depths, dtype=torch.int32, device=device))

    def draft_positions(self, request_id: int) -> torch.Tensor:
        """Positions of the pending drafts in the text, for rotary embeddings: int32 ``[drafts]``, ``num_tokens + depth``."""
        with self.locked() as ledger:
            tree = ledger.pending_drafts(request_id)
            positions = [tree.num_tokens + depth for depth in tree.depths]
        return torch.tensor(positions, dtype=torch.int32, device=self._device.name)

    def accept_drafts(self, request_id: int, nodes: Sequence[int]) -> list[Move]:
        """The last step has verified the drafts: those on the path ``nodes``, from a root downwards, become the sequence's tokens.

        Their keys and values move to the places directly behind the sequence's, in every group; the other drafts are forgotten, and
        blocks behind the last token are given back. The newest token and the accepted ones count as computed. An empty path rejects
        all. Call it after the verifying step; on CUDA with the engine's stream as torch's current one, on which the moves are enqueued.

        Returns:
            The token moves that were made, (source place, destination place) in order, for what an engine keeps beside our pools.

        Raises:
            RequestError: no pending drafts, no such path, the sequence takes part in a running step, or it is not ready (a failed copy
                drops drafts: :meth:`wait_ready` says what is left).
        """
        arguments.sequence_of("nodes", nodes)
        with self.locked() as ledger:
            self._require_no_step(request_id, "accept_drafts")
            moves = ledger.draft_moves(request_id, nodes)
            if not moves:  # everything stands where it belongs
                return ledger.accept_drafts(request_id, nodes)
        # A step of our own: it orders the moves against our copies, and keeps the sequence from being removed meanwhile.
        with self.step(None, [request_id]) as ready:
            if not ready:
                raise RequestError(f"request {request_id}: accept_drafts while it is not ready; call wait_ready first")
            with self.locked() as ledger:
                if ledger.draft_moves(request_id, nodes) != moves:  # another thread was faster, with drafts of its own since
                    raise RequestError(f"request {request_id}: accept_drafts while another thread changed its drafts; ask again")
                slots = _slots(ledger, request_id)
            for pools in self.pools:
                if pools.group.kind != "cross":
                    _move(pools.primary, slots[pools.group.number], moves)
            with self.locked() as ledger:
                return ledger.accept_drafts(request_id, nodes)

    def drop_drafts(self, request_id: int) -> None:
        """Forget pending drafts that no step has verified; nothing else about the sequence changes. Without any it does nothing.

        RequestError while the sequence takes part in a running step.
        """
        with self.locked() as ledger:
            self._require_no_step(request_id, "drop_drafts")
            ledger.drop_drafts(request_id)

    def _require_no_step(self, request_id: int, verb: str) -> None:
        if self._ledger.sequence(request_id).id in self._stepping:
            raise RequestError(f"request {request_id}: {verb} while it takes part in a running step; leave the step first")


def _slots(ledger: Ledger, request_id: int) -> list[list[int]]:
    """By group: the slots of a sequence's blocks, -1 where there is none."""
    return [[slot_of(block.index) if block.id >= 0 else -1 for block in row.blocks] for row in ledger.sequence(request_id).rows]


def _move(pool: PrimaryPool, slots: list[int], moves: list[Move]) -> None:
    group = pool.group
    placed = [(_place(group, source), _place(group, destination)) for source, destination in moves]
    for section in pool.sections:
        tensor = section.tensor
        if section.section.name == INDEXER:  # [blocks, layers, tokens, bytes]
            tensor = tensor.unsqueeze(2).unsqueeze(3)
        move_tokens(tensor, slots, placed)


def _place(group: LayerGroup, place: int) -> int:
    """Behind sinks that do not fill their last block there is a bubble."""
    return place + (group.sink_bubble if place >= group.sinks else 0)
