"""Values of adapters given to models."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from manyhands.convert.adapter import WEIGHTS, read_adapter


def load_adapter_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Full tensors, under PEFT's names, into the model, sharded or not: by a folder, as a run takes them."""
    with tempfile.TemporaryDirectory() as folder:
        save_file({name: tensor.detach().cpu().clone() for name, tensor in state.items()}, Path(folder, WEIGHTS))
        read_adapter(model, folder)
