# SPDX-License-Identifier: Apache-2.0

"""Check that our patch applies to a Megatron-LM checkout, or make all patches from a clone.

    python scripts/check_patches.py path/to/Megatron-LM        # changes nothing there
    python scripts/check_patches.py --generate path/to/clone   # with tags; a bare one will do

A patch adds two lines to pretrain_gpt.py: an import and a call. `--generate` writes patches/ anew
and applies each to all tags that it is for.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "patches"
SCRIPT = "pretrain_gpt.py"

# After the last plain import, and before the first look at the flags: in-process restart has one,
# which ends the script where --help is given.
IMPORT_AFTER = "from model_provider import model_provider\n"
IMPORT = "from megatron_fssdp.integration import register as register_fssdp\n"
CALL_AFTER = 'if __name__ == "__main__":\n'
CALL = "    register_fssdp()\n"


@dataclass(frozen=True)
class Patch:
    """One file of patches/.

    Attributes:
        core: the version of megatron-core that it is for, major and minor number.
        refs: tags and branches of Megatron-LM that it applies to; made from the last.
        name: of the file.
    """

    core: str
    refs: tuple[str, ...]
    name: str

    @property
    def path(self) -> Path:
        """Where the file is."""
        return FOLDER / self.name


PATCHES = (
    Patch("0.17", ("core_v0.17.0", "core_v0.17.1"), "core_v0.17.x.patch"),
    Patch("0.18", ("core_v0.18.0", "core_v0.18.2"), "core_v0.18.x.patch"),
    Patch("0.19", ("core_v0.19.0",), "core_v0.19.0.patch"),
    Patch("0.20", ("main",), "main.patch"),
)


def core_version(checkout: Path) -> str:
    """Return the major and minor number of a checkout's megatron-core.

    Raises:
        ValueError: the folder is no Megatron-LM checkout.
    """
    info = checkout / "megatron/core/package_info.py"
    if not info.is_file():
        raise ValueError(f"{checkout} is not a Megatron-LM checkout: it has no {info.name}")
    numbers = dict(re.findall(r"^(MAJOR|MINOR) = (\d+)$", info.read_text(), re.MULTILINE))
    return f"{numbers.get('MAJOR')}.{numbers.get('MINOR')}"


def patch_for(checkout: Path) -> Patch:
    """Return the patch for a checkout's version of megatron-core.

    Raises:
        ValueError: the folder is no Megatron-LM checkout, or one that we have no patch for.
    """
    version = core_version(checkout)
    for patch in PATCHES:
        if patch.core == version:
            return patch
    supported = ", ".join(patch.core for patch in PATCHES)
    raise ValueError(f"{checkout} has megatron-core {version}; there are patches for {supported}")


def apply(patch: Patch, checkout: Path, *options: str) -> bool:
    """Apply a patch with git, and tell whether it could."""
    # Without the ceiling, git skips every file of a folder that lies inside another repository.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(checkout.resolve().parent)}
    command = ["git", "-C", str(checkout), "apply", *options, str(patch.path)]
    return subprocess.run(command, check=False, env=environment).returncode == 0


def add_our_lines(text: str) -> str:
    """Return Megatron-LM's script with our two lines.

    Raises:
        ValueError: the script has not exactly one place for each.
    """
    for after, ours in ((IMPORT_AFTER, IMPORT), (CALL_AFTER, CALL)):
        if text.count(after) != 1:
            raise ValueError(f"has {text.count(after)} times the line {after.strip()!r}, not once")
        text = text.replace(after, after + ours)
    return text


def generate(clone: Path) -> None:
    """Write every patch from the scripts of a clone, and apply it to each of its refs.

    Raises:
        ValueError: a ref is not there, its script has no place for our lines, or a patch that was
            made from another ref does not apply.
    """
    for patch in PATCHES:
        for ref in reversed(patch.refs):
            with tempfile.TemporaryDirectory() as folder:
                stock, ours = Path(folder, "a", SCRIPT), Path(folder, "b", SCRIPT)
                for path in (stock, ours):
                    path.parent.mkdir()
                    path.write_text(_script(clone, ref))
                if ref == patch.refs[-1]:
                    try:
                        ours.write_text(add_our_lines(ours.read_text()))
                    except ValueError as error:
                        raise ValueError(f"{SCRIPT} of {ref} {error}") from error
                    command = ["git", "diff", "--no-index", "--no-prefix", f"a/{SCRIPT}"]
                    command += [f"b/{SCRIPT}"]
                    diff = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=False)
                    patch.path.write_bytes(diff.stdout)
                if not apply(patch, stock.parent, "--check"):
                    raise ValueError(f"{patch.name} does not apply to {ref}")
        print(f"check_patches: {patch.name} applies to {', '.join(patch.refs)}")


def _script(clone: Path, ref: str) -> str:
    command = ["git", "-C", str(clone), "show", f"{ref}:{SCRIPT}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{clone} has no {ref}: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    """Check one checkout, or make the patches.

    Returns:
        the exit status: 0 if the patch applies.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a Megatron-LM checkout")
    parser.add_argument("--generate", action="store_true", help="write patches/ from its tags")
    args = parser.parse_args()
    try:
        if args.generate:
            generate(args.checkout)
            return 0
        patch = patch_for(args.checkout)
    except ValueError as error:
        print(f"check_patches: {error}", file=sys.stderr)
        return 2
    applies = apply(patch, args.checkout, "--check")
    verdict = "applies" if applies else "does not apply"
    print(f"check_patches: {patch.name} {verdict} to {args.checkout}")
    return 0 if applies else 1


if __name__ == "__main__":
    sys.exit(main())
