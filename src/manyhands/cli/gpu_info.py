"""``manyhands gpu-info``: the GPUs a run would use."""

from __future__ import annotations


def gpu_info() -> None:
    """List the GPUs of this machine with their memory."""
    from rich.console import Console
    from rich.table import Table

    from manyhands.cli.words import gib
    from manyhands.facts.host import read_host_facts

    host = read_host_facts()
    console = Console(highlight=False)
    if not host.gpus:
        console.print("No GPU is visible: runs take CPU processes.")
    else:
        listing = Table(box=None, padding=(0, 2, 0, 0))
        for title in ("GPU", "name", "memory", "free", "compute capability", "bfloat16"):
            listing.add_column(title)
        for gpu in host.gpus:
            capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else "unknown"
            listing.add_row(
                str(gpu.index),
                gpu.name,
                gib(gpu.memory_bytes),
                gib(gpu.free_bytes),
                capability,
                "yes" if gpu.has_bfloat16 else "no",
            )
        console.print(listing)
    console.print(f"CPU: {host.num_cores} cores, {gib(host.memory_bytes)} memory, {gib(host.free_memory_bytes)} free")
