"""GGUF files: written by llama.cpp's own tools; a file with other tensors than the model is reported and not kept.
`MANYHANDS_LLAMA_CPP=path/to/llama.cpp` runs the real ones too.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from manyhands.core.errors import UserError
from manyhands.export import gguf_file
from manyhands.export.__main__ import main
from manyhands.export.gguf_file import QUANTIZED, compare_names, find_tools
from manyhands.export.record import read_record
from tests.export import fake_llama_cpp
from tests.export.test_export_command import make_run, verify_here
from tests.export.tiny import make_model, save_source

__all__ = ["verify_here"]  # a fixture

LLAMA_CPP = os.environ.get("MANYHANDS_LLAMA_CPP", "")
SMOLLM2 = os.environ.get("MANYHANDS_SMOLLM2", "")


@pytest.fixture
def llama_cpp(tmp_path: Path) -> Path:
    """A folder with the script that stands for llama.cpp's."""
    (tmp_path / "llama.cpp").mkdir()
    shutil.copy(fake_llama_cpp.__file__, tmp_path / "llama.cpp" / "convert_hf_to_gguf.py")
    return tmp_path / "llama.cpp"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("source"), make_model(tied=False))


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("", []),
        ("missing", ["blk.1.ffn_up.weight is missing"]),
        ("extra", ["blk.0.attn_sinks.weight is extra: the model has no such tensor"]),
    ],
)
def test_a_file_has_the_models_tensors(source: Path, tmp_path: Path, fault: str, expected: list[str]) -> None:
    fake_llama_cpp.convert(source, tmp_path / "file.gguf", "q8_0", [fault])
    assert compare_names(tmp_path / "file.gguf", source)[1] == expected


