# SPDX-License-Identifier: Apache-2.0

"""Run an unmodified Megatron script with FSSDP's flags.

    torchrun --nproc-per-node 8 -m megatron_fssdp.launch pretrain_gpt.py --moe-parallel fssdp ...

The script runs as `python pretrain_gpt.py ...` would run it: as `__main__`, with its own
`sys.argv` and its folder first on `sys.path`, so a Megatron-LM checkout uses its own `megatron`.
"""

import runpy
import sys
from pathlib import Path

USAGE = "usage: torchrun ... -m megatron_fssdp.launch SCRIPT [the script's arguments]"


def main(argv: list[str]) -> None:
    """Register the plugin, then become the script.

    Args:
        argv: the script's path, then its arguments.
    """
    if not argv or argv[0].startswith("-"):
        sys.exit(f"{USAGE}\nThe first argument is the script to run.")
    script = Path(argv[0])
    if not script.is_file():
        sys.exit(f"{USAGE}\nThere is no file {script}.")
    # Before Megatron is imported: a checkout beside the script comes before an installed wheel.
    sys.path[0] = str(script.resolve().parent)
    sys.argv = argv
    from megatron_fssdp.integration import register

    register()
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
