"""A model that transformers and bitsandbytes have stored in NF4 is trained beside as it is: the same bytes, weights,
logits and loss, and an adapter that opens beside it again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from manyhands.convert import stored_nf4
from manyhands.convert.nf4 import Nf4Linear
from manyhands.convert.stored_nf4 import take_stored
from manyhands.core.errors import UserError
from manyhands.export.__main__ import compute_probe
from manyhands.export.reference import Reference
from manyhands.export.verify import dequantize_as_one_row, verify
from manyhands.facts.safetensors import read_header
from manyhands.facts.stored_nf4 import find_stored_nf4
from manyhands.infer.load import ModelLocation, load_model
from manyhands.model.weights import quantized_layers
from tests.keys.lab import Lab, open_lab

functional = pytest.importorskip("bitsandbytes").functional
Q_PROJ = "model.layers.0.self_attn.q_proj"
IDS = torch.arange(40)[None] % 250


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab")) as opened:
        yield opened


def quantize(
    folder: Path, to: Path, *, double: bool = True, dtype: torch.dtype = torch.float32, **options: Any
) -> Path:
    """``folder``'s model as ``save_pretrained`` writes it in NF4, with its tokenizer."""
    kinds = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double} | options
    config = BitsAndBytesConfig(**kinds, bnb_4bit_compute_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map={"": "cpu"}, quantization_config=config
    )
    model.save_pretrained(to)
    for path in folder.glob("*token*"):
        (to / path.name).write_bytes(path.read_bytes())
    for path in folder.glob("chat_template*"):
        (to / path.name).write_bytes(path.read_bytes())
    return to


