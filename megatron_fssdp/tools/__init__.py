"""What the `fssdp` command does, as plain functions."""
