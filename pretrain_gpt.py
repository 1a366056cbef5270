# SPDX-License-Identifier: Apache-2.0

"""Pretrain a GPT model with Megatron, plain EP or FSSDP. Run it under torchrun.

Takes every flag of Megatron-LM's script of this name that plain pretraining needs, plus
`--moe-parallel {ep,fssdp}` and the `--fssdp-*` group; megatron-core's wheel does not ship that
script. For SFT, fill-in-the-middle, multi-token prediction or ModelOpt, run Megatron-LM's own
file through `python -m megatron_fssdp.launch`.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers, print_rank_0
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_fssdp.integration import compat, register

# Tensors by name; None where this rank has no use for one.
Batch = dict[str, Any]

UNSUPPORTED = (
    "sft",
    "fim_data",
    "mtp_num_layers",
    "hybrid_context_parallel",
    "dataloader_inter_document_masking",
    "overlap_moe_expert_parallel_comm",
    "logits_load_dir",
    "inprocess_restart",
    "check_for_spiky_loss",
)


def get_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """Return this rank's slice of the next micro-batch; middle pipeline stages need none."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(compat.BATCH_KEYS)
    loaded = None
    if data_iterator is not None and mpu.get_tensor_model_parallel_rank() == 0:
        loaded = next(data_iterator)
    return compat.share_batch(loaded, get_args())


def loss_func(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the losses of the tokens that count.

    Returns:
        the sum, the number of tokens in it, and both as the entry of the training log.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    if get_args().check_for_nan_in_loss_and_grad:
        for is_bad, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=is_bad,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,  # the forward pass is deterministic
                fatal=True,
            )
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens])}


def forward_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[Any, Any]:
    """Run the model on the next micro-batch; Megatron calls the returned loss function."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


def dataset_config(args: argparse.Namespace) -> GPTDatasetConfig:
    """Translate the data flags."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=sequences_per_dataset,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Build the train, validation and test sets on the ranks that read them."""
    args = get_args()

    def is_built_here() -> bool:
        is_reader = mpu.get_tensor_model_parallel_rank() == 0
        return is_reader and bool(is_first_or_last_pipeline_stage(vp_stage))

    kind = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    return BlendedMegatronDatasetBuilder(
        kind, num_samples, is_built_here, dataset_config(args)
    ).build()


# Every rank builds its own datasets; is_built_here says which.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def refuse_unsupported(args: argparse.Namespace) -> None:
    """Stop where a flag asks for what this script lacks."""
    for name in UNSUPPORTED:
        if getattr(args, name, None):
            raise ValueError(
                f"--{name.replace('_', '-')} is not supported by this pretrain_gpt.py; run "
                "Megatron-LM's own through python -m megatron_fssdp.launch."
            )


def main() -> None:
    """Parse, build, train."""
    register()
    compat.pretrain_gpt(datasets_provider, forward_step, refuse_unsupported)


if __name__ == "__main__":
    main()