def reopen(folder: Path, dtype: torch.dtype) -> Any:
    """As transformers opens it, multiplied by weights that bitsandbytes dequantizes: its own fused matmul for CPUs
    rounds the scales.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": "cpu"}).eval()
    dequantize_as_one_row(model)
    return model


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_weights_logits_and_loss_are_those_of_the_files(lab: Lab, double: bool, dtype: str) -> None:
    of_torch = getattr(torch, dtype)
    folder = quantize(lab.folder / "model", lab.new_path("nf4"), double=double, dtype=of_torch)
    rank = lab.start({"model.name": str(folder), "method.name": "qlora", "model.dtype": dtype})
    theirs = reopen(folder, of_torch)
    layers = quantized_layers(rank.model)
    assert len(layers) == 7
    for name, layer in layers.items():
        stored = theirs.get_submodule(name).weight
        assert torch.equal(layer.weight, functional.dequantize_4bit(stored.data, stored.quant_state)), name
        held = layer.weight_codes.view(torch.uint8).view(-1)
        assert torch.equal(held[: stored.numel()], stored.data.view(torch.uint8).view(-1))
    assert rank.plan.stored_nf4.double_quant is double
    with torch.no_grad():
        mine = rank.model.eval()(IDS, labels=IDS, use_cache=False)
        other = theirs(IDS, labels=IDS, use_cache=False)
    assert torch.equal(mine.logits, other.logits) and torch.equal(mine.loss, other.loss)


def test_a_model_quantized_here_and_one_stored_so_train_alike(lab: Lab) -> None:
    """The files hold what is made of the model in 16 bits; the plan counts the same memory, and says what it takes."""
    folder = quantize(lab.folder / "model", lab.new_path("nf4"))
    stored, made = (lab.export(keys | {"method.name": "qlora"}) for keys in ({"model.name": str(folder)}, {}))
    assert stored.losses == made.losses
    assert stored.rank.plan.memory.terms == made.rank.plan.memory.terms
    (frozen,) = [reason for reason in stored.rank.plan.why if reason.code == "frozen"]
    assert frozen.values["stored"] is True
    for name, tensor in stored.adapter().items():
        assert torch.equal(tensor, made.adapter()[name])
    reference, probe = Reference.read(stored.folder / "verify" / "adapter.json"), lab.new_path("probe")
    compute_probe(stored.rank.model, probe)
    found = verify(stored.folder / "adapter", reference, base=folder, probe_path=probe)
    assert found.findings == [] and any("logits of" in note for note in found.notes)
    with torch.no_grad():
        answers = load_model(ModelLocation(folder, stored.folder / "adapter"))(IDS).logits
        trained = stored.rank.model.eval()(IDS, use_cache=False).logits
    torch.testing.assert_close(answers, trained, rtol=1e-4, atol=1e-4)


def test_dora_beside_weights_that_had_bfloat16_is_verified(lab: Lab) -> None:
    """PEFT takes the lengths of rows from a weight that it dequantizes by itself."""
    folder = quantize(lab.folder / "model", lab.new_path("nf4"), dtype=torch.bfloat16)
    run = lab.export({"model.name": str(folder), "method.name": "qlora", "method.dora": True})
    reference, probe = Reference.read(run.folder / "verify" / "adapter.json"), lab.new_path("probe")
    compute_probe(run.rank.model, probe)
    found = verify(run.folder / "adapter", reference, base=folder, probe_path=probe)
    assert found.findings == [] and any("logits of" in note for note in found.notes)


def test_layers_that_the_files_keep_in_16_bits_stay_so(lab: Lab) -> None:
    folder = quantize(lab.folder / "model", lab.new_path("nf4"), llm_int8_skip_modules=["lm_head", "v_proj", "up_proj"])
    rank = lab.start({"model.name": str(folder), "method.name": "qlora"})
    in_4_bits = {name.rpartition(".")[2] for name in quantized_layers(rank.model)}
    assert in_4_bits == {"q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"}
    source = load_file(lab.folder / "model" / "model.safetensors")
    v_proj = Q_PROJ.replace("q_proj", "v_proj")
    assert torch.equal(rank.model.get_submodule(v_proj).weight, source[f"{v_proj}.weight"])
    held = sum(p.numel() * p.element_size() for p in rank.model.parameters())
    assert rank.plan.memory.terms["weights"] == held
    theirs = reopen(folder, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(rank.model.eval()(IDS, use_cache=False).logits, theirs(IDS).logits)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("shape", [(64, 64), (300, 250), (512, 256), (508, 75)], ids=str)
def test_every_shard_takes_its_own_rows(
    tmp_path: Path, shape: tuple[int, int], double: bool, storage: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are cut anywhere are together what a fill of the whole weight gives, padding included."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    packed, state = functional.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=double, quant_storage=storage
    )
    pieces = {f"w.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    save_file({"w": packed} | pieces, path := tmp_path / "model.safetensors")
    stored = find_stored_nf4({path: read_header(path)})[0]["w"]
    whole, taken = (Nf4Linear(torch.nn.Linear(shape[1], shape[0], bias=False), double) for _ in range(2))
    whole.fill(weight)
    num_rows = len(whole.weight_codes)
    cuts = [0, num_rows // 3, num_rows // 2, num_rows, num_rows]  # of the four shards one or more are empty
    for begin, end in itertools.pairwise(cuts):
        monkeypatch.setattr(stored_nf4, "local_slices", lambda _, rows=slice(begin, end): (rows,))
        take_stored(stored, taken.weight_codes[begin:end], taken.weight_statistics[begin:end])
    for name in Nf4Linear.weight_pieces:
        assert torch.equal(getattr(taken, name).view(torch.uint8), getattr(whole, name).view(torch.uint8))


def stored_model(lab: Lab) -> Path:
    """The model quantized, once for the tests that do not change it."""
    folder = lab.folder / "stored"
    return folder if folder.exists() else quantize(lab.folder / "model", folder)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"method.name": "lora"}, "method.name: lora cannot be combined with"),
        ({"method.name": "full"}, "method.name: full cannot be combined with"),
        ({"method.name": "qlora", "method.init": "loftq"}, "method.init: loftq"),
        ({"method.name": "qlora", "output.merge": True}, "output.merge: true"),
        ({"method.name": "qlora", "method.double_quant": False}, "method.double_quant: false"),
    ],
)
def test_what_needs_other_weights_is_refused(lab: Lab, keys: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        lab.prepare({"model.name": str(stored_model(lab))} | keys)


@pytest.mark.parametrize(
    ("quantization", "match"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"quantized \(gptq\)"),
        ({"quant_method": "awq", "bits": 4}, r"quantized \(awq\)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"bitsandbytes in 8 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "bitsandbytes in fp4"),
    ],
)
def test_other_quantizations_are_refused_by_name(lab: Lab, quantization: dict[str, Any], match: str) -> None:
    folder = lab.copy_model()
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=match):
        lab.prepare({"model.name": str(folder), "method.name": "qlora"})


@pytest.mark.parametrize("piece", ["absmax", "nested_absmax", "quant_map"])
def test_a_weight_with_a_missing_piece_is_refused(lab: Lab, piece: str) -> None:
    folder = quantize(lab.folder / "model", lab.new_path("nf4"))
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{Q_PROJ}.weight.{piece}"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{Q_PROJ}.weight cannot be read") as refused:
        lab.prepare({"model.name": str(folder), "method.name": "qlora"})
    assert f"{piece}: missing" in refused.value.why


def test_pieces_of_a_weight_may_lie_in_several_files(lab: Lab) -> None:
    folder = quantize(lab.folder / "model", lab.new_path("nf4"))
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = sorted(file.keys())
        parts = [{name: file.get_tensor(name) for name in names[start::2]} for start in (0, 1)]
    (folder / "model.safetensors").unlink()
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, tensors in zip(files, parts, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, tensors in zip(files, parts, strict=True) for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    split, whole = (
        lab.start({"model.name": str(path), "method.name": "qlora"}).model.get_submodule(Q_PROJ)
        for path in (folder, stored_model(lab))
    )
    assert isinstance(split, Nf4Linear) and torch.equal(split.weight, whole.weight)


def test_other_levels_than_those_of_nf4_are_refused(lab: Lab) -> None:
    folder = quantize(lab.folder / "model", lab.new_path("nf4"))
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{Q_PROJ}.weight.quant_map"][3] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="has other levels than NF4"):
        lab.start({"model.name": str(folder), "method.name": "qlora"})
