"""Effects of ``model.*`` and ``method.*``: which weights, in which dtype, and which of them are trained."""

from __future__ import annotations

import io
import json
import re
import shutil
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, dynamic_module_utils

from manyhands.convert.fp8 import fp8_layers
from manyhands.convert.lora import adapted_layers
from manyhands.core.errors import UserError
from manyhands.export.reference import Reference
from manyhands.export.verify import verify
from manyhands.importers.load import load_config
from manyhands.model.weights import quantized_layers
from tests.keys.lab import Lab, LabRank
from tests.support import toy
from tests.support.tiny import write_tiny_model

Q_PROJ = "model.layers.0.self_attn.q_proj"


def name(lab: Lab) -> None:
    other = write_tiny_model(lab.folder / "other-model", num_hidden_layers=1, seed=1)
    weights = [
        lab.start({"model.name": str(folder)}).model.get_parameter(f"{Q_PROJ}.weight")
        for folder in (lab.folder / "model", other)
    ]
    assert not torch.equal(*weights)


def revision(lab: Lab) -> None:
    asked = []

    def snapshot_download(repo: str, revision: str | None = None, **_: Any) -> str:
        asked.append((repo, revision))
        return str(lab.folder / "model")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        prepared = lab.prepare({"model.name": "someone/some-model", "model.revision": "v2"})
        lab.prepare({"model.name": "someone/some-model"})
    assert asked == [("someone/some-model", "v2"), ("someone/some-model", None)]
    assert prepared.plan.model_folder == str(lab.folder / "model")


def init(lab: Lab) -> None:
    """New weights need no weight files, and are not the files' where there are some."""
    drawn, loaded = (
        lab.start({"model.init": init}).model.get_parameter(f"{Q_PROJ}.weight") for init in ("random", "pretrained")
    )
    assert not torch.equal(drawn, loaded)
    folder = lab.copy_model()
    (folder / "model.safetensors").unlink()
    assert torch.equal(
        drawn, lab.start({"model.name": str(folder), "model.init": "random"}).model.get_parameter(f"{Q_PROJ}.weight")
    )
    with pytest.raises(UserError, match="weights"):
        lab.prepare({"model.name": str(folder)})


def dtype(lab: Lab) -> None:
    for asked in ("float32", "bfloat16", "float64"):
        rank = lab.start({"model.dtype": asked})
        logits = rank.engine.logits({"input_ids": torch.arange(5)[None]})
        assert logits.dtype == getattr(torch, asked)
        trained = {p.dtype for p in rank.model.parameters() if p.requires_grad}
        assert trained == {torch.float64 if asked == "float64" else torch.float32}  # masters


def master_dtype(lab: Lab) -> None:
    """Trained weights, optimizer states and what is saved are in this dtype, or an error says why not."""
    full = {"method.name": "full", "model.dtype": "bfloat16", "stop.max_steps": 3}
    for asked in ("bfloat16", "float32"):
        ran = lab.export({**full, "model.master_dtype": asked})
        states = [value for state in ran.rank.engine.optimizer.state.values() for value in state.values() if value.ndim]
        assert {tensor.dtype for tensor in (*ran.rank.model.parameters(), *states)} == {getattr(torch, asked)}
        assert ran.losses[-1] < ran.losses[0]
        saved = load_file(ran.folder / "model" / "model.safetensors")
        assert {str(tensor.dtype) for tensor in saved.values()} == {
            "torch.bfloat16" if asked == "bfloat16" else "torch.float32"
        }
    narrow = {**full, "model.master_dtype": "bfloat16"}
    alone = lab.run(narrow).losses
    for offload in ("optimizer", "all"):  # updated from host memory, to the same bits
        assert lab.run({**narrow, "parallel.offload": offload}).losses == alone
    for key, value in {
        "method.name": "lora",
        "model.dtype": "float32",
        "optimizer.name": "muon",
    }.items():
        with pytest.raises(UserError, match=re.escape(f"{key} is {value}")):
            lab.prepare({**narrow, key: value})


