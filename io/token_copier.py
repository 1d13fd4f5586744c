"""``TokenCopier``: copies the first tokens of blocks between two memories of the host (design: transfer rules).

A block that is shared and about to be written is copied first, as far as the new owner may use it. Each head of each layer has its
tokens side by side and the next head's behind them, so a block is one strided copy. numpy's is as fast as torch's, works on bytes
whatever the dtype, and gives the GIL back once for each block; compiled, once for a batch.
"""

from __future__ import annotations

from kvtier.io.piece_copier import piece_copier
from kvtier.io.row_copier import Call, Numbers, Rows, strided_copy


class TokenCopier:
    """Copies the first tokens of each head, layer and field of a section.

    Args:
        source, destination: uint8 ``[slots, layers, fields, heads, tokens_per_block, bytes of a token]``, any strides.
    """

    def __init__(self, source: Rows, destination: Rows) -> None:
        self._source = source
        self._destination = destination

    def plan(self, sources: Numbers, destinations: Numbers, num_tokens: int) -> list[Call]:
        """The calls that copy ``num_tokens`` tokens; otherwise as of :meth:`RowCopier.plan`. No destination may be a source."""
        source, destination = self._source[..., :num_tokens, :], self._destination[..., :num_tokens, :]
        if (pieces := piece_copier(source, destination)) is not None:
            return pieces.plan(sources, destinations)
        return [strided_copy(destination[to_slot], source[from_slot])
                for from_slot, to_slot in zip(sources.tolist(), destinations.tolist(), strict=True)]
