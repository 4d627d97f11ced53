"""What was written is compared with what was in memory: a file that was changed after writing fails the run by name."""

from __future__ import annotations

from tests.e2e.runs import Place

# Runs after the export and before the verification, on the folder as another program might spoil it.
SPOIL = """
_export = export
def export(rank):
    from safetensors.torch import load_file, save_file
    import torch
    _export(rank)
    path = rank.folder.path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    names = sorted(name for name in tensors if "lora_B" in name)
    tensors[names[0]].zero_()
    del tensors[names[1]]
    tensors["base_model.model.surplus.lora_A.weight"] = torch.ones(2)
    save_file(tensors, path, metadata={"format": "pt"})
"""


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
