# SPDX-License-Identifier: Apache-2.0

"""One self-contained HTML page about a simulation or a training run."""

from megatron_fssdp.simulation.report.page import render_report, write_report

__all__ = ["render_report", "write_report"]
