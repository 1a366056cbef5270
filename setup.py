# SPDX-License-Identifier: Apache-2.0

"""Package metadata; the build system and the tools' settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "megatron_fssdp/version.py").read_text())[1]

setup(
    name="megatron-fssdp",
    version=VERSION,
    description="Balanced Mixture-of-Experts training in Megatron-LM by sparse expert replication",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_fssdp", "megatron_fssdp.*"]),
    package_data={"megatron_fssdp": ["py.typed", "data/traces/*", "simulation/report/*.j2"]},
    install_requires=[
        "numpy>=1.26",
        "torch>=2.10",
        "megatron-core>=0.19,<0.20",
        # Megatron's checkpoint writer imports it, and megatron-core does not list it.
        "psutil>=5.9",
        "PyYAML>=6",
        "rich>=13",
        "typer>=0.12",
    ],
    # NVIDIA Apex is optional too, but PyPI's "apex" is another project: install it from
    # NVIDIA's repository. Megatron falls back to torch without it.
    extras_require={
        "te": ["transformer-engine[pytorch]>=2.10"],
        "plot": ["matplotlib>=3.8"],
        # `fssdp report`, `fssdp simulate --html`.
        "report": ["matplotlib>=3.8", "jinja2>=3"],
        "dev": [
            "matplotlib>=3.8",
            "jinja2>=3",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "scipy>=1.13",
            "ruff",
            "mypy",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["fssdp=megatron_fssdp.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
