"""``--engine vllm`` in an environment that has vLLM and what manyhands needs: the answers of transformers, greedy."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.core.errors import UserError
from manyhands.export.adapter import export_adapter
from manyhands.infer.batch import answer_file
from manyhands.infer.load import ModelLocation
from manyhands.infer.replicas import Placement
from manyhands.infer.settings import GenerationSettings
from manyhands.infer.vllm import refuse_adapter
from tests.export.tiny import METHOD, adapt
from tests.support.tiny import write_tiny_model

PYTHON = os.environ.get("MANYHANDS_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
PROMPTS = ["alpha beta", "gamma delta epsilon, and what follows", "Why?"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(PYTHON is None, reason="MANYHANDS_VLLM_PYTHON names no interpreter with vLLM")
def test_vllm_gives_the_same_greedy_answers_with_and_without_an_adapter(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    write_tiny_model(base, "llama", head_dim=32)  # vLLM's CPU kernels know no narrower one
    export_adapter(tmp_path / "adapter", adapt(AutoModelForCausalLM.from_pretrained(base)), METHOD, str(base), rank=0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    settings = GenerationSettings(max_new_tokens=12, stop=("zz",))
    found = {}
    for name in ("base", "adapter"):
        ours = tmp_path / f"{name}.jsonl"
        answer_file(tmp_path / name, prompts, ours, settings, base=None if name == "base" else str(base))
        theirs = tmp_path / f"{name}-vllm.jsonl"
        request = {
            "folder": str(tmp_path / name),
            "input": str(prompts),
            "output": str(theirs),
            "base": None if name == "base" else str(base),
            "settings": settings.to_json(),
            "placement": {"engine": "vllm"},
        }
        environ = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [str(PYTHON), "-m", "manyhands.infer", "generate", json.dumps(request)],
            env=environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-8000:]
        assert theirs.read_text() == ours.read_text()
        found[name] = ours.read_text()
    assert found["base"] != found["adapter"]


def test_without_vllm_the_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.infer.vllm.find_spec", lambda name: None)
    write_tiny_model(tmp_path / "base", "llama")
    with pytest.raises(UserError, match="vLLM is not installed") as refused:
        engine = Placement(engine="vllm")
        answer_file(
            tmp_path / "base", tmp_path / "p.jsonl", tmp_path / "a.jsonl", GenerationSettings(), placement=engine
        )
    assert refused.value.where == "--engine vllm" and "pip install vllm" in refused.value.fix


def test_an_adapter_that_vllm_does_not_take_is_refused_before_it_starts(tmp_path: Path) -> None:
    fields = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "modules_to_save": ["lm_head"],
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match="vLLM does not take this adapter") as refused:
        refuse_adapter(ModelLocation(tmp_path, tmp_path))
    assert "modules_to_save" in refused.value.why and "--merge" in refused.value.fix
