# SPDX-License-Identifier: Apache-2.0

"""Moves experts between the ranks that own them: parameters and optimizer state, no files.

An expert's parameters go from each copy of its old home (one a rank of the expert-data-parallel
group) to the copy of its new home with the same rank there. Its optimizer state goes piece by
piece: the elements that a rank keeps of the old home go to whichever ranks keep them of the new
one. In a round each rank sends one expert's share and receives one's, and waits for both: that is
the memory that a move takes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_fssdp.integration.agreement import gather_objects
from megatron_fssdp.integration.expert_state import StatePiece, read_state
from megatron_fssdp.integration.ownership import Ownership
from megatron_fssdp.planning.moves import Move

Rounds = tuple[tuple[Move, ...], ...]


class HomeLayout(NamedTuple):
    """What a rank keeps of one home: equal layouts can take each other's contents.

    Attributes:
        shapes, dtypes: of the W parameters, as text.
        trains: whether each requires gradients.
        spans: (start, stop) of the optimizer state of each.
        names: of the state's tensors, for each parameter that has some here.
    """

    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]
    trains: tuple[bool, ...]
    spans: tuple[tuple[int, int], ...]
    names: tuple[tuple[str, ...], ...]


@dataclass(eq=False)
class Mover:
    """Moves the experts of one ownership. Collective over all ranks that share it.

    Attributes:
        ownership: whose experts.
        optimizer: Megatron's.
        group: all ranks of the expert-parallel, expert-tensor-parallel and expert-data-parallel
            groups: they decide together.
        rank_at: global rank by (expert-data-parallel rank, expert-parallel rank), of those with
            this rank's shard of the experts.
        replica: this rank's expert-data-parallel rank.
    """

    ownership: Ownership
    optimizer: Any
    group: dist.ProcessGroup
    rank_at: list[list[int]]
    replica: int

    def layouts(self) -> dict[int, list[HomeLayout]]:
        """Ask every rank what it keeps of its homes, by global rank. Collective."""
        mine = [self._layout(home) for home in range(self.ownership.num_homes)]
        everyone = gather_objects(mine, self.group)
        return dict(zip(dist.get_process_group_ranks(self.group), everyone, strict=True))

    def _layout(self, home: int) -> HomeLayout:
        weights = self.ownership.weights(home)
        pieces = self._pieces(home)
        return HomeLayout(
            tuple(str(tuple(weight.shape)) for weight in weights),
            tuple(str(weight.dtype) for weight in weights),
            tuple(weight.requires_grad for weight in weights),
            tuple((piece.start, piece.stop) for piece in pieces),
            tuple(piece.names for piece in pieces),
        )

    def _pieces(self, home: int) -> list[StatePiece]:
        return [read_state(self.optimizer, weight) for weight in self.ownership.weights(home)]

    def move(self, rounds: Rounds, layouts: dict[int, list[HomeLayout]]) -> int:
        """Run the moves.

        Args:
            rounds: as `planning.moves` plans them.
            layouts: of all ranks, checked by `find_problem`.

        Returns:
            The bytes that this rank sent.
        """
        rank = self.ownership.rank
        sent = 0
        for moves in rounds:
            leaving = next((move for move in moves if move.source == rank), None)
            coming = next((move for move in moves if move.target == rank), None)
            if leaving is not None and coming is not None:
                sent += self._exchange(leaving, coming, layouts)
        return sent

    @torch.no_grad()
    def _exchange(self, leaving: Move, coming: Move, layouts: dict[int, list[HomeLayout]]) -> int:
        outgoing = self._parts(leaving, layouts)
        incoming = self._parts(coming, layouts)
        messages = {peer: torch.cat([_bytes(p) for p in parts]) for peer, parts in outgoing.items()}
        arrived = {
            peer: torch.empty(
                sum(part.nbytes for part in parts),
                dtype=torch.uint8,
                device=parts[0].device,
            )
            for peer, parts in incoming.items()
        }
        ops = [dist.P2POp(dist.irecv, each, peer, self.group) for peer, each in arrived.items()]
        ops += [dist.P2POp(dist.isend, each, peer, self.group) for peer, each in messages.items()]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for peer, parts in incoming.items():
            pieces = arrived[peer].split([part.nbytes for part in parts])
            for part, piece in zip(parts, pieces, strict=True):
                _bytes(part).copy_(piece)
        return sum(each.numel() for each in messages.values())

    def _parts(
        self, move: Move, layouts: dict[int, list[HomeLayout]]
    ) -> dict[int, list[torch.Tensor]]:
        """List what this rank sends, or receives, in a move, by the global rank of the other end.

        Flat views of a home's contents, in an order on which both ends agree: parameters, then
        optimizer state by parameter.
        """
        parts: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        sends = move.source == self.ownership.rank
        home, peer = (move.source_home, move.target) if sends else (move.target_home, move.source)
        twin = self.rank_at[self.replica][peer]
        parts[twin] += [weight.detach().view(-1) for weight in self.ownership.weights(home)]
        for number, piece in enumerate(self._pieces(home)):
            for other in range(len(self.rank_at)):
                ends = (self.replica, other) if sends else (other, self.replica)
                first, last = self._shared_span(move, number, *ends, layouts)
                if first < last:
                    span = slice(first - piece.start, last - piece.start)
                    parts[self.rank_at[other][peer]] += [tensor[span] for tensor in piece.tensors]
        return dict(sorted(parts.items()))

    def _shared_span(
        self,
        move: Move,
        number: int,
        sender: int,
        receiver: int,
        layouts: dict[int, list[HomeLayout]],
    ) -> tuple[int, int]:
        """Return what one replica of the source sends to one of the target, of a parameter's state.

        Nothing, if the receiver's own twin has all that it wants.
        """

        def span(replica: int, rank: int, home: int) -> tuple[int, int]:
            return layouts[self.rank_at[replica][rank]][home].spans[number]

        wanted = span(receiver, move.target, move.target_home)
        offered = span(sender, move.source, move.source_home)
        twins = span(receiver, move.source, move.source_home)
        if sender != receiver and twins[0] <= wanted[0] and wanted[1] <= twins[1]:
            return (0, 0)
        return max(offered[0], wanted[0]), min(offered[1], wanted[1])


def find_problem(layouts: dict[int, list[HomeLayout]]) -> str | None:
    """Say why contents cannot move between these homes; None: they can."""
    reference = next(iter(layouts.values()))[0]
    names = {name for homes in layouts.values() for home in homes for name in home.names if name}
    if len(names) > 1:
        return f"optimizers keep different tensors of different experts: {sorted(names)}"
    for rank, homes in layouts.items():
        for index, home in enumerate(homes):
            if home[:3] != reference[:3]:
                return (
                    f"rank {rank}'s home {index} has parameters of {home.shapes} {home.dtypes}, "
                    f"trained {home.trains}; others have {reference.shapes} {reference.dtypes}, "
                    f"trained {reference.trains}"
                )
    return None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
