# SPDX-License-Identifier: Apache-2.0

"""The fewest replicas that balance a layer: what `by_gain` does where nodes cannot do it alone.

[Note: few replicas] A replica carries tokens from a rank above the target ("donor") to one below
("receiver"). Each donor needs at least one replica, each receiver that is used takes at least one,
so the fewest replicas come from donors whose excess ends exactly where a receiver's room ends: bin
packing, by best fit decreasing. The largest donor that some receiver can take whole goes to the
receiver with the least room to spare. Where none can be taken whole, the largest donor is cut
down by the emptiest receivers, and once two receivers would do, by the best fitting pair.

Plain Python lists, not arrays: a step touches a few entries of sorted lists (two microseconds), a
layer of R ranks takes about R steps, and 1,024 ranks are no harder than 16 times 64. The loop is
one long function on purpose: calls inside it would cost a third of its time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

Replica = tuple[int, int]


def place_replicas(
    load_E: list[int],
    owned_R: list[list[int]],
    load_R: list[int],
    target: int,
    free_R: list[int],
    there: Iterable[Replica] = (),
) -> list[Replica]:
    """Place the fewest replicas we can find that leave no rank above the target.

    Args:
        load_E: tokens of each expert; changed to what stays with the owners.
        owned_R: the experts of each rank.
        load_R: tokens of each rank without replicas; changed to those with them.
        target: tokens that a rank may have.
        free_R: replicas that each rank may get; changed to what is left.
        there: replicas that there are already.

    Returns:
        (expert, rank) of each replica, in the order in which they were found. If the target cannot
        be met, some ranks stay above it.

    Example: loads 6, 2, 1, 1 on two ranks with two experts each. Rank 0 is 3 above the mean of 5,
    so expert 0 gets a replica on rank 1: `[(0, 1)]`.
    """
    codes = place_codes(load_E, owned_R, load_R, target, free_R, there)
    return [divmod(code, len(load_R)) for code in codes]


def place_codes(
    load_E: list[int],
    owned_R: list[list[int]],
    load_R: list[int],
    target: int,
    free_R: list[int],
    there: Iterable[Replica] = (),
) -> list[int]:
    """`place_replicas` with expert * R + rank for each replica: plain ints are cheaper to keep."""
    num_ranks = len(load_R)
    # Sorted tokens * R + rank: one int to compare, and ties go to the lower rank.
    room, donors = _sides(load_R, target, free_R)
    held = {expert * num_ranks + rank for expert, rank in there}
    placed: list[int] = []
    while donors and room:
        above_top = (room[-1] // num_ranks + 1) * num_ranks
        fits_whole = donors[0] < above_top
        # The largest donor that some receiver can take whole; or the largest of all.
        code = donors.pop(bisect_left(donors, above_top) - 1 if fits_whole else -1)
        excess, giver = code // num_ranks, code % num_ranks
        owned = owned_R[giver]
        expert = max(owned, key=load_E.__getitem__)
        if fits_whole:
            at = bisect_left(room, excess * num_ranks)
        else:
            takers = _cut_down(excess, load_E[expert], expert, room, held, num_ranks)
            for free, taker in takers:
                free_R[taker] -= 1
                load_R[taker] = target
                excess -= free
                load_E[expert] -= free
                load_R[giver] -= free
                held.add(expert * num_ranks + taker)
                placed.append(expert * num_ranks + taker)
            if takers:
                insort(donors, excess * num_ranks + giver)
                continue
            at = _best_pair(room, excess, num_ranks)
        taker = room[at] % num_ranks
        if expert * num_ranks + taker in held:
            expert, at = _other_pair(owned, load_E, room, at, num_ranks, held)
            if expert < 0:
                continue
            taker = room[at] % num_ranks
        free = room.pop(at) // num_ranks
        moved = load_E[expert]
        if moved > free:
            moved = free
        # With its last slot a receiver is filled up: room left there could not be used again,
        # room left at the donor can.
        if moved > excess and free_R[taker] > 1:
            moved = excess
        load_E[expert] -= moved
        load_R[giver] -= moved
        load_R[taker] += moved
        free_R[taker] -= 1
        held.add(expert * num_ranks + taker)
        placed.append(expert * num_ranks + taker)
        if moved < free and free_R[taker]:
            insort(room, (free - moved) * num_ranks + taker)
        if moved < excess:
            insort(donors, code - moved * num_ranks)
        elif moved > excess and free_R[giver]:
            insort(room, (moved - excess) * num_ranks + giver)
    return placed


def _sides(load_R: list[int], target: int, free_R: list[int]) -> tuple[list[int], list[int]]:
    """Return the ranks with room for tokens and those with too many, as sorted codes."""
    room, donors = [], []
    num_ranks = len(load_R)
    for rank, load in enumerate(load_R):
        if load < target:
            if free_R[rank]:
                room.append((target - load) * num_ranks + rank)
        elif load > target:
            donors.append((load - target) * num_ranks + rank)
    room.sort()
    donors.sort()
    return room, donors


def _cut_down(
    excess: int, left: int, expert: int, room: list[int], held: set[int], num_ranks: int
) -> list[tuple[int, int]]:
    """Take the emptiest receivers off `room`, until two of them would do for the excess.

    Returns:
        (room, rank) of each receiver that the donor's hottest expert, with `left` tokens, fills.
    """
    takers: list[tuple[int, int]] = []
    while len(room) > 2:
        free, taker = room[-1] // num_ranks, room[-1] % num_ranks
        if excess <= free + room[-2] // num_ranks:
            break
        if left < free or expert * num_ranks + taker in held:
            break
        room.pop()
        left -= free
        excess -= free
        takers.append((free, taker))
    return takers


def _best_pair(room: list[int], excess: int, num_ranks: int) -> int:
    """Return the roomier of the two receivers that together fit the excess most closely.

    Without such a pair it is the emptiest receiver.
    """
    low, high = 0, len(room) - 1
    best, least = high, -1
    while low < high:
        both = room[low] // num_ranks + room[high] // num_ranks
        if both < excess:
            low += 1
            continue
        if least < 0 or both < least:
            best, least = high, both
        high -= 1
    return best


def _other_pair(
    owned: list[int],
    load_E: list[int],
    room: list[int],
    at: int,
    num_ranks: int,
    held: set[int],
) -> tuple[int, int]:
    """Return the hottest of a donor's experts that some receiver lacks, and that receiver."""
    for index in [at, *range(len(room) - 1, -1, -1)]:
        taker = room[index] % num_ranks
        lacking = [e for e in owned if load_E[e] > 0 and e * num_ranks + taker not in held]
        if lacking:
            return max(lacking, key=load_E.__getitem__), index
    return -1, at
