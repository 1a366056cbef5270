# SPDX-License-Identifier: Apache-2.0

"""Whole-array helpers that the steps of materialization share."""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.plan import Int64Array


def descending(value_LK: Int64Array) -> Int64Array:
    """Return each row's indices by falling value, equals by rising index; (L, K) int64.

    Sorts value and index as one number: several times faster than a stable argsort.
    """
    bits = (value_LK.shape[1] - 1).bit_length()
    last = (1 << bits) - 1
    key_LK = (value_LK << bits) | (last - np.arange(value_LK.shape[1]))
    key_LK.sort(axis=1)
    order_LK: Int64Array = last - (key_LK[:, ::-1] & last)
    return order_LK


def sum_by_owner(load_LE: Int64Array, owner_LE: Int64Array, num_ranks: int) -> Int64Array:
    """(L, R) tokens of each rank without replicas."""
    num_layers = len(load_LE)
    row = np.arange(num_layers)[:, None] * num_ranks + owner_LE
    # Sums of whole numbers below 2^53: exact as floats.
    load = np.bincount(row.ravel(), weights=load_LE.ravel(), minlength=num_layers * num_ranks)
    return load.astype(np.int64).reshape(num_layers, num_ranks)
