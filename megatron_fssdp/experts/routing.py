# SPDX-License-Identifier: Apache-2.0

"""From the router's experts to physical ones: which slot each (token, expert) pair goes to.

Shape letters: T tokens of this rank, E experts, I instances of an expert, P physical experts
(slots of the whole group, rank by rank).
"""

from __future__ import annotations

import torch


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