def chat_template(lab: Lab) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    keys = {"model.chat_template": template, "stop.max_steps": 1, "method.name": "full"}
    ran = lab.export(keys)
    assert ran.prompt_of(0).startswith("[user]") and "[assistant]" in ran.prompt_of(0)
    assert (ran.folder / "model" / "chat_template.jinja").read_text() == template


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).touch()
class MadeUpConfig(LlamaConfig):
    model_type = "made-up"
class MadeUpModel(LlamaForCausalLM):
    config_class = MadeUpConfig
"""


def converters(lab: Lab) -> None:
    """A class of the user's, in a module or a file next to the run file, changes the model; what is none is refused."""
    down_proj = f"{toy.LAYER}.down_proj.weight"
    plain, scaled = (
        lab.start({"method.name": "full", "model.converters": names}).model.get_parameter(down_proj)
        for names in ((), ["tests.support.toy:Scale"])
    )
    assert torch.equal(plain * toy.FACTOR, scaled)
    folder = lab.new_path("with-code")
    folder.mkdir()
    (folder / "mine.py").write_text("from tests.support.toy import Scale\n")
    (folder / "run.yaml").write_text("{model: {name: m, converters: ['mine.py:Scale']}, data: {train: x.jsonl}}")
    (reference,) = load_config(folder / "run.yaml").model.converters
    assert reference == f"{folder}/mine.py:Scale"
    assert torch.equal(
        lab.start({"method.name": "full", "model.converters": [reference]}).model.get_parameter(down_proj), scaled
    )
    with pytest.raises(UserError, match="is not a converter"):
        lab.prepare({"model.converters": ["json:dumps"]})


def trust_remote_code(lab: Lab) -> None:
    """Code that comes with a model is refused, or runs in training; verification never runs it."""
    folder, mark = lab.copy_model(), lab.new_path("the-code-ran")
    (folder / "made_up.py").write_text(CODE.format(mark=str(mark)))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "made-up",
        "architectures": ["MadeUpModel"],
        "auto_map": {"AutoConfig": "made_up.MadeUpConfig", "AutoModelForCausalLM": "made_up.MadeUpModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    keys = {"model.name": str(folder)}
    with pytest.raises(UserError, match="trust_remote_code"):
        lab.start(keys)
    assert not mark.exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(lab.new_path("modules")))
        keys |= {
            "data.packing": False,
            "batch.micro_samples": 8,
        }  # else the probe of packing runs the code before training does
        ran = lab.export(keys | {"model.trust_remote_code": True, "method.name": "full", "stop.max_steps": 1})
    assert mark.exists() and type(ran.rank.model).__name__ == "MadeUpModel"
    mark.unlink()
    found = verify(ran.folder / "model", Reference.read(ran.folder / "verify" / "model.json"))
    assert found.findings == [] and "code of its own" in found.notes[-1] and not mark.exists()


def method(lab: Lab) -> None:
    full, lora = lab.start({"method.name": "full"}).model, lab.base.rank.model
    assert all(p.requires_grad for p in full.parameters())
    assert {n.split(".lora_")[0] for n, p in lora.named_parameters() if p.requires_grad} == set(
        adapted_layers(lab.base.rank.model)
    )
    assert (lab.export({"method.name": "full", "stop.max_steps": 1}).folder / "model" / "model.safetensors").exists()
    assert (lab.export({}).folder / "adapter" / "adapter_model.safetensors").exists()
    patterns = lab.start({"method.name": "patterns"}).model
    assert all(p.requires_grad for p in patterns.parameters())
    qlora = lab.start({"method.name": "qlora"})
    assert (
        sorted(quantized_layers(qlora.model))
        == sorted(adapted_layers(qlora.model))
        == sorted(adapted_layers(lab.base.rank.model))
    )


def parts(lab: Lab) -> None:
    """The language model's part is the method where none is named; test_parts.py has the states of the others."""
    full = lab.start({"method.parts": {"language": "full"}, "method.rank": 16, "method.alpha": 32.0}).model  # defaults
    assert all(p.requires_grad for p in full.parameters())
    with pytest.raises(UserError, match="is a text model"):
        lab.prepare({"method.parts": {"vision": "trained"}})


