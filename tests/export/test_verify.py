"""Planted faults: each must fail the verification with the tensor's name, and a sound folder must pass."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from manyhands.core.errors import UserError
from manyhands.export import verify as verify_module
from manyhands.export.adapter import export_adapter
from manyhands.export.model import export_model
from manyhands.export.reference import Reference, round_weights, save_probe
from manyhands.export.verify import verify
from manyhands.export.verify_process import verify_in_fresh_process
from manyhands.facts.adapter import WEIGHTS
from tests.export.tiny import METHOD, adapt, make_model, save_source

NAME = "model.layers.1.mlp.up_proj.weight"
FACTOR = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
IDS = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, model/, model16/, adapter/ with references and probes."""
    root = tmp_path_factory.mktemp("written")
    base = save_source(root / "base", make_model())
    model, adapted = make_model(seed=1).eval(), adapt(make_model()).eval()
    export_model(root / "model", model, base, "float32", rank=0, reference_path=root / "model.json")
    export_model(root / "model16", model, base, "bfloat16", rank=0, reference_path=root / "model16.json")
    export_adapter(root / "adapter", adapted, METHOD, str(base), rank=0, reference_path=root / "adapter.json")
    with torch.no_grad():
        save_probe(root / "model.probe", IDS, model(IDS).logits, "float32")
        save_probe(root / "adapter.probe", IDS, adapted(IDS).logits, "float32")
    return root


def check(root: Path, name: str, folder: Path | None = None, probe: str | None = None) -> verify_module.Verification:
    reference = Reference.read(root / f"{name}.json")
    probe_path = root / f"{probe or name.removesuffix('16')}.probe"
    return verify(folder or root / name, reference, base=root / "base", probe_path=probe_path)


@pytest.mark.parametrize("name", ["model", "model16", "adapter"])
def test_a_sound_folder_passes_with_logits(written: Path, name: str) -> None:
    found = check(written, name)
    assert found.findings == []
    assert "reopened by" in found.notes[1]
    assert "logits of 20 tokens deviate" in found.notes[2]


