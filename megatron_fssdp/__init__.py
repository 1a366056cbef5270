# SPDX-License-Identifier: Apache-2.0

"""Fully Sharded Sparse Data Parallelism for Mixture-of-Experts training in Megatron-LM.

Importing the package imports neither torch nor Megatron: the planning and simulation tools run
on a laptop from numpy alone. The layers, each importing only those before it:

    planning     what to copy where, how many tokens go to which copy     (numpy)
    simulation   load traces, rival planners, timelines                   (planning)
    collectives  SparseAllGather and SparseReduceScatter                  (torch)
    experts      expert slots, materialization, routing translation       (torch)
    integration  flags, the MoE layer, checkpoints, metrics               (Megatron)
"""

from megatron_fssdp.version import __version__

__all__ = ["__version__"]