def trained_names(rank: LabRank) -> list[str]:
    return [name.removeprefix("model.layers.0.") for name, p in rank.model.named_parameters() if p.requires_grad]


def train(lab: Lab) -> None:
    """What is named moves, what is not is saved as it was."""
    ran = lab.export({"method.name": "patterns", "method.train": ["q_proj", "input_layernorm.weight"]})
    assert trained_names(ran.rank) == ["self_attn.q_proj.weight", "input_layernorm.weight"]
    saved, source = (load_file(folder / "model.safetensors") for folder in (ran.folder / "model", lab.folder / "model"))
    moved = [name for name, tensor in source.items() if not torch.equal(tensor, saved[name])]
    assert saved.keys() == source.keys() and sorted(moved) == [
        "model.layers.0.input_layernorm.weight",
        f"{Q_PROJ}.weight",
    ]


def freeze(lab: Lab) -> None:
    rank = lab.start({"method.name": "patterns", "method.train": ["self_attn"], "method.freeze": ["re:.*[kvo]_proj"]})
    assert trained_names(rank) == ["self_attn.q_proj.weight"]
    assert rank.plan.memory.terms["gradients"] == 4 * 64 * 64


def rank(lab: Lab) -> None:
    sides = lab.start({"method.rank": 3}).model.get_submodule(Q_PROJ)
    assert (sides.lora_A.weight.shape[0], sides.lora_B.weight.shape[1]) == (3, 3)


def alpha(lab: Lab) -> None:
    """B is zero at first: alpha shows after the first update."""
    louder = lab.run({"method.alpha": 32.0})
    assert louder.losses[0] == lab.base.losses[0] and louder.losses[1] != lab.base.losses[1]
    assert louder.column("grad_norm")[0] == pytest.approx(4 * lab.base.column("grad_norm")[0], rel=1e-4)


def dropout(lab: Lab) -> None:
    ran = lab.run({"method.dropout": 0.5})
    assert ran.losses[0] == lab.base.losses[0]
    assert ran.column("grad_norm")[0] != lab.base.column("grad_norm")[0]


def new_tokens(lab: Lab) -> None:
    rank = lab.start({"model.new_tokens": ["<a>", "<b>"]})
    assert rank.tokenizer.encode("<b>x<a>", add_special_tokens=False) == [261, 87, 260]
    embedding = rank.model.get_input_embeddings()
    assert embedding.weight.shape[0] == 262 and embedding.trainable_tokens_delta.shape == (2, 64)
    ran = lab.export({"model.new_tokens": ["<a>"], "method.name": "full", "stop.max_steps": 1})
    assert json.loads((ran.folder / "model" / "config.json").read_text())["vocab_size"] == 261


def special_tokens(lab: Lab) -> None:
    """A known token and one that is added: texts end with the asked one, which is trained; both are exported."""
    keys = {"task": "cpt", "method.name": "full", "stop.max_steps": 1}
    keys["data.train"] = lab.write_rows("prose.jsonl", [{"text": "alpha beta"}] * 30 + [{"text": "gamma"}] * 30)
    ran = lab.export({**keys, "model.special_tokens": {"eos": "<|endoftext|>", "unk": "<new>"}})
    plain = lab.run(keys)
    for run, end in ((ran, "<|endoftext|>"), (plain, "<|im_end|>")):
        sample = run.rank.store.train.sample(0)
        assert run.rank.tokenizer.decode(sample["tokens"][-1:]) == end and sample["mask"][-1]
    assert ran.rank.model.get_input_embeddings().weight.shape[0] == 261  # <new> is one more
    saved = AutoTokenizer.from_pretrained(ran.folder / "model")
    assert (saved.eos_token, saved.unk_token, saved.unk_token_id) == ("<|endoftext|>", "<new>", 260)
    stops = json.loads((ran.folder / "model" / "generation_config.json").read_text())["eos_token_id"]
    assert saved.eos_token_id in stops


