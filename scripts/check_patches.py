# SPDX-License-Identifier: Apache-2.0

"""Check that the patch for a Megatron-LM checkout applies to it, without changing it.

Usage: python scripts/check_patches.py path/to/Megatron-LM
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

PATCHES = Path(__file__).resolve().parent.parent / "patches"


def patch_for(checkout: Path) -> Path:
    """Return the patch for a checkout's version of megatron-core.

    Raises:
        ValueError: the folder is no Megatron-LM checkout, or one that we have no patch for.
    """
    info = checkout / "megatron/core/package_info.py"
    if not info.is_file():
        raise ValueError(f"{checkout} is not a Megatron-LM checkout: it has no {info.name}")
    numbers = dict(re.findall(r"^(MAJOR|MINOR) = (\d+)$", info.read_text(), re.MULTILINE))
    version = f"{numbers.get('MAJOR')}.{numbers.get('MINOR')}"
    patches = {"0.19": "core_v0.19.0.patch", "0.20": "main.patch"}
    if version not in patches:
        raise ValueError(
            f"{checkout} has megatron-core {version}; there are patches for {', '.join(patches)}"
        )
    return PATCHES / patches[version]


def main() -> int:
    """Check one checkout.

    Returns:
        the exit status: 0 if the patch applies.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a Megatron-LM checkout")
    checkout = parser.parse_args().checkout
    try:
        patch = patch_for(checkout)
    except ValueError as error:
        print(f"check_patches: {error}", file=sys.stderr)
        return 2
    # Without the ceiling, git skips every file of a folder that lies inside another repository.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(checkout.resolve().parent)}
    command = ["git", "-C", str(checkout), "apply", "--check", str(patch)]
    status = subprocess.run(command, check=False, env=environment).returncode
    print(f"check_patches: {patch.name} {'does not apply' if status else 'applies'} to {checkout}")
    return status


if __name__ == "__main__":
    sys.exit(main())
