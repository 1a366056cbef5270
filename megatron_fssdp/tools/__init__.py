# SPDX-License-Identifier: Apache-2.0

"""What the `fssdp` command does, as plain functions."""
