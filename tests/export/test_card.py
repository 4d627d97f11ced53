"""The model card: the hub reads its head, its lines of Python open the folder, and nothing of the data or of this
machine is in it.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bitsandbytes.nn import Linear4bit
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from peft import PeftConfig
from safetensors import safe_open

from manyhands.config.schema import RunConfig
from manyhands.export.__main__ import main
from manyhands.export.adapter import export_adapter, name_base
from manyhands.export.card import Card, find_license, name_on_hub, read_curve
from manyhands.export.push import LOCAL_PATH
from manyhands.facts.adapter import nf4_options
from manyhands.facts.types import Nf4Facts
from manyhands.training.types import Evaluation
from tests.export.test_export_command import logits, make_plan, make_run, verify_here
from tests.export.tiny import METHOD, adapt, make_model

__all__ = ["verify_here"]  # a fixture

FIELDS: dict[str, Any] = {
    "name": "helper",
    "model": {"name": "someone/base"},
    "data": {"train": "/home/me/private/rows.jsonl"},
}
SOURCES = [
    {
        "name": "rows",
        "hub": False,
        "weight": 1.0,
        "num_samples": 980,
        "num_tokens": 50_000,
        "num_validation_samples": 20,
    },
    {
        "name": "openai/gsm8k",
        "hub": True,
        "weight": 0.5,
        "num_samples": 7000,
        "num_tokens": 900_000,
        "num_validation_samples": 0,
    },
]
EVALUATIONS = [
    Evaluation(step, loss, {"perplexity": 2.0, "accuracy": 0.5}, 20, 700, 300, 1.0, (("a secret question", "x"),))
    for step, loss in ((0, 3.25), (7, 1.5))
]


def make_card(kind: Any = "adapter", **changes: Any) -> str:
    method = changes.pop("method", {"name": "lora", "rank": 4})
    config = RunConfig.model_validate(FIELDS | {"method": method} | changes.pop("config", {}))
    fields = {
        "data": SOURCES,
        "evaluations": EVALUATIONS,
        "versions": {"manyhands": "0.1.0", "torch": "2.13.0"},
        "has_tokenizer": False,
    }
    plan = make_plan(config, changes.pop("source", Path("nowhere")))
    card = Card(kind=kind, config=config, plan=plan, step=7, dtype="float32", opener="AutoModelForCausalLM", **fields)
    return dataclasses.replace(card, **changes).text()


def head(text: str) -> dict[str, Any]:
    return yaml.safe_load(text.split("---")[1])


def code(text: str) -> str:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]


@pytest.mark.parametrize(
    ("kind", "library", "relation"), [("adapter", "peft", "adapter"), ("merged", "transformers", "finetune")]
)
def test_the_hub_reads_its_head(tmp_path: Path, kind: str, library: str, relation: str) -> None:
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Base\nlicense: to kill\n")
    text = make_card(kind, source=tmp_path)
    read = ModelCard(text).data.to_dict()
    expected = {
        "base_model": "someone/base",
        "base_model_relation": relation,
        "library_name": library,
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
    }
    assert "pipeline_tag" not in head(make_card(kind, opener="AutoModelForImageTextToText"))
    assert read.items() >= (expected | {"datasets": ["openai/gsm8k"], "tags": ["manyhands", "sft", "lora"]}).items()


def test_it_says_on_what_how_and_with_which_result_and_nothing_private() -> None:
    text = make_card()
    for said in (
        "| rows | 980 | 50,000 | 1 |",
        "| method.rank | 4 |",
        "| optimizer.learning_rate | 0.001 |",
        "7 optimizer steps",
        "| before training | 3.2500 | 2 | 50.00% |",
        "| after step 7 | 1.5000 | 2 | 50.00% |",
        "20 held-out samples of rows (300 loss tokens). Nothing else was evaluated.",
        "A LoRA adapter for [someone/base](https://huggingface.co/someone/base), trained by supervised",
        "with manyhands 0.1.0 (torch 2.13.0). Saved in float32.",
    ):
        assert said in text, said
    assert "/home/me" not in text and "secret" not in text


def test_names_of_others_are_no_markup_and_no_code() -> None:
    attack = 'a"); import os #`\n```\n<img src=x onerror=alert(1)>[x](y)|\x1b[2J'
    config = {"model": {"name": f"folder/{attack.replace('/', '')}", "revision": attack}}
    sources = [SOURCES[0] | {"name": attack}]
    text = make_card(config=config, data=sources, divergence=attack, has_tokenizer=True)
    assert "\x1b" not in text and "onerror" in text
    shown = MarkdownIt("commonmark").enable("table").render(text.split("---\n", 2)[2])
    assert "<img" not in shown and "<a " not in shown and shown.count("<pre>") == 2
    script = next(token.content for token in MarkdownIt().parse(text) if token.info == "python")
    calls = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    revisions = [word.value.value for call in calls for word in call.keywords if word.arg == "revision"]  # type: ignore[attr-defined]
    assert revisions == [attack] and "import os" not in {ast.unparse(node) for node in ast.parse(script).body}
    command = next(token.content for token in MarkdownIt().parse(text) if token.info == "bash")
    words = shlex.split(command)
    assert words[:2] == ["vllm", "serve"] and words[3] == "--revision" and words[5] == "--enable-lora"
    folder = "/cache/models--a](b)--<img>/snapshots/0123abcd"
    assert name_on_hub("elsewhere/x", folder) != "a](b)/<img>"


def test_it_says_how_it_was_computed_and_how_the_loss_went(tmp_path: Path) -> None:
    """Of steps that were repeated after a resume, the last; none after those of these weights."""
    rows = [{"kind": "step", "step": n, "loss": 9.0, "grad_norm": 1.0, "learning_rate": 1e-4} for n in (1, 2)]
    rows += [
        {"kind": "step", "step": n, "loss": 4.0 - n / 10, "grad_norm": 0.5, "learning_rate": n * 1e-5}
        for n in range(1, 31)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in [*rows, {"kind": "evaluation"}]))
    curve = read_curve(tmp_path / "metrics.jsonl", 24)
    text = make_card(curve=curve)
    assert [point["step"] for point in curve] == list(range(2, 25, 2))
    for said in (
        "| 2 | 3.8500 | 0.5 | 2e-05 |",
        "| 24 | 1.6500 | 0.5 | 0.00024 |",
        "| layout | fsdp on 8 GPUs, activation checkpointing full |",
        "| versions | manyhands 0.1.0, torch 2.13.0 |",
        "Digest of the prepared samples: `",
        "7 steps, digest of the plan `",
    ):
        assert said in text, said
    assert "| 26 |" not in text and "9.0" not in text
    assert "Course of the training" not in make_card()


def test_how_vllm_serves_it_where_vllm_can() -> None:
    assert (
        "vllm serve someone/base --enable-lora --max-lora-rank 8 --lora-modules helper=path/to/this/folder"
        in make_card()
    )
    folder = make_card(config={"model": {"name": "/models/my base"}})
    assert "vllm serve 'path/to/my base' --enable-lora" in folder, "as a shell takes it"
    assert "vllm serve path/to/this/folder" in make_card("merged")
    for method in ({"name": "lora", "dora": True}, {"name": "qlora"}, {"name": "lora", "modules_to_save": ["lm_head"]}):
        assert "vllm" not in make_card(method=method)


@pytest.mark.parametrize("kind", ["adapter", "merged", "model"])
def test_the_card_of_a_model_of_images_shows_one_to_it(kind: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    opener = "AutoModelForImageTextToText"
    shown = code(make_card(kind, source=tmp_path, opener=opener))
    compile(shown, "card", "exec")
    place = '"someone/base"' if kind == "adapter" else "folder"
    assert f"processor = AutoProcessor.from_pretrained({place})" in shown
    assert "import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer" in shown
    assert "from PIL import Image" in shown and "processor.apply_chat_template(" in shown
    own = code(make_card(kind, source=tmp_path, opener=opener, has_tokenizer=True))
    assert ("processor.chat_template = tokenizer" in own) == (kind == "adapter")
    for plain in (make_card(kind, opener=opener), make_card(kind, source=tmp_path)):  # no processor, and text alone
        assert "Processor" not in code(plain)


def test_a_pinned_base_is_opened_at_its_revision() -> None:
    """Model, tokenizer and server: weights of another revision are not those beside which the adapter was trained."""
    text = make_card(config={"model": {"name": "someone/base", "revision": "v1"}})
    assert 'AutoTokenizer.from_pretrained("someone/base", revision="v1")' in text
    assert "vllm serve someone/base --revision v1 --enable-lora" in text


@pytest.mark.parametrize("kind", ["adapter", "merged", "model"])
def test_no_path_of_this_machine_is_in_it(tmp_path: Path, kind: str) -> None:
    """What `push` looks for as well: a model, data and a template by their paths."""
    model = {"name": str(tmp_path / "base"), "chat_template": str(tmp_path / "mine.jinja")}
    text = make_card(kind, source=tmp_path / "base", config={"model": model})
    assert LOCAL_PATH.findall(text) == [] and str(tmp_path) not in text


def test_what_is_not_known_is_not_claimed(tmp_path: Path) -> None:
    text = make_card(
        "model",
        evaluations=EVALUATIONS[:1],
        data=None,
        config={"model": {"name": str(tmp_path)}, "method": {"name": "full"}},
    )
    assert "These weights were not evaluated on held-out samples." in text and "3.25" not in text
    assert not {"base_model", "license", "datasets"} & head(text).keys()
    assert str(tmp_path) not in text and "Training data" not in text


def test_a_run_that_diverged_says_so() -> None:
    assert "**Training diverged: the loss is not finite.**" in make_card(divergence="the loss is not finite")
    assert "diverged" not in make_card()


def test_names_on_the_hub(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--someone--a-base" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for name, folder, expected in (
        (str(snapshot), snapshot, "someone/a-base"),
        ("someone/a-base", snapshot, "someone/a-base"),
        ("someone/base", tmp_path, "someone/base"),  # of a package, not of the cache
        ("gpt2", tmp_path, "gpt2"),
        (str(tmp_path), tmp_path, None),
        ("models/mine", tmp_path / "models" / "mine", None),  # relative to where the run was started, not to here
        ("./mine", tmp_path / "mine", None),
        ("../mine", tmp_path / "mine", None),
        ("~/mine", tmp_path / "mine", None),
    ):
        assert name_on_hub(name, str(folder)) == expected, name
        whole = name if expected == name else str(folder)
        assert name_base(name, str(folder)) == whole, name


def test_code_of_the_base_is_asked_for_where_the_run_asked_for_it() -> None:
    model = {"name": "someone/base", "trust_remote_code": True}
    for kind, count in (("adapter", 2), ("model", 2)):
        assert code(make_card(kind, config={"model": model})).count("trust_remote_code=True)") == count
        assert "trust_remote_code" not in code(make_card(kind))


@pytest.mark.parametrize(
    "text",
    ["", "license: mit\n", "---\nlicense: mit", "---\nlicense: [a, b]\n---\n", "---\nlicense:\n  evil: 1\n---\n"],
)
def test_a_license_is_taken_from_a_cards_head_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(text)
    assert find_license(tmp_path) == {}


@pytest.mark.parametrize("kind", ["lora", "full", "merged", "qlora"])
def test_its_lines_of_python_open_the_folder(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the newest checkpoint."""
    method = {"merged": "lora"}.get(kind, kind)
    run, models = make_run(tmp_path, method)
    assert main([str(run), "--output", str(tmp_path / "out"), *(["--merge"] if kind == "merged" else [])]) == 0
    opener = "AutoModelForCausalLM" if kind in ("full", "merged") else "PeftModel"
    assert f"reopened by {opener}" in capsys.readouterr().out
    text = (tmp_path / "out" / "README.md").read_text()
    lines = (
        code(text).replace("path/to/this/folder", str(tmp_path / "out")).replace("path/to/base", str(tmp_path / "base"))
    )
    found: dict[str, Any] = {}
    exec(lines, found)
    assert found["tokenizer"].chat_template
    if method != "qlora":
        torch.testing.assert_close(logits(found["model"]), logits(models[7]), rtol=1e-4, atol=1e-5)
        return
    layers = [module for module in found["model"].modules() if isinstance(module, Linear4bit)]
    assert len(layers) == 14 and all(layer.weight.quant_state.nested for layer in layers)
    assert "NF4 **with double quantization**" in text


