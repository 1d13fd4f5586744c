"""The reuse tree against a naive tree of one node for each block. Nodes are counted as block positions, however it is compressed."""

from __future__ import annotations

from grove import candidates_of, handles_of, places_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from naive_tree import NUM_GROUPS, BlockContent, EagerLog, NaiveNode, Prompt, prompts

from kvtier.pools.pool_index import PRIMARY, pool_index
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.events import EventLog
from kvtier.tiering.ledger.key import TokenKeys, next_chain_key
from kvtier.tiering.ledger.node import Node, Walk
from kvtier.tiering.ledger.tree import FEW_CHILDREN, ReuseTree
from kvtier.types import BlockId


class TreeMachine(RuleBasedStateMachine):
    """Random lives of handles in the compressed tree and in the naive one."""

    @initialize(tokens_per_block=st.integers(1, 4))
    def start(self, tokens_per_block: int) -> None:
        self.width = tokens_per_block
        self.tree = ReuseTree(NUM_GROUPS, tokens_per_block)
        self.roots: dict[object, NaiveNode] = {}
        self.home: dict[Block, tuple[NaiveNode, int]] = {}  # where each attached handle sits, and its group
        self.num_handles = 0
        self.log = EventLog(1 << 20, NUM_GROUPS)
        self.eager = EagerLog()

    def fresh(self) -> Block:
        self.num_handles += 1
        return Block(BlockId(self.num_handles), pool_index(PRIMARY, self.num_handles))

    def full_blocks(self, prompt: Prompt) -> list[BlockContent]:
        return [prompt.content(number, self.width, self.width) for number in range(prompt.num_tokens // self.width)]

    def put(self, block: Block, place: tuple[Node, int], node: NaiveNode, group: int, num_tokens: int) -> None:
        """Attach on both sides."""
        if block in self.home:
            self.take_out(block)
        self.tree.attach(place[0], place[1], group, block, num_tokens)
        self.log.stored(group, [(place[0].run, place[1], 1)], PRIMARY, [35])
        self.eager.stored(group, [node])
        node.handles[group] = block
        self.home[block] = (node, group)

    def take_out(self, block: Block) -> None:
        assert block.node is not None
        self.log.removed(self.home[block][1], block.node.run, block.position)
        self.take_out_of_the_naive_tree(block)

    def take_out_of_the_naive_tree(self, block: Block) -> None:
        node, group = self.home.pop(block)
        self.eager.removed(group, node)
        node.handles[group] = None
        node.prune()

    @rule(prompt=prompts(), group=st.integers(0, NUM_GROUPS - 1), with_tail=st.booleans(), mover=st.none() | st.integers(0, 1000))
    def store(self, prompt: Prompt, group: int, with_tail: bool, mover: int | None) -> None:
        """Full blocks, and the partial tail if asked. The last full block may get a handle that sits on another branch."""
        blocks = self.full_blocks(prompt)
        tail = prompt.num_tokens % self.width if with_tail else 0
        if not blocks and not tail:
            return
        keys = TokenKeys(prompt.request, self.width)
        root = self.roots.setdefault(prompt.namespace.identity, NaiveNode(None, ()))
        root.chain_key = prompt.namespace.chain_seed
        root.namespace = prompt.namespace
        walk = self.tree.walk(self.tree.root(prompt.namespace), keys, prompt.num_tokens)
        before = walk.num_blocks
        spans = self.tree.extend(walk, keys, prompt.num_tokens)
        places = places_of(walk)
        assert len(places) == walk.num_blocks == len(blocks)
        assert places[before:] == [(node, position) for node, first, count in spans for position in range(first, first + count)]
        node, nodes = root, []
        for number, content in enumerate(blocks):
            node = self.child(node, content, keys.block_key(number, self.width))
            nodes.append(node)
        for place, node in zip(places, nodes, strict=True):
            assert place[0].values[group][place[1]] is node.handles[group]
            if node.handles[group] is None:
                block = self.handle_from(mover, node, group) if node is nodes[-1] else self.fresh()
                self.put(block, place, node, group, self.width)
        if tail:
            node = nodes[-1] if nodes else root
            content = prompt.content(len(blocks), tail, self.width)
            walk = self.tree.walk(self.tree.root(prompt.namespace), keys, prompt.num_tokens)
            found = self.tree.extend_partial(walk, keys, prompt.num_tokens)
            assert found is not None
            node = self.child(node, content, keys.block_key(len(blocks), tail))
            assert found[0].values[group][found[1]] is node.handles[group]
            if node.handles[group] is None:
                self.put(self.fresh(), found, node, group, tail)

    def child(self, node: NaiveNode, content: BlockContent, key: bytes) -> NaiveNode:
        child = node.children.get(content)
        if child is None:
            child = node.children[content] = NaiveNode(node, content)
            child.chain_key = next_chain_key(node.chain_key, key)
        return child

    def handle_from(self, mover: int | None, target: NaiveNode, group: int) -> Block:
        """A handle of this group that sits neither before nor behind the target, or a fresh one."""
        if mover is not None:
            path = target.path()
            others = [block for block, (node, its_group) in self.home.items() if its_group == group
                      and node.path() != path[:len(node.path())] and node.path()[:len(path)] != path]
            if others:
                return others[mover % len(others)]
        return self.fresh()

    @rule(prompt=prompts(), group=st.integers(0, NUM_GROUPS - 1))
    def store_spans(self, prompt: Prompt, group: int) -> None:
        """What lies behind the walk, a span at a time, in one event."""
        blocks = self.full_blocks(prompt)
        keys = TokenKeys(prompt.request, self.width)
        walk = self.tree.walk(self.tree.root(prompt.namespace), keys, prompt.num_tokens)
        number = walk.num_blocks
        if number == len(blocks):
            self.tree.prune(walk.end()[0])  # a root that was just made
            return
        root = self.roots.setdefault(prompt.namespace.identity, NaiveNode(None, ()))
        root.chain_key = prompt.namespace.chain_seed
        root.namespace = prompt.namespace
        handles = [self.fresh() for _ in blocks]
        node, nodes = root, []
        for block_number, content in enumerate(blocks):
            node = self.child(node, content, keys.block_key(block_number, self.width))
            nodes.append(node)
        for naive, block in list(zip(nodes, handles, strict=True))[number:]:
            naive.handles[group] = block
            self.home[block] = (naive, group)
        start = number
        spans = self.tree.extend(walk, keys, prompt.num_tokens)
        for run, first, count in spans:
            self.tree.attach_span(run, first, group, handles, start, count)
            start += count
        self.log.stored(group, [(run.run, first, count) for run, first, count in spans], PRIMARY, [35] * (len(blocks) - number))
        self.eager.stored(group, nodes[number:])

    @precondition(lambda self: self.home)
    @rule(choice=st.integers(0, 1000), length=st.integers(1, 6))
    def detach_span(self, choice: int, length: int) -> None:
        """A handle and those right before it in its run."""
        block = list(self.home)[choice % len(self.home)]
        group = self.home[block][1]
        node, end = block.node, block.position + 1
        assert node is not None
        first = end - 1
        while end - first < length and first > 0 and node.values[group][first - 1] is not None:
            first -= 1
        gone = [node.values[group][position] for position in range(end - 1, first - 1, -1)]
        self.log.removed_span(group, node.run, first, end)
        for handle in gone:
            assert handle is not None
            self.take_out_of_the_naive_tree(handle)
        self.tree.detach_span(node, group, first, end)
        for handle in gone:
            assert handle is not None
            assert (handle.node, handle.position, handle.num_tokens) == (None, 0, 0)

    @rule()
    def read_events(self) -> None:
        """Made now, from runs as they were when the tree was another, events say what they would have said then."""
        assert [(event.group, event.data) for event in self.log.flush()] == self.eager.flush()

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.read_events()

    @precondition(lambda self: self.home)
    @rule(choices=st.lists(st.integers(0, 1000), min_size=1, max_size=6))
    def detach(self, choices: list[int]) -> None:
        for choice in choices:
            if self.home:
                block = list(self.home)[choice % len(self.home)]
                group = self.home[block][1]
                self.take_out(block)
                self.tree.detach(block, group)
                assert block.node is None
                assert block.num_tokens == 0

    @rule(prompt=prompts())
    def look(self, prompt: Prompt) -> None:
        """Every group finds the same blocks, under the same chain keys, and the same candidates for a partial match."""
        root = self.tree.find_root(prompt.namespace)
        node = self.roots.get(prompt.namespace.identity)
        assert (root is None) == (node is None or not node.children)
        if root is None or node is None:
            return
        keys = TokenKeys(prompt.request, self.width)
        walk = self.tree.walk(root, keys, prompt.num_tokens)
        nodes = []
        for content in self.full_blocks(prompt):
            if content not in node.children:
                break
            node = node.children[content]
            nodes.append(node)
        assert walk.num_blocks == len(nodes)
        for group in range(NUM_GROUPS):
            assert handles_of(walk, group) == [found.handles[group] for found in nodes]
            self.compare_partial(walk, keys, prompt, node, group)
        for (run, position), found in zip(places_of(walk), nodes, strict=True):
            assert run.chain_key(position) == found.chain_key
            first = found.parent is None or found.parent.parent is None
            assert run.parent_chain_key(position) == (None if first or found.parent is None else found.parent.chain_key)

    def compare_partial(self, walk: Walk, keys: TokenKeys, prompt: Prompt, node: NaiveNode, group: int) -> None:
        start = walk.num_blocks * self.width
        wanted = prompt.elements[start:min(start + self.width, prompt.num_tokens)]
        expected = []
        for elements, item in node.children:
            block = node.children[elements, item].handles[group]
            shared = 0
            while shared < min(len(wanted), len(elements)) and wanted[shared] == elements[shared]:
                shared += 1
            if shared and block is not None and item is None and prompt.overlap(start, start + self.width) is None:
                expected.append((shared, block.id))
        found = candidates_of(self.tree, walk, keys, prompt.num_tokens, group)
        assert sorted((shared, block.id) for shared, block in found) == sorted(expected)
        lengths = [shared for shared, _block in found]
        assert lengths == sorted(lengths, reverse=True)

    @invariant()
    def both_trees_have_the_same_nodes_and_every_handle_is_where_it_says(self) -> None:
        nodes = [node for root in self.roots.values() for node in root.below()]
        assert self.tree.num_nodes() == len(nodes)
        assert set(self.tree.roots) == {identity for identity, root in self.roots.items() if root.children}
        for block, (node, group) in self.home.items():
            assert block.node is not None
            assert block.node.values[group][block.position] is block
            assert block.num_tokens == len(node.content[0])
            assert block.node.is_leaf(block.position) == (not node.children)
        for run in self.runs():
            ordered = [] if run.order is None else [key for bucket in run.order.buckets for key in bucket]
            if run.order is not None or len(run.children) > FEW_CHILDREN:
                assert ordered == sorted(key for key, node in run.children.items() if node.takes_partial())
            self.check_run(run)
            for values, present in zip(run.values, run.present, strict=True):
                assert len(values) == run.length
                assert present == sum(value is not None for value in values)

    def check_run(self, node: Node) -> None:
        """The keys of the run are those of the node, and it stands behind its parent node's run."""
        assert node.run.label is node.label
        assert node.run.num_blocks >= node.length
        assert not node.children or node.run.num_blocks == node.length
        assert node.parent is not None
        assert node.run.parent is (None if node.parent.parent is None else node.parent.run)

    def runs(self) -> list[Node]:
        found = list(self.tree.roots.values())
        for node in found:
            found.extend(node.children.values())
        return [node for node in found if node.parent is not None]


TestTreeAgainstANaiveOne = TreeMachine.TestCase
