"""Random numbers that depend on a seed and a name only: the same in every process, layout and Python."""

from __future__ import annotations

import hashlib

import torch


def named_seed(seed: int, name: str) -> int:
    """A seed of 63 bits for one name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def named_generator(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one name."""
    return torch.Generator(device=device).manual_seed(named_seed(seed, name))
