"""The only place that asks which versions are installed."""

import importlib.metadata
import importlib.util
from dataclasses import dataclass

# Megatron's own rule: the first two numbers change when internal interfaces may.
SUPPORTED_CORE = (0, 19)
SUPPORTED_CORE_TEXT = "megatron-core >= 0.19, < 0.20"


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """What is installed; None: not found."""

    torch: str
    cuda: str | None
    megatron_core: str | None
    transformer_engine: str | None
    apex: str | None
    """NVIDIA's; "installed" where its version is unknown."""

    @property
    def is_core_supported(self) -> bool:
        """Whether this plugin was written for the megatron-core found."""
        return self.megatron_core is not None and _numbers(self.megatron_core) == SUPPORTED_CORE


def find_versions() -> Versions:
    """Look the versions up, without importing Megatron or Transformer Engine."""
    import torch

    return Versions(
        torch=torch.__version__,
        cuda=torch.version.cuda if torch.cuda.is_available() else None,
        megatron_core=_version_of("megatron-core", "megatron.core"),
        transformer_engine=_version_of("transformer-engine", "transformer_engine"),
        apex=_nvidia_apex(),
    )


def check_core() -> None:
    """Stop where the plugin was not written for the installed megatron-core.

    Raises:
        RuntimeError: naming the version found and the supported range.
    """
    found = core_version()
    if found is None or _numbers(found) != SUPPORTED_CORE:
        raise RuntimeError(
            f"megatron-fssdp supports {SUPPORTED_CORE_TEXT} and found "
            f"{found or 'none'}; install it with: pip install 'megatron-core>=0.19,<0.20'"
        )


def core_version() -> str | None:
    """Return megatron-core's version.

    The imported package is asked, not the metadata: a Megatron-LM checkout on PYTHONPATH comes
    before an installed wheel and has no metadata.
    """
    try:
        from megatron.core.package_info import __version__
    except ImportError:
        return None
    return __version__


def _version_of(distribution: str, module: str) -> str | None:
    if module == "megatron.core":
        return core_version()
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
    # Only NVIDIA's has this subpackage. find_spec imports the parent, which may itself fail.
    try:
        if importlib.util.find_spec("apex.multi_tensor_apply") is None:
            return None
    except ImportError:
        return None
    try:
        return importlib.metadata.version("apex")
    except importlib.metadata.PackageNotFoundError:
        return "installed"


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
