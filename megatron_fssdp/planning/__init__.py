# SPDX-License-Identifier: Apache-2.0

"""Decide what is copied where: numpy and the standard library only.

Deterministic: whole-number loads in, the same plan on every rank. No torch, no processes, no
clock, no randomness.
"""
