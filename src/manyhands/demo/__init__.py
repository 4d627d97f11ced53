"""The run that manyhands carries along: a small model, a few hundred rows, and a run file. Knows only where they
are.
"""

from __future__ import annotations

from pathlib import Path


def demo_config_path() -> Path:
    """The run file of ``make train``; its data lies beside it."""
    return Path(__file__).with_name("run.yaml")