def test_an_adapter_with_another_end_token_is_opened_with_its_own_tokenizer(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, "lora", model={"special_tokens": {"eos": "<|im_end|>"}})
    assert main([str(run), "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()
    assert 'AutoTokenizer.from_pretrained("path/to/this/folder")' in code((tmp_path / "out" / "README.md").read_text())


def test_an_adapter_beside_nf4_says_so_where_programs_look_and_peft_opens_it_without_a_word(tmp_path: Path) -> None:
    for name, options in (
        ("lora", {}),
        ("qlora", {}),
        ("loftq", {"init": "loftq"}),
        ("single", {"double_quant": False}),
    ):
        method = METHOD.model_copy(update={"name": "lora" if name == "lora" else "qlora", **options})
        export_adapter(tmp_path / name, adapt(make_model()), method, "someone/base", rank=0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opened = PeftConfig.from_pretrained(str(tmp_path / name))
        with safe_open(tmp_path / name / "adapter_model.safetensors", "pt") as file:
            metadata = file.metadata()
        mapping = json.loads((tmp_path / name / "adapter_config.json").read_text())["auto_mapping"]
        assert opened.auto_mapping == mapping
        if name == "lora":
            assert mapping is None and "base_quantization" not in metadata
            continue
        assert mapping["base_model_class"] == "LlamaForCausalLM" and mapping["parent_library"].startswith(
            "transformers."
        )
        assert mapping["base_quantization"] == nf4_options(double_quant=name != "single")
        assert metadata["base_quantization"] == ("nf4" if name == "single" else "nf4, double quantization")
        assert ("base" in metadata) == (name == "loftq")


def test_loftq_is_said_to_be_wrong_beside_16_bits() -> None:
    assert "wrong beside weights in 16 bits" in make_card(method={"name": "qlora", "init": "loftq"})
    assert "16 bits" not in make_card(method={"name": "qlora"})


def test_the_card_opens_the_base_as_it_was_trained_beside() -> None:
    """Quantized on the fly with the run's own option, or, where its files hold it in 4 bits, as it is."""
    single = make_card(method={"name": "qlora", "double_quant": False})
    assert "without double quantization" in single and "bnb_4bit_use_double_quant=False" in code(single)
    config = RunConfig.model_validate(FIELDS | {"method": {"name": "qlora"}})
    stored = {"stored_nf4": Nf4Facts(double_quant=True, linears=("self_attn.q_proj",))}
    card = make_card(method={"name": "qlora"}, plan=make_plan(config, Path("nowhere")).model_copy(update=stored))
    assert "as the base's files hold them" in card and "BitsAndBytesConfig" not in code(card)