def test_a_run_becomes_one_file_with_its_card(
    tmp_path: Path, llama_cpp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an adapter's run the merged model; nothing but the folder that was asked for is left."""
    run, _ = make_run(tmp_path, "lora")
    before = sorted(path.name for path in run.iterdir())
    command = [str(run), "--output", str(run / "gguf"), "--gguf", "q8_0", "--llama-cpp", str(llama_cpp)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "20 tensors, all of the model's by name" in said
    assert sorted(path.name for path in (run / "gguf").iterdir()) == ["README.md", "manyhands.json", "tiny-q8_0.gguf"]
    assert sorted(path.name for path in run.iterdir()) == sorted([*before, "gguf"])
    card = (run / "gguf" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "gguf"
    assert "llama-cli -m tiny-q8_0.gguf" in card and "from_pretrained" not in card
    record = read_record(run / "gguf")
    assert record is not None and "20 tensors" in record.verified
    assert main(command) == 0 and capsys.readouterr().out.startswith("already there, verified: "), "not written twice"


def test_a_models_folder_is_converted_as_it_is(
    source: Path, tmp_path: Path, llama_cpp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = llama_cpp / "convert_hf_to_gguf.py"
    command = [str(source), "--output", str(tmp_path / "out"), "--gguf", "f16", "--llama-cpp", str(script)]
    assert main([*command, "--dtype", "float16"]) == 2
    assert "--dtype is for checkpoints" in capsys.readouterr().err
    assert main(command) == 0
    assert (tmp_path / "out" / f"{source.name}-f16.gguf").is_file()
    capsys.readouterr()
    assert main(command) == 0 and capsys.readouterr().out.startswith("already there, verified: ")
    changed = tmp_path / "changed"
    shutil.copytree(source, changed)
    (changed / "generation_config.json").write_text("{}")
    assert main([str(changed), *command[1:]]) == 2, "the file is of another model"
    assert "the output folder is not empty" in capsys.readouterr().err


def test_a_file_that_is_not_the_model_is_not_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], llama_cpp: Path
) -> None:
    def spoil(model: Path, file: Path, kind: str, tools: object) -> None:
        fake_llama_cpp.convert(model, file, kind, ["missing"])

    monkeypatch.setattr(gguf_file, "_convert", spoil)
    command = [str(source), "--output", str(tmp_path / "out"), "--gguf", "bf16", "--llama-cpp", str(llama_cpp)]
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "the GGUF file does not have the tensors" in said and "blk.1.ffn_up.weight is missing" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama.cpp"]


def test_what_the_converter_says_is_shown(
    source: Path, tmp_path: Path, llama_cpp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last lines, what to install where a module is missing; and it sees no secrets."""
    shutil.copytree(source, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"unknown": True}))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    command = [str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--gguf", "f16", "--llama-cpp"]
    assert main([*command, str(llama_cpp)]) == 1
    assert "Model TinyForCausalLM is not supported" in capsys.readouterr().err
    script = tmp_path / "convert.py"
    script.write_text("import os, sentencepeace.model")
    assert main([*command, str(script)]) == 1
    assert "fix: pip install sentencepeace" in capsys.readouterr().err
    script.write_text("import os; print('token:', os.environ.get('HF_TOKEN')); raise SystemExit(3)")
    assert main([*command, str(script)]) == 1
    assert "why: token: None" in capsys.readouterr().err


def test_tools_that_are_not_there_are_named(tmp_path: Path, llama_cpp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for path, kind, text, fix in (
        (None, "q8_0", "llama.cpp's converter is not on PATH", "--llama-cpp"),
        (tmp_path / "nowhere", "q8_0", "llama.cpp's converter is not there", "git clone"),
        (llama_cpp, "q9", "'q9' is not a supported GGUF type", "q4_k_m"),
        (llama_cpp, "q4_k_m", "q4_k_m needs llama-quantize", "cmake --build"),
    ):
        with pytest.raises(UserError, match=text) as error:
            find_tools(path, kind)
        assert fix in error.value.fix and error.value.where
    quantizer = llama_cpp / "build" / "bin" / "llama-quantize"
    quantizer.parent.mkdir(parents=True)
    quantizer.touch(mode=0o755)
    tools = find_tools(llama_cpp, "q4_k_m")
    assert tools.converter[0] == sys.executable and tools.quantizer == (str(quantizer),)
    (tmp_path / "convert_hf_to_gguf.py").touch(mode=0o755)
    assert find_tools(None, "f16").converter == (str(tmp_path / "convert_hf_to_gguf.py"),)


def test_code_of_the_models_own_is_not_run(
    source: Path, tmp_path: Path, llama_cpp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(source, tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "evil.Tokenizer"}}')
    command = [str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--gguf", "f16"]
    assert main([*command, "--llama-cpp", str(llama_cpp)]) == 2
    assert "would run this model's own code" in capsys.readouterr().err


def test_towers_have_no_place_in_it(
    source: Path, tmp_path: Path, llama_cpp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(source, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"vision_config": {"depth": 2}}))
    command = [str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--gguf", "f16"]
    assert main([*command, "--llama-cpp", str(llama_cpp)]) == 2
    assert "vision_config" in (said := capsys.readouterr().err) and "--mmproj" in said


# ---- llama.cpp's own -------------------------------------------------------------------------------------------------

needs_llama_cpp = pytest.mark.skipif(
    not (LLAMA_CPP and SMOLLM2),
    reason="MANYHANDS_LLAMA_CPP (its folder, with build/bin/llama-quantize) or MANYHANDS_SMOLLM2 not set",
)
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 49152,
    "initializer_range": 0.05,
}
FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "llama with the rotation of 3.1": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        }
    },
    "mistral": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    "gemma3_text": {},
    "granite": {},
    "olmo2": {},
    "smollm3": {"pad_token_id": 2},
}


def save_tiny(folder: Path, family: str) -> Path:
    """A random model of the family with SmolLM2's tokenizer, whose pre-tokenizer llama.cpp knows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split()[0], **SHAPE | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (Path(SMOLLM2) / name).is_file():
            shutil.copy(Path(SMOLLM2) / name, folder)
    return folder


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"), [*((family, "f32") for family in FAMILIES), *(("llama", kind) for kind in QUANTIZED)]
)
def test_llama_cpps_own_tools(family: str, kind: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", family)
    gguf_file._convert(source, tmp_path / "file.gguf", kind, find_tools(Path(LLAMA_CPP), kind))
    assert compare_names(tmp_path / "file.gguf", source)[1] == []
