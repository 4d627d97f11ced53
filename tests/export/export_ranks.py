"""What two gloo processes do for ``test_export_ranks``: a model under FSDP2 is written."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import manyhands.export.files as stored_module
from manyhands.core.errors import UserError
from manyhands.export.adapter import export_adapter
from manyhands.export.model import export_model
from tests.export.tiny import METHOD, adapt, make_model


def write(folder: Path, source: Path) -> tuple[bool, int]:
    """Model, merged model and adapter; (whether a reference came back, number of adapter tensors it names)."""
    rank = dist.get_rank()
    model = adapt(make_model())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    export_model(folder / "model", model, source, "bfloat16", rank=rank)
    export_model(folder / "merged", model, source, "float32", rank=rank, merge=True)
    reference = export_adapter(folder / "adapter", model, METHOD, str(source), rank=rank)
    return reference is not None, len(reference.tensors) if reference else 0


def write_on_a_full_disk(folder: Path, source: Path) -> str:
    """Rank 0 cannot write; nobody may wait for it."""
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    original = stored_module.save_file
    stored_module.save_file = no_space
    try:
        export_model(folder / "full", model, source, "float32", rank=dist.get_rank())
        return "written"
    except UserError as error:
        return f"{error.why}; {(folder / 'full').exists()}"
    finally:
        stored_module.save_file = original


def no_space(*arguments: object, **options: object) -> None:
    raise OSError(28, "No space left on device", "model.safetensors")
