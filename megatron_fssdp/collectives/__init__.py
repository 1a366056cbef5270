# SPDX-License-Identifier: Apache-2.0

"""SparseAllGather and SparseReduceScatter over a torch.distributed group."""
