"""Written folders, opened by transformers' and PEFT's public API in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from manyhands.config.schema import MethodSection, ModelSection
from manyhands.core.errors import UserError
from manyhands.export.adapter import describe_adapter, export_adapter
from manyhands.export.model import export_model, split_shards
from manyhands.export.reference import Reference, hash_values
from manyhands.facts.adapter import belongs_to_nf4
from tests.export.tiny import METHOD, TEMPLATE, adapt, make_model, save_source

IDS = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("source"), make_model(seed=9))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_opens_with_the_saved_values_and_the_sources_names(source: Path, tmp_path: Path, dtype: str) -> None:
    model = make_model()
    reference = export_model(
        tmp_path / "model", model, source, dtype, rank=0, reference_path=tmp_path / "reference.json"
    )
    stored = load_file(tmp_path / "model" / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in load_file(source / "model.safetensors").items()}
    assert {name: tensor.shape for name, tensor in stored.items()} == shapes  # the tied head is not doubled
    assert reference == Reference.read(tmp_path / "reference.json")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert opened.dtype == getattr(torch, dtype)
    for name, parameter in model.named_parameters():
        assert torch.equal(opened.get_parameter(name), parameter.to(opened.dtype))
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == TEMPLATE
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert not any(key.startswith("_attn") for key in config)


@pytest.mark.parametrize("num_layers", [1, 4])
def test_an_adapter_is_described_in_time_linear_in_the_layers(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, walks = adapt(make_model(num_layers=num_layers)), []
    walk = model.named_modules
    monkeypatch.setattr(model, "named_modules", lambda *given, **keys: (walks.append(1), walk(*given, **keys))[1])
    describe_adapter(model, METHOD, "base")
    assert 0 < len(walks) < 24, "each walk sees all modules"


def test_large_models_are_split_with_an_index(source: Path, tmp_path: Path) -> None:
    model = make_model(tied=False)
    export_model(tmp_path / "model", model, source, "float32", rank=0, shard_bytes=100_000)
    files = sorted(p.name for p in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "model" / name).stat().st_size < 110_000 for name in files)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(opened.lm_head.weight, model.lm_head.weight)


def test_a_tensor_larger_than_a_file_may_be_has_its_own() -> None:
    assert split_shards({"a": 3, "b": 3, "c": 20, "d": 1}, 6) == [{"a", "b"}, {"c"}, {"d"}]


def test_the_runs_chat_template_replaces_the_sources(source: Path, tmp_path: Path) -> None:
    export_model(
        tmp_path / "model",
        make_model(),
        source,
        "float32",
        rank=0,
        asked=ModelSection(name="source", chat_template="{{ messages[0]['content'] }}"),
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == "{{ messages[0]['content'] }}"


def test_a_foreign_folder_is_never_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("ten years")
    with pytest.raises(UserError, match="the output folder is not empty"):
        export_model(tmp_path / "model", make_model(), source, "float32", rank=0)
    with pytest.raises(UserError, match="the output folder is not empty"):
        export_adapter(tmp_path / "model", adapt(make_model()), METHOD, "base", rank=0)
    assert (tmp_path / "model" / "thesis.txt").read_text() == "ten years"


def test_the_owner_replaces_its_folder(source: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        export_model(tmp_path / "model", make_model(seed=seed), source, "float32", rank=0, replace=True)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(opened.lm_head.weight, make_model(seed=1).lm_head.weight)


def test_what_float16_does_not_reach_is_named_and_nothing_is_written(source: Path, tmp_path: Path) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = -70_000.0
        model.model.norm.weight[3] = 65_504.0  # the largest that it has
    with pytest.raises(UserError, match="1 weights hold values that float16 does not reach") as error:
        export_model(tmp_path / "model", model, source, "float16", rank=0)
    assert error.value.details == ("model.layers.1.mlp.up_proj.weight: up to 70000",)
    assert "65504" in error.value.why and "bfloat16" in error.value.fix
    assert list(tmp_path.iterdir()) == []
    export_model(tmp_path / "model", model, source, "bfloat16", rank=0)

    adapted = adapt(make_model())
    with torch.no_grad():
        next(p for name, p in adapted.named_parameters() if "lora_B" in name)[0, 0] = 1e6
    with pytest.raises(UserError, match="float16 does not reach") as error:
        export_adapter(tmp_path / "adapter", adapted, METHOD, "base", rank=0, dtype="float16")
    assert "lora_B" in error.value.details[0] and not (tmp_path / "adapter").exists()


def test_what_was_written_by_hand_stays_when_the_owner_exports_again(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"

    def write(seed: int) -> None:
        export_model(
            folder, make_model(seed=seed), source, "float32", rank=0, replace=True, card=lambda: f"card {seed}"
        )

    write(0)
    write(1)
    assert (folder / "README.md").read_text() == "card 1", "one that nobody touched is written again"
    assert "kept" not in capsys.readouterr().out
    (folder / "README.md").write_text("my own words")
    (folder / "figures").mkdir()
    (folder / "figures" / "plot.txt").write_text("a plot")
    config = (folder / "generation_config.json").read_text()
    (folder / "generation_config.json").write_text("{}")
    for seed in (2, 3):
        write(seed)
        assert (folder / "README.md").read_text() == "my own words"
        assert (folder / "figures" / "plot.txt").read_text() == "a plot"
        assert (folder / "generation_config.json").read_text() == config
        assert (folder / "generation_config.json.old").read_text() == "{}"
        assert "generation_config.json as generation_config.json.old" in capsys.readouterr().out or seed == 3
    opened = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(opened.lm_head.weight, make_model(seed=3).lm_head.weight)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("q_proj", "down_proj"), ["down_proj", "q_proj"]),
        (("*.0.self_attn.q_proj",), ["model.layers.0.self_attn.q_proj"]),  # short names would reach layer 1 too
    ],
)
def test_target_modules_mean_exactly_the_adapted_layers(
    tmp_path: Path, targets: tuple[str, ...], expected: list[str]
) -> None:
    method = MethodSection(rank=2, alpha=3.5, target_modules=targets)
    base = save_source(tmp_path / "base", make_model())
    model = adapt(make_model(), method)
    export_adapter(tmp_path / "adapter", model, method, str(base), rank=0)
    files = ["adapter_config.json", "adapter_model.safetensors", "manyhands.json"]
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == files
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"] == expected
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(opened(IDS).logits, model.eval()(IDS).logits, rtol=1e-5, atol=1e-5)


def test_merging_equals_pefts_merge(tmp_path: Path) -> None:
    base = save_source(tmp_path / "base", make_model())
    model = adapt(make_model())
    export_adapter(tmp_path / "adapter", model, METHOD, str(base), rank=0)
    export_model(tmp_path / "merged", model, base, "float32", rank=0, merge=True)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    theirs = (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
        .merge_and_unload()
        .state_dict()
    )
    assert opened.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(opened[name], tensor, rtol=1e-6, atol=1e-6)
    assert not torch.equal(
        opened["model.layers.0.mlp.up_proj.weight"], model.get_parameter("model.layers.0.mlp.up_proj.weight")
    )


def test_hashes_are_of_the_values_not_of_the_layout() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    assert hash_values(matrix) == hash_values(matrix.t().contiguous().t())
    assert hash_values(matrix) != hash_values(matrix.reshape(3, 2).t())
    assert hash_values(matrix.bfloat16()) != hash_values(matrix.half())


def test_equal_adapters_have_equal_bytes_also_where_the_header_says_that_they_belong_to_4_bits(tmp_path: Path):
    method = METHOD.model_copy(update={"name": "qlora", "init": "loftq"})
    model = adapt(make_model())
    for index in range(12):  # two entries in an order left to chance would agree every second time
        export_adapter(tmp_path / str(index), model, method, "base", rank=0)
    written = {(tmp_path / str(index) / "adapter_model.safetensors").read_bytes() for index in range(12)}
    assert len(written) == 1 and belongs_to_nf4(tmp_path / "0")
    export_adapter(tmp_path / "plain", model, METHOD, "base", rank=0)
    found, plain = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("0", "plain"))
    assert found.keys() == plain.keys() and all(torch.equal(found[name], plain[name]) for name in plain)
