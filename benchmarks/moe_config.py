# SPDX-License-Identifier: Apache-2.0

"""The Megatron configuration that the benchmarks' models share."""

from __future__ import annotations

from typing import Any


def moe_config(**settings: Any) -> Any:
    """Return Megatron's configuration of a small MoE model that trains on CPUs.

    Args:
        settings: sizes, and whatever differs; `ffn_hidden_size` is that of an expert too.
    """
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        moe_ffn_hidden_size=settings["ffn_hidden_size"],
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_grouped_gemm=True,
        add_bias_linear=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **settings,
    )
