# SPDX-License-Identifier: Apache-2.0

"""The flags of `--moe-parallel` and `--fssdp-*`, built from `FSSDPConfig`."""

from argparse import ArgumentParser
from collections.abc import Sequence

from megatron_fssdp.config import FSSDPConfig


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add our flag group to a parser; usable as Megatron's `extra_args_provider`."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    ArgumentGroupFactory(FSSDPConfig).build_group(parser, title="fssdp")
    return parser


def parse_moe_parallel(argv: Sequence[str]) -> str:
    """Return the value of `--moe-parallel` in a command line whose other flags do not matter."""
    parser = ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--moe-parallel", default="ep")
    known, _ = parser.parse_known_args(argv)
    return str(known.moe_parallel)
