"""What was written is compared with what was in memory: a file that was changed after writing fails the run by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from manyhands.checkpoint import checkpoint_folder, load_checkpoint, save_checkpoint
from manyhands.core.errors import UserError
from manyhands.launch.run.folder import RunFolder
from manyhands.training.types import TrainState
from manyhands.worker import export_stages
from tests.e2e.runs import Place

# Runs after the export and before the verification, on the folder as another program might spoil it.
SPOIL = """
_export = export
def export(rank, *given):
    from safetensors.torch import load_file, save_file
    import torch
    _export(rank, *given)
    path = rank.folder.path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    names = sorted(name for name in tensors if "lora_B" in name)
    tensors[names[0]].zero_()
    del tensors[names[1]]
    tensors["base_model.model.surplus.lora_A.weight"] = torch.ones(2)
    save_file(tensors, path, metadata={"format": "pt"})
"""


@pytest.mark.ci
def test_an_all_zero_a_missing_and_an_extra_tensor_fail_the_run_by_name(place: Place) -> None:
    ended = place.call(
        "-m",
        "manyhands.worker",
        "run.yaml",
        "name=spoilt",
        "stop.max_steps=2",
        plant={"manyhands.worker.export_stages": SPOIL},
    )
    assert ended.code == 1, ended.output
    layer = "base_model.model.model.layers.0.mlp"
    assert "verification failed" in ended.output and "Traceback" not in ended.output
    assert f"{layer}.down_proj.lora_B.weight is all zero" in ended.output, ended.output
    assert f"{layer}.gate_proj.lora_B.weight is missing" in ended.output
    assert "base_model.model.surplus.lora_A.weight is extra" in ended.output
    assert "finished:" not in ended.output and not (place.run("spoilt").folder / "report.json").exists()
    assert place.run("spoilt").steps_saved()[-1] == 2, "nothing is lost: the trained weights are in the checkpoint"


@pytest.mark.parametrize("damage", ["flipped", "set aside"])
def test_a_damaged_best_checkpoint_says_what_can_be_done_without_it(tmp_path: Path, damage: str) -> None:
    """To delete it, or to start again, would lead to the same error."""
    folder, model = RunFolder(tmp_path), torch.nn.Linear(2, 2)
    folder.plans.mkdir()
    best, last = (checkpoint_folder(folder.checkpoints, step) for step in (2, 4))
    for path in (best, last):
        save_checkpoint(path, model, None, {}, rank=0, world_size=1)
    if damage == "flipped":
        shard = next(best.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    else:
        best.rename(best.with_name(f"{best.name}.damaged"))
    config = SimpleNamespace(checkpoint=SimpleNamespace(keep_best=True))
    rank = SimpleNamespace(config=config, folder=folder, plan=None)
    built = SimpleNamespace(engine=SimpleNamespace(load=lambda path: load_checkpoint(path, model, None)))
    with pytest.raises(UserError, match="the best checkpoint, of step 2, cannot be exported") as caught:
        export_stages.export(rank, None, built, TrainState(step=4, best_step=2, best_loss=1.0))
    assert f"manyhands export {last}" in caught.value.fix and "delete" not in caught.value.fix