def rslora(lab: Lab) -> None:
    assert lab.start({"method.rslora": True}).model.get_submodule(Q_PROJ).scaling == 8.0 / 4**0.5
    assert lab.base.rank.model.get_submodule(Q_PROJ).scaling == 8.0 / 4


def dora(lab: Lab) -> None:
    layer = lab.start({"method.dora": True}).model.get_submodule(Q_PROJ)
    assert layer.lora_magnitude_vector is not None and torch.equal(
        layer.lora_magnitude_vector, layer.weight.norm(dim=1)
    )
    assert not any("magnitude" in name for name, _ in lab.base.rank.model.named_parameters())


def balance(lab: Lab) -> None:
    """A term of its own in steps and evaluations, by its coefficient; a dense model has nothing to balance."""
    folder = write_tiny_model(lab.new_path("mixture"), "qwen3_moe", num_hidden_layers=1)
    losses = {}
    for coefficient in (0.0, 0.5):
        ran = lab.run({"model.name": str(folder), "moe.balance": coefficient, "stop.max_steps": 2})
        losses[coefficient], (terms, *_) = ran.losses[0], ran.column("terms")
        assert ran.column("figures")[0].keys() == {"idle_experts", "largest_load"}
        assert "balance" in ran.column("terms", "evaluation")[0] if coefficient else not terms
    assert losses[0.5] == pytest.approx(losses[0.0] + 0.5 * terms["balance"], rel=1e-5) and terms["balance"] > 1
    with pytest.raises(UserError, match="has no experts to balance"):
        lab.prepare({"moe.balance": 0.1})


def neftune_alpha(lab: Lab) -> None:
    """Noise in training alone, and the same again where a run resumes."""
    keys = {"checkpoint.every_steps": 2, "method.neftune_alpha": 10.0}
    noisy, plain = lab.run(keys), lab.run({"checkpoint.every_steps": 2})
    assert all(abs(one - other) > 1e-4 for one, other in zip(noisy.losses, plain.losses, strict=True))
    assert noisy.column("loss", "evaluation")[0] == plain.column("loss", "evaluation")[0]  # before the first step
    rank = noisy.rank
    shutil.rmtree(rank.folder.checkpoints / "step-000005")
    rank.restart()
    assert rank.state.step == 4 and lab.train(rank).losses == noisy.losses


def method_init(lab: Lab) -> None:
    """loftq takes up a part of what NF4 loses, and says how much; a resumed run has its factors."""
    weight = load_file(lab.folder / "model" / "model.safetensors")[f"{Q_PROJ}.weight"]
    left = {}
    for asked in ("zero", "loftq"):
        rank = lab.start({"method.name": "qlora", "method.init": asked, "stop.max_steps": 2})
        rank.resume()
        layer = rank.model.get_submodule(Q_PROJ)
        left[asked] = float(
            (weight - layer.weight - layer.scaling * layer.lora_B.weight @ layer.lora_A.weight).detach().norm()
        )
        assert said_of_factors(rank) == (asked == "loftq")
    assert left["loftq"] < 0.95 * left["zero"]
    begun = layer.lora_B.weight.detach().clone()
    lab.train(rank)  # saves its last step
    trained = layer.lora_B.weight.detach().clone()
    rank.restart()
    resumed = rank.model.get_submodule(Q_PROJ).lora_B.weight
    assert torch.equal(resumed, trained) and not torch.equal(resumed, begun) and said_of_factors(rank) == 1


def double_quant(lab: Lab) -> None:
    """Scales of blocks in 8 bits or in float32: what layers hold, what the plan counts, and where training begins."""
    ran = {asked: lab.run({"method.name": "qlora", "method.double_quant": asked}) for asked in (True, False)}
    row_bytes = {
        asked: one.rank.model.get_submodule(Q_PROJ).weight_statistics.view(torch.uint8).shape[1]
        for asked, one in ran.items()
    }
    assert row_bytes == {True: 264, False: 1024}
    num_rows = sum(len(layer.weight_codes) for layer in quantized_layers(ran[True].rank.model).values())
    planned = {asked: one.rank.plan.memory.terms["weights"] for asked, one in ran.items()}
    assert planned[False] - planned[True] == num_rows * (1024 - 264)
    assert ran[True].losses[0] != ran[False].losses[0]
    assert lab.run({"method.name": "qlora"}).losses == ran[True].losses
    written = lab.export({"method.name": "qlora", "method.double_quant": False})
    reference = Reference.read(written.folder / "verify" / "adapter.json")
    found = verify(written.folder / "adapter", reference, base=lab.folder / "model")
    assert found.findings == [] and reference.base == "nf4_single"


