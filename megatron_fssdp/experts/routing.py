# SPDX-License-Identifier: Apache-2.0

"""From the router's experts to physical ones: which slot each (token, expert) pair goes to.

Shape letters: T tokens of this rank, E experts, I instances of an expert, P physical experts
(slots of the whole group, rank by rank), Z shards of an expert (expert tensor parallelism).
"""

from __future__ import annotations

import torch


def share_of(split_EI: torch.Tensor, counts_ZE: torch.Tensor, shard: int) -> torch.Tensor:
    """Cut one shard's part out of an expert-parallel rank's split.

    With expert tensor parallelism an expert-parallel rank is Z ranks with tokens of their own, that
    all compute all Z ranks' tokens; so quotas are made for all together. The rank's tokens for an
    expert lie end to end, shard after shard, against the instances' parts.

    Args:
        split_EI: (E, I) int64, the tokens of all Z shards for each instance.
        counts_ZE: (Z, E) int64, the tokens of each shard for each expert; over Z they sum to the
            rows of `split_EI`.
        shard: whose part to return.

    Returns:
        (E, I) int64; each row sums to `counts_ZE[shard]`.

    Example: 5 and 3 tokens of two shards, 6 for the first instance and 2 for the second: [[5, 0]]
    and [[1, 2]].
    """
    end_EI = split_EI.cumsum(dim=1)
    end_E1 = counts_ZE[: shard + 1].sum(dim=0).unsqueeze(1)
    start_E1 = end_E1 - counts_ZE[shard].unsqueeze(1)
    overlap = torch.minimum(end_EI, end_E1) - torch.maximum(end_EI - split_EI, start_E1)
    return overlap.clamp(min=0)


def translate_routing(
    routing_map_TE: torch.Tensor,
    probs_TE: torch.Tensor,
    split_EI: torch.Tensor,
    physical_EI: torch.Tensor,
    num_physical: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Spread each expert's tokens over its instances as the quotas say.

    The first split_EI[e, 0] of this rank's tokens for expert e, in token order, go to its first
    instance, the next split_EI[e, 1] to the second, and so on. Static shapes, no host
    synchronisation. Autograd flows from the translated probabilities to `probs_TE`.

    Args:
        routing_map_TE: (T, E) bool, the router's choice.
        probs_TE: (T, E) float, its probabilities, zero where not chosen.
        split_EI: (E, I) int64, this rank's tokens for each instance; each row sums to the tokens
            that this rank has for the expert.
        physical_EI: (E, I) int64, each instance's physical expert; column 0 is the owner's.
        num_physical: P.

    Returns:
        (T, P) bool and (T, P) of the probabilities' dtype.

    Example: 3 tokens for expert 0, whose instances are physical experts 0 and 5, split 1 : 2:
    the first token goes to 0, the others to 5.
    """
    num_instances = split_EI.shape[1]
    # Number this rank's (token, expert) pairs expert by expert, in token order. Instances own
    # consecutive numbers, so a search among their upper ends finds the instance.
    counts_E = split_EI.sum(dim=1)
    pair_TE = routing_map_TE.cumsum(dim=0) - 1 + (counts_E.cumsum(0) - counts_E)
    upper_ends = split_EI.reshape(-1).cumsum(0)
    instance_TE = torch.searchsorted(upper_ends, pair_TE, right=True)
    # Pairs that the router did not choose point at the owner's slot and carry False: no two
    # experts share a physical one, so nothing is overwritten.
    experts_E = torch.arange(split_EI.shape[0], device=split_EI.device)
    instance_TE = torch.where(routing_map_TE, instance_TE, experts_E * num_instances)
    physical_TE = physical_EI.reshape(-1)[instance_TE]
    shape = (routing_map_TE.shape[0], num_physical)
    physical_map = routing_map_TE.new_zeros(shape).scatter(1, physical_TE, routing_map_TE)
    physical_probs = probs_TE.new_zeros(shape).scatter(1, physical_TE, probs_TE)
    return physical_map, physical_probs
