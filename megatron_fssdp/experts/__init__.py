# SPDX-License-Identifier: Apache-2.0

"""Expert slots behind the router's experts. Knows torch, not Megatron."""
