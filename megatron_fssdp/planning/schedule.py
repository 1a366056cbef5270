# SPDX-License-Identifier: Apache-2.0

"""A layer's plan as the messages of spAG, stage by stage: pure arithmetic, no communication.

Flat: every owner sends to each of its replicas, all at once. Tree: an expert crosses to each other
node once and spreads inside the node, and nobody sends on more than `RELAY_FANOUT` copies of it in
each of the two; a rank that receives in one stage may send in the next. spRS runs the same messages
backwards, last stage first, and sums on the way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from operator import attrgetter

import numpy as np

from megatron_fssdp.planning.plan import EMPTY, Int64Array, LayerPlan

# Copies of one expert that a rank sends on to other nodes, and as many inside its own.
RELAY_FANOUT = 2


@dataclass(frozen=True)
class Copy:
    """One message of spAG: an expert's parameters. Its gradient takes the same way back.

    Attributes:
        expert: the expert's id in its layer.
        sender: rank that sends; `sender_slot` is the expert's slot there.
        receiver: rank that holds a replica; `receiver_slot` is its slot there.
    """

    expert: int
    sender: int
    sender_slot: int
    receiver: int
    receiver_slot: int


@dataclass(frozen=True)
class Schedule:
    """All messages of one layer, the same on every rank.

    In a stage copies are ordered by (expert, receiver). Two ranks meet their common messages in
    this order, so messages need no tags; gradients are summed in it, so a run repeats bit for bit.
    """

    stages: tuple[tuple[Copy, ...], ...]

    @classmethod
    def flat(cls, plan: LayerPlan, present: LayerPlan | None = None) -> Schedule:
        """Let each owner send to all of its replicas.

        Args:
            plan: the placement to reach.
            present: replicas that are there already and need no message.
        """
        copies = tuple(
            Copy(expert, owner, slot_of[owner], rank, slot_of[rank])
            for expert, owner, ranks, slot_of in _missing(plan, present)
            for rank in ranks
        )
        return cls((copies,) if copies else ())

    @classmethod
    def tree(
        cls,
        plan: LayerPlan,
        node_of_rank: Sequence[int],
        present: LayerPlan | None = None,
        fanout: int = RELAY_FANOUT,
    ) -> Schedule:
        """Let an expert cross to each node once.

        A stage takes as long as the adapter that sends or receives most in it, and ranks may share
        a node's: of the nodes that an expert must reach, those come first that have received least
        in that stage so far, and those send on that have sent least. The rank that receives for its
        node is the one that has received and sent the fewest copies over the network, and inside a
        node those relay first that have relayed least: so that no adapter, and no rank's memory for
        what arrives, takes more than its share. Experts that reach few nodes leave no choice and
        come first.

        Args:
            plan: the placement to reach.
            node_of_rank: (R,) the node of each rank.
            present: replicas that are there already and need no message. They relay nothing.
            fanout: messages of one expert that a rank sends to other nodes, and inside its own.

        Raises:
            ValueError: nobody may send.
        """
        if fanout < 1:
            raise ValueError(f"fanout is {fanout}; the least is 1")
        trees = []
        for expert, owner, ranks, slot_of in _missing(plan, present):
            by_node: dict[int, list[int]] = {node_of_rank[owner]: []}
            for rank in ranks:
                by_node.setdefault(node_of_rank[rank], []).append(rank)
            trees.append((len(by_node), expert, owner, by_node, slot_of))
        trees.sort(key=lambda tree: tree[:2])
        by_stage: defaultdict[int, list[Copy]] = defaultdict(list)
        grown = _Trees(node_of_rank, fanout)
        for _, expert, owner, by_node, slot_of in trees:
            for stage, sender, receiver in grown.spread(owner, by_node):
                by_stage[stage].append(
                    Copy(expert, sender, slot_of[sender], receiver, slot_of[receiver])
                )
        in_order = attrgetter("expert", "receiver")
        return cls(
            tuple(tuple(sorted(by_stage[stage], key=in_order)) for stage in range(len(by_stage)))
        )

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """The messages of all stages."""
        return tuple(copy for stage in self.stages for copy in stage)

    @cached_property
    def max_sends(self) -> int:
        """Messages that the busiest rank sends."""
        return max(Counter(copy.sender for copy in self.copies).values(), default=0)

    def num_far(self, node_of_rank: Sequence[int]) -> int:
        """Messages between nodes."""
        return sum(node_of_rank[copy.sender] != node_of_rank[copy.receiver] for copy in self.copies)

    @cached_property
    def _stages_by_rank(self) -> dict[int, list[list[Copy]]]:
        by_rank: defaultdict[int, list[list[Copy]]] = defaultdict(lambda: [[] for _ in self.stages])
        for number, stage in enumerate(self.stages):
            for copy in stage:
                by_rank[copy.sender][number].append(copy)
                by_rank[copy.receiver][number].append(copy)
        return dict(by_rank)

    def stages_of(self, rank: int) -> list[list[Copy]]:
        """Return the messages that `rank` is an end of, stage by stage."""
        return self._stages_by_rank.get(rank, [])


def _missing(
    plan: LayerPlan, present: LayerPlan | None
) -> Iterator[tuple[int, int, list[int], dict[int, int]]]:
    """Yield each expert that some rank needs, ascending.

    With it: its owner, the ranks that need it, ascending, and the slot of every instance by rank.
    """
    if plan.instance_rank_EI.shape[1] == 1:
        return
    there = frozenset[tuple[int, int]]()
    if present is not None:
        rank_N, slot_N = np.nonzero(present.slot_expert_RS != EMPTY)
        expert_N = present.slot_expert_RS[rank_N, slot_N]
        there = frozenset(zip(expert_N.tolist(), rank_N.tolist(), strict=True))
    for expert in np.flatnonzero(plan.instance_rank_EI[:, 1] != EMPTY).tolist():
        members = [rank for rank in plan.instance_rank_EI[expert].tolist() if rank != EMPTY]
        slots = (plan.instance_physical_EI[expert] % plan.num_slots).tolist()
        # The owner comes first, and replicas by ascending rank.
        ranks = [rank for rank in members[1:] if (expert, rank) not in there]
        if ranks:
            yield expert, members[0], ranks, dict(zip(members, slots, strict=False))


# Of a tree: stage, sender and receiver.
_Link = tuple[int, int, int]


class _Trees:
    """Grows one expert's tree after the other, through ranks and nodes with least to do so far.

    Attributes:
        crossings: by rank, copies sent and received over the network.
        relays: by rank, copies sent inside its node.
        sent, received: by stage and node, copies over the network.
    """

    def __init__(self, node_of_rank: Sequence[int], fanout: int) -> None:
        self.node_of_rank, self.fanout = node_of_rank, fanout
        self.crossings, self.relays = Counter[int](), Counter[int]()
        self.sent, self.received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()

    def spread(self, owner: int, by_node: Mapping[int, list[int]]) -> list[_Link]:
        """Return one expert's tree from its owner to the ranks of each node, the owner's first."""
        home, *away = by_node
        heads = {
            node: min(by_node[node], key=lambda rank: (self.crossings[rank], rank)) for node in away
        }
        links = self._cross(owner, heads)
        stage_of = {owner: 0} | {receiver: stage + 1 for stage, _, receiver in links}
        links += self._relay(owner, 0, by_node[home])
        for node, head in heads.items():
            others = [rank for rank in by_node[node] if rank != head]
            links += self._relay(head, stage_of[head], others)
        return links

    def _cross(self, owner: int, heads: dict[int, int]) -> list[_Link]:
        """Send to the head of each node, stage by stage: who has received sends in the next."""
        links: list[_Link] = []
        left, senders, stage = dict(heads), [owner], 0
        while left:
            senders = self._least_first(senders, self.sent, stage)
            order = self._least_first(list(left.values()), self.received, stage)
            receivers = order[: self.fanout * len(senders)]
            for receiver, sender in zip(receivers, cycle(senders), strict=False):
                links.append((stage, sender, receiver))
                self.sent[stage, self.node_of_rank[sender]] += 1
                self.received[stage, self.node_of_rank[receiver]] += 1
                self.crossings[sender] += 1
                self.crossings[receiver] += 1
                del left[self.node_of_rank[receiver]]
            senders, stage = receivers, stage + 1
        return links

    def _least_first(
        self, ranks: list[int], count: Counter[tuple[int, int]], stage: int
    ) -> list[int]:
        if len(ranks) == 1:
            return ranks
        nodes, crossings = self.node_of_rank, self.crossings
        return sorted(ranks, key=lambda rank: (count[stage, nodes[rank]], crossings[rank], rank))

    def _relay(self, first: int, stage: int, others: list[int]) -> list[_Link]:
        """Send from a rank to others of its node, each to `fanout` more."""
        line = [first, *sorted(others, key=lambda rank: (self.relays[rank], rank))]
        stage_of, links = {first: stage}, []
        for position in range(1, len(line)):
            sender, receiver = line[(position - 1) // self.fanout], line[position]
            links.append((stage_of[sender], sender, receiver))
            stage_of[receiver] = stage_of[sender] + 1
            self.relays[sender] += 1
        return links


def traffic(copies: Iterable[Copy], num_ranks: int) -> Int64Array:
    """Return the (R, R) int64 copies that each rank (row) sends to each (column)."""
    copies_RR = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for copy in copies:
        copies_RR[copy.sender, copy.receiver] += 1
    return copies_RR