def frozen_dtype(lab: Lab) -> None:
    """fp8 values alone in the blocks: what is held and planned, where training begins, and what is verified."""
    fp8 = {"kernels.linear": "fp8"}
    ran = {asked: lab.run(fp8 | {"model.frozen_dtype": asked}) for asked in ("auto", "fp8")}
    weights = {asked: one.rank.plan.memory.terms["weights"] for asked, one in ran.items()}
    layers = fp8_layers(ran["fp8"].rank.model).values()
    num_values, num_outputs = sum(x.in_features * x.out_features for x in layers), sum(x.out_features for x in layers)
    # beside float32 weights there are two more bytes a value, quantized once
    assert weights["auto"] - weights["fp8"] == (4 + 2 - 1) * num_values - 4 * num_outputs
    assert {layer.operand.dtype for layer in layers} == {torch.float8_e4m3fn}
    begun = [ran[asked].rows("evaluation")[0]["loss"] for asked in ran]
    assert begun[0] != begun[1] and begun[0] == pytest.approx(begun[1], rel=1e-2)
    written = lab.export(fp8 | {"model.frozen_dtype": "fp8"})
    reference = Reference.read(written.folder / "verify" / "adapter.json")
    assert reference.base == "fp8"
    assert verify(written.folder / "adapter", reference, base=lab.folder / "model").findings == []
    against = {
        "kernels.linear": "compute_dtype",
        "method.name": "full",
        "parallel.strategy": "fsdp",
        "output.merge": True,
    }
    for other in against.items():
        with pytest.raises(UserError, match=r"model\.frozen_dtype: fp8 and this"):
            lab.run(fp8 | {"model.frozen_dtype": "fp8"} | dict([other]))


def said_of_factors(rank: LabRank) -> int:
    assert isinstance(rank.terminal, io.StringIO)
    return rank.terminal.getvalue().count("of the squared quantization error of NF4 is made up for")


def modules_to_save(lab: Lab) -> None:
    ran = lab.export({"method.modules_to_save": ["embed_tokens"], "stop.max_steps": 1})
    assert ran.rank.model.get_input_embeddings().weight.requires_grad
    assert "base_model.model.model.embed_tokens.weight" in ran.adapter() and len(lab.export({}).adapter()) == 14


def adapter(lab: Lab) -> None:
    """The factors are those of the run that is named, before the first step."""
    finished = lab.export({})
    factors = lab.start({"method.adapter": str(finished.folder)}).model.get_submodule(Q_PROJ)
    assert torch.equal(factors.lora_B.weight, finished.adapter()[f"base_model.model.{Q_PROJ}.lora_B.weight"])
    assert factors.lora_B.weight.any()


def target_modules(lab: Lab) -> None:
    assert list(adapted_layers(lab.start({"method.target_modules": ["q_proj"]}).model)) == [Q_PROJ]
    assert len(adapted_layers(lab.base.rank.model)) == 7  # all linear layers of the one block
    ran = lab.export({"method.target_modules": "peft-default", "stop.max_steps": 1})
    assert list(adapted_layers(ran.rank.model)) == [Q_PROJ, Q_PROJ.replace("q_proj", "v_proj")]
    assert ran.rank.plan.memory.terms["gradients"] == 4 * sum(
        p.numel() for p in ran.rank.model.parameters() if p.requires_grad
    )
    written = json.loads((ran.folder / "adapter" / "adapter_config.json").read_text())
    assert sorted(written["target_modules"]) == ["q_proj", "v_proj"]
