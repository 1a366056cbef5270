"""SparseAllGather and SparseReduceScatter over a torch.distributed group."""
