"""Expert slots behind the router's experts. Knows torch, not Megatron."""
