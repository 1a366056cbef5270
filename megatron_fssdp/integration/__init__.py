# SPDX-License-Identifier: Apache-2.0

"""Everything that touches Megatron. No other part of the package imports it.

`register()` is what every way of starting (pretrain_gpt.py here, the launcher, a patched
Megatron-LM script) calls, once, before Megatron parses its flags.
"""

__all__ = ["register"]


def register() -> None:
    """Teach Megatron's parser `--moe-parallel` and the `--fssdp-*` flags.

    With `--moe-parallel ep`, the default, nothing else of Megatron changes. Imports Megatron, so
    it takes seconds. Calling again does nothing.
    """
    # Not at the top: importing this package must not import Megatron.
    from megatron_fssdp.integration import registration

    registration.register()
