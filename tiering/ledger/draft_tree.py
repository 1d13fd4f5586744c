"""``DraftTree``: speculative tokens that branch, and where each of them lies (design: sequences; spec: read path, tree drafts).

Pure arithmetic. A *place* counts tokens from the start of a sequence: the token at position p has place p. Each draft has a place of
its own behind the sequence's tokens, in the same blocks. Alternatives share everything before they part, and nothing is copied.
"""

from __future__ import annotations


class DraftTree:
    """Drafts behind the first ``num_tokens`` tokens of a sequence.

    Attributes:
        num_tokens: tokens of the sequence when the drafts were proposed; draft ``i`` lies at place ``num_tokens + i``.
        tokens: the drafts' token ids.
        parents: the draft that each of them continues, one before it; -1 for the sequence's newest token.
        depths: drafts before each of them on its path: draft ``i`` has the position ``num_tokens + depths[i]`` in the text.
    """

    def __init__(self, num_tokens: int, tokens: list[int], parents: list[int]) -> None:
        self.num_tokens = num_tokens
        self.tokens = tokens
        self.parents = parents
        self.depths: list[int] = []
        for parent in parents:
            self.depths.append(0 if parent < 0 else self.depths[parent] + 1)

    @property
    def num_drafts(self) -> int:
        return len(self.tokens)

    def path_to(self, node: int) -> list[int]:
        """The drafts from a root down to ``node``, itself included."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        path.reverse()
        return path

    def visible_places(self) -> list[list[int]]:
        """For each draft, the places of the drafts on its path, itself included, in order. All tokens before the drafts are visible too."""
        return [[self.num_tokens + node for node in self.path_to(last)] for last in range(len(self.tokens))]

    def moves_of(self, path: list[int]) -> list[tuple[int, int]]:
        """(source place, destination place) of each draft on a path that must move to stand directly behind the one before it.

        To be carried out in this order: a destination is never a source of one behind it, because drafts ascend along a path.
        """
        moves: list[tuple[int, int]] = []
        for depth, node in enumerate(path):
            if node != depth:
                moves.append((self.num_tokens + node, self.num_tokens + depth))
        return moves
