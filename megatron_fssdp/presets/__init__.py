# SPDX-License-Identifier: Apache-2.0

"""Presets: models, clusters and layouts as files (`configs/`). Needs neither torch nor Megatron."""
