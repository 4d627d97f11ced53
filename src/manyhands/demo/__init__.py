"""The demo run: a few hundred rows, a run file (``run.yaml``) and a way to get its model without a hub."""

from __future__ import annotations

from pathlib import Path


def demo_config_path() -> Path:
    """The run file of ``make train``; its data lies beside it."""
    return Path(__file__).with_name("run.yaml")
