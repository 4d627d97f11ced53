"""The demo run: a few hundred rows, a run file (``run.yaml``) and a way to get its model without a hub."""

from __future__ import annotations

from pathlib import Path


def demo_config_path() -> Path:
    """The run file of ``make train``, which has its data in the same folder."""
    return Path(__file__).with_name("run.yaml")


def demo_words() -> list[str]:
    """The run file, and keys for two processes where there is no GPU. GPUs that cannot be used are refused later."""
    from manyhands.facts.host import read_host_facts

    host = read_host_facts()
    processes = [] if host.gpus or host.unusable_gpus else ["parallel.gpus=2", "parallel.device=cpu"]
    return [str(demo_config_path()), *processes]
