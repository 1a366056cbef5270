# SPDX-License-Identifier: Apache-2.0

"""The only place that asks which versions are installed."""

import importlib.metadata
import importlib.util
from dataclasses import dataclass

# Megatron changes internal interfaces between such versions: compat.py has the differences, and
# `make test-compat` runs the equality suite on all that are released. 0.20: Megatron-LM's main,
# last run at commit d98e8a64dd (2026-08-22); the released wheel is not out yet.
SUPPORTED_CORES = ((0, 17), (0, 18), (0, 19), (0, 20))
SUPPORTED_CORES_TEXT = "megatron-core >= 0.17, < 0.21"


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """What is installed; None: not found.

    Attributes:
        torch: its version.
        cuda: torch's CUDA version, where a CUDA device is available.
        megatron_core: its version.
        transformer_engine: its version.
        apex: the version of NVIDIA's Apex, or "installed" where it tells none.
    """

    torch: str
    cuda: str | None
    megatron_core: str | None
    transformer_engine: str | None
    apex: str | None

    @property
    def is_core_supported(self) -> bool:
        """Whether this plugin was written for the megatron-core found."""
        return _is_supported(self.megatron_core)


def find_versions() -> Versions:
    """Look the versions up, without starting Megatron or Transformer Engine."""
    import torch

    return Versions(
        torch=torch.__version__,
        cuda=torch.version.cuda if torch.cuda.is_available() else None,
        megatron_core=core_version(),
        transformer_engine=_version_of("transformer_engine", "transformer-engine"),
        apex=_nvidia_apex(),
    )


def check_core() -> None:
    """Stop where the plugin was not written for the installed megatron-core.

    Raises:
        RuntimeError: naming the version found and the supported range.
    """
    found = core_version()
    if not _is_supported(found):
        raise RuntimeError(
            f"megatron-fssdp supports {SUPPORTED_CORES_TEXT} and found {found or 'none'}; "
            "install one with: pip install 'megatron-core>=0.17,<0.20'"
        )


def core_version() -> str | None:
    """Return megatron-core's version.

    The package is asked, not its metadata: a Megatron-LM checkout comes before an installed wheel
    on the path of its own scripts, and has no metadata.
    """
    try:
        # The short one: the long one ends in the commit of whatever repository we are run from.
        from megatron.core.package_info import __shortversion__
    except ImportError:
        return None
    return str(__shortversion__)


def core_release() -> tuple[int, int]:
    """Return the first two numbers of the installed megatron-core, (0, 19) for 0.19.2.

    Raises:
        RuntimeError: none is installed.
    """
    found = core_version()
    if found is None:
        raise RuntimeError(f"megatron-core is not installed; needed is {SUPPORTED_CORES_TEXT}")
    return _release(found)


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _is_supported(version: str | None) -> bool:
    return version is not None and _release(version) in SUPPORTED_CORES


def _version_of(module: str, distribution: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "installed"


def _nvidia_apex() -> str | None:
    """Return NVIDIA Apex's version; PyPI's package named apex is another project."""
    if importlib.util.find_spec("apex") is None:
        return None
    try:
        # Only NVIDIA's has this subpackage. Asking imports apex itself, which may fail.
        is_nvidias = importlib.util.find_spec("apex.multi_tensor_apply") is not None
    except Exception:
        return None
    return _version_of("apex", "apex") if is_nvidias else None
