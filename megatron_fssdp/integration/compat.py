# SPDX-License-Identifier: Apache-2.0

"""What differs between the supported versions of megatron-core: the only place that branches on it.

Written for 0.19; each function says what an older version does in another way.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

from megatron_fssdp.integration import versions

# Megatron's broadcast over a tensor-parallel group reads every one of these.
BATCH_KEYS = (
    "tokens",
    "labels",
    "loss_mask",
    "attention_mask",
    "position_ids",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
)


def bind_layer(layer: Any, runtime: Any) -> Any:
    """Return what a version's spec functions may wrap as the class of MoE layers.

    0.17 puts it into a ModuleSpec, which takes classes alone, and hands process groups and the MTP
    mark to what equals MoELayer. Later ones wrap any callable in a partial.

    Args:
        layer: a class, MoELayer its base, that takes a keyword `runtime`.
        runtime: what it is bound to.
    """
    if versions.core_release() >= (0, 18):
        return partial(layer, runtime=runtime)

    class EqualToMoELayer(type(layer)):  # type: ignore[misc]
        def __eq__(cls, other: object) -> bool:
            return other is cls or other in layer.__bases__

        __hash__ = type.__hash__

    return EqualToMoELayer(
        layer.__name__, (layer,), {"__init__": partialmethod(layer.__init__, runtime=runtime)}
    )


def is_bound(current: Any, layer: type) -> bool:
    """Whether `current` is a result of `bind_layer` for this layer."""
    found = getattr(current, "func", current)
    return isinstance(found, type) and issubclass(found, layer)


def modules_that_validate() -> list[Any]:
    """Return the modules of megatron.training whose name `validate_args` checks the flags.

    0.17 parses inside initialize_megatron, whose module has the name from an import of its own.
    """
    from megatron.training import arguments

    if versions.core_release() >= (0, 18):
        return [arguments]
    from megatron.training import initialize

    return [arguments, initialize]


def check_flags(args: Namespace) -> None:
    """Refuse what only an older version has and FSSDP would get wrong.

    Raises:
        ValueError: naming the flag and the way out.
    """
    if args.moe_parallel == "fssdp" and getattr(args, "use_legacy_models", False):
        raise ValueError(
            "--moe-parallel fssdp does not work with --use-legacy-models: its MoE layers are built "
            "elsewhere, so plain EP would run; drop the flag, or use --moe-parallel ep."
        )


def share_batch(loaded: dict[str, Any] | None, args: Namespace) -> dict[str, Any]:
    """Give every rank of a tensor- and context-parallel group its part of a loaded micro-batch.

    0.18 names one argument in another way; 0.17 has the broadcast in megatron.training, where it
    moves the tensors to the device itself.

    Args:
        loaded: what the data loader gave, on the first rank of the tensor-parallel group.
        args: Megatron's.
    """
    from megatron.core import mpu
    from megatron.core.utils import get_batch_on_this_cp_rank

    context_group = mpu.get_context_parallel_group()
    if versions.core_release() < (0, 18):
        from megatron.training.utils import get_batch_on_this_tp_rank as share

        batch = share(None if loaded is None else iter([loaded]))
        # Without those of packed sequences, empty tensors on some ranks.
        batch = {key: value for key, value in batch.items() if key in BATCH_KEYS[:5]}
        return dict(get_batch_on_this_cp_rank(batch, context_group))

    from megatron.core.utils import get_batch_on_this_tp_rank

    packing = "has_cu_seqlens" if versions.core_release() >= (0, 19) else "is_sft"
    batch = get_batch_on_this_tp_rank(
        {} if loaded is None else {key: _on_device(loaded.get(key)) for key in BATCH_KEYS},
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
        **{packing: False},
    )
    return dict(get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=context_group))


def _on_device(value: Any) -> Any:
    return None if value is None else value.cuda(non_blocking=True)


def pretrain_gpt(
    datasets_provider: Callable[..., Any],
    forward_step: Callable[..., Any],
    refuse: Callable[[Namespace], None],
) -> None:
    """Parse Megatron's flags and train a GPT model.

    0.18 takes a function that builds the model, where later ones take its settings; 0.17 parses the
    flags inside.

    Args:
        datasets_provider: as Megatron's `pretrain` takes it.
        forward_step: the same.
        refuse: called with the flags before anything is built.
    """
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, arguments, pretrain

    kind = ModelType.encoder_or_decoder
    release = versions.core_release()
    if release < (0, 18):
        args = arguments.parse_args()
        refuse(args)
        _check_buildable(args)
        pretrain(datasets_provider, build_gpt, kind, forward_step)
        return
    args = arguments.parse_and_validate_args()
    refuse(args)
    settings = argument_utils.pretrain_cfg_container_from_args
    if release < (0, 19):
        _check_buildable(args)
        pretrain(settings(args), datasets_provider, build_gpt, kind, forward_step)
        return
    model = argument_utils.gpt_config_from_args(args)
    pretrain(settings(args, model), datasets_provider, kind, forward_step)


def _check_buildable(args: Namespace) -> None:
    """Refuse what `build_gpt` would leave out."""
    for name in (
        "spec",
        "experimental_attention_variant",
        "heterogeneous_layers_config_path",
        "mtp_num_layers",
        "use_legacy_models",
    ):
        if getattr(args, name, None):
            raise ValueError(
                f"--{name.replace('_', '-')} needs megatron-core 0.19 or newer in this "
                f"pretrain_gpt.py, and {versions.core_version()} is installed; run Megatron-LM's "
                "own script through python -m megatron_fssdp.launch."
            )


def build_gpt(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """Build a GPT model from Megatron's flags, for versions whose wheel has no such function."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    config = config or core_transformer_config_from_args(args)
    return GPTModel(
        config,
        # Dense layers too, where the model has no or not only MoE layers.
        get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=args.transformer_impl == "transformer_engine",
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
            vp_stage=vp_stage,
        ),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