def test_logits_are_those_of_the_rounded_weights_where_a_file_rounds_small_updates_away(tmp_path: Path) -> None:
    """An update of a quarter of a digit is gone in a bfloat16 file, which is not the file's fault."""
    base, trained = make_model().eval(), make_model().eval()
    for model in (base, trained):
        round_weights(model, "bfloat16")
    with torch.no_grad():
        for weight in trained.parameters():
            weight *= 1 + 2**-10 * torch.sign(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
        expected, unrounded = base(IDS).logits, trained(IDS).logits
    source = save_source(tmp_path / "base", base)
    reference = export_model(tmp_path / "model", trained, source, "bfloat16", rank=0)
    round_weights(trained, "bfloat16")
    with torch.no_grad():
        save_probe(tmp_path / "probe", IDS, trained(IDS).logits, "float32")
    assert reference is not None
    found = verify(tmp_path / "model", reference, base=source, probe_path=tmp_path / "probe")
    assert found.findings == [] and "deviate by 0.0e+00" in found.notes[2]
    assert torch.equal(trained(IDS).logits, expected) and not torch.equal(unrounded, expected)


Change = Callable[[dict[str, torch.Tensor]], object]
FAULTS: dict[str, tuple[str, str, Change, str]] = {
    "missing": ("model", NAME, lambda t: t.pop(NAME), "is missing"),
    "extra": ("model", "more.weight", lambda t: t.update({"more.weight": torch.ones(2)}), "is extra"),
    "dtype": ("model", NAME, lambda t: t.update({NAME: t[NAME].bfloat16()}), "has dtype bfloat16 instead of float32"),
    "shape": (
        "model",
        NAME,
        lambda t: t.update({NAME: t[NAME][:-1].clone()}),
        "has shape [95, 64] instead of [96, 64]",
    ),
    "one bit": ("model", NAME, lambda t: t[NAME].view(torch.int32)[3, 5].bitwise_xor_(1), "has other values"),
    "nan": ("model", NAME, lambda t: t[NAME][0, 0].fill_(float("nan")), "holds NaN"),
    "zero B": ("adapter", FACTOR, lambda t: t[FACTOR].zero_(), "is all zero"),
    "missing B": ("adapter", FACTOR, lambda t: t.pop(FACTOR), "is missing"),
    "extra A": ("adapter", "x.lora_A.weight", lambda t: t.update({"x.lora_A.weight": torch.ones(2)}), "is extra"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(written: Path, tmp_path: Path, fault: str) -> None:
    kind, tensor, change, text = FAULTS[fault]
    shutil.copytree(written / kind, tmp_path / kind)
    path = tmp_path / kind / (WEIGHTS if kind == "adapter" else "model.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    findings = check(written, kind, tmp_path / kind).findings
    assert any(finding.startswith(tensor) and text in finding for finding in findings), findings
    assert all(finding.startswith(tensor) for finding in findings)


def test_an_adapter_that_was_never_trained_fails_even_if_saved_faithfully(tmp_path: Path) -> None:
    from manyhands.convert.lora import apply_lora

    model = make_model()
    apply_lora(model, METHOD, seed=0)  # B is zero
    reference = export_adapter(tmp_path / "adapter", model, METHOD, "base", rank=0)
    assert reference is not None
    findings = verify(tmp_path / "adapter", reference).findings
    assert len(findings) == 14 and all("lora_B" in f and "all zero" in f for f in findings)


def test_wrong_logits_fail(written: Path) -> None:
    findings = check(written, "model", probe="adapter").findings
    assert len(findings) == 1 and findings[0].startswith("logits of 20 tokens deviate")


def test_a_config_that_ignores_weights_is_noticed_on_reopening(written: Path, tmp_path: Path) -> None:
    """The files are right, but transformers builds one layer more than they hold."""
    import json

    shutil.copytree(written / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    findings = check(written, "model", tmp_path / "model").findings
    assert any("model.layers.2.mlp.up_proj.weight appears only after reopening" in f for f in findings)


def test_a_model_larger_than_memory_is_compared_on_the_files(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "MEMORY_FACTOR", 1e12)
    found = check(written, "model")
    assert found.findings == []
    assert "not reopened, the model needs" in found.notes[1]


@pytest.mark.ci
def test_the_fresh_process_answers_by_its_exit_code(written: Path, tmp_path: Path) -> None:
    line = verify_in_fresh_process(
        written / "adapter", written / "adapter.json", base=written / "base", probe_path=written / "adapter.probe"
    )
    assert "28 tensors compared in the files; reopened by PeftModel.from_pretrained; logits" in line
    shutil.copytree(written / "adapter", tmp_path / "adapter")
    (tmp_path / "adapter" / WEIGHTS).unlink()
    with pytest.raises(UserError, match="verification failed") as caught:
        verify_in_fresh_process(tmp_path / "adapter", written / "adapter.json")
    assert caught.value.exit_code == 1
    assert "a weights file is missing" in caught.value.details[0]
    assert caught.value.fix.startswith("do not use this folder")


@pytest.mark.parametrize("multiplies_bfloat16", [False, True])
def test_an_adapter_on_nf4_is_reopened_on_every_cpu(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, multiplies_bfloat16: bool
) -> None:
    """96 inputs end rows in half a block; CPUs that multiply bfloat16 pack weights anew, and round."""
    pytest.importorskip("bitsandbytes")
    import bitsandbytes.functional as kernels
    import bitsandbytes.nn.modules as layers

    monkeypatch.setattr(layers, "has_avx512bf16", lambda: multiplies_bfloat16)
    model = adapt(make_model()).eval()
    with torch.no_grad():
        for name, layer in model.named_modules():
            if name.endswith("_proj"):
                packed, state = kernels.quantize_4bit(
                    layer.weight.reshape(1, -1), blocksize=64, quant_type="nf4", compress_statistics=True
                )
                layer.weight.copy_(kernels.dequantize_4bit(packed, state).view(layer.weight.shape))
        save_probe(tmp_path / "nf4.probe", IDS, model(IDS).logits, "float32")
    reference = Reference.read(written / "adapter.json").model_copy(update={"base": "nf4"})
    found = verify(written / "adapter", reference, base=written / "base", probe_path=tmp_path / "nf4.probe")
    assert found.findings == []
    assert found.notes[2].startswith("logits of 20 tokens deviate")
