"""Which GPUs, or processes on the CPU, a model works on, and how many copies of it there are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manyhands.core.errors import UserError
from manyhands.core.files import read_json
from manyhands.core.machine import count_cores
from manyhands.infer.replicas import Seat

WEIGHTS_SHARE = 0.75  # of a GPU's free memory for weights; the rest is for the cache


@dataclass(frozen=True)
class Placement:
    """Where the model runs. ``gpus``: how many of the visible ones, None for all; ``processes``: on the CPU, where each
    has its share of the cores. ``device_map``: ``none`` (a copy on each GPU), ``balanced``, ``sequential`` (one copy
    over all of them), ``auto`` (as few GPUs to a copy as hold it). ``batch_size``: rows of a batch, None by memory.
    """

    gpus: int | None = None
    processes: int = 1
    device_map: str = "auto"
    batch_size: int | None = None
    engine: str = "transformers"

    def seats(self, weight_bytes: int) -> list[Seat]:
        """One for each copy of the model. UserError for more GPUs than there are, or a model that they do not hold."""
        import torch

        num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        num = num_visible if self.gpus is None else self.gpus
        if num > num_visible:
            raise UserError(f"--gpus {num}, and torch sees {num_visible}", where="--gpus", fix="leave the option out")
        if num == 0:
            if self.device_map in ("balanced", "sequential"):
                raise UserError("layers are divided over GPUs, and there are none", where="--device-map")
            threads = None if self.processes == 1 else max(1, count_cores() // self.processes)
            return [Seat(threads=threads) for _ in range(self.processes)]
        if self.processes != 1:
            raise UserError(
                "--processes is for the CPU", where="--processes", why=f"{num} GPUs are used", fix="--gpus N"
            )
        size = num if self.device_map in ("balanced", "sequential") else 1
        if self.device_map == "auto":
            size = group_size(weight_bytes, _free_bytes(num), num)
        return [Seat(tuple(range(start, start + size))) for start in range(0, num - size + 1, size)]


ALL_GPUS = Placement()


def _free_bytes(num_gpus: int) -> int:
    """Of the first GPUs the least that is free, from the driver: torch would start CUDA on each of them here."""
    import torch

    from manyhands.facts.host import read_host_facts

    gpus = read_host_facts().gpus
    if len(gpus) < num_gpus:  # no NVML
        return min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(num_gpus))
    return min(gpu.free_bytes for gpu in gpus[:num_gpus])


def group_size(weight_bytes: int, free_bytes: int, num_gpus: int) -> int:
    """The fewest GPUs that hold the weights with room for the cache. UserError where all of them do not."""
    size = max(1, -(-weight_bytes // int(WEIGHTS_SHARE * free_bytes)))
    if size > num_gpus:
        raise UserError(
            f"the model's weights do not fit on {num_gpus} GPU{'s' if num_gpus > 1 else ''}",
            why=f"they have {weight_bytes / 2**30:.1f} GiB, and a GPU has {free_bytes / 2**30:.1f} GiB free",
            fix=f"use {size} GPUs of this size",
        )
    return size


def count_weight_bytes(folder: Path) -> int:
    """Of a model folder's weights as they are computed with: those stored in 4 bits take four times their file."""
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    config = read_json(folder / "config.json") or {}
    return stored * (4 if "quantization_config" in config else 1)
