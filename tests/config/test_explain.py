"""Keys in words, for people and editors."""

from __future__ import annotations

import re

import pytest
import yaml

from manyhands.cli.config import config as show_key
from manyhands.config.keys import all_keys, commented_yaml, explain, json_schema, sections, table
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.importers.hints import hint, nearest
from manyhands.importers.load import load_config
from manyhands.importers.names import KEYS, NOTES, VALUES


def test_every_key_has_a_sentence():
    for key in all_keys():
        sentence = table()[key].sentence
        assert len(sentence.split()) >= 2 and sentence.endswith("."), key
        assert table()[key].allowed != "a value", key


def test_a_key_is_explained():
    text = explain("batch.samples")
    assert "Samples in the global batch" in text and "an integer >= 1 or `auto`" in text and "default: auto" in text
    assert "required" in explain("model.name") and "run file's name" in explain("name")


def test_a_section_is_its_keys():
    assert "optimizer.beta1" in explain("optimizer") and "optimizer.max_grad_norm" in explain("optimizer")


@pytest.mark.parametrize(
    ("key", "meant"),
    [("batch.sample", "batch.samples"), ("Batch.Samplse", "batch.samples"), ("lr", "optimizer.learning_rate")],
)
def test_a_misspelt_key_is_an_error_with_the_nearest_name(key, meant):
    with pytest.raises(UserError) as raised:
        show_key(key)
    assert f"`{meant}`" in raised.value.fix


def test_suggestions_exist():
    assert set(KEYS.values()) <= {*all_keys(), *sections()} and set(VALUES) <= set(all_keys())
    named = re.findall(r"`((?:\w+\.)?\w+)[`:]", " ".join(NOTES.values()))
    assert named and {name for name in named if "." in name} <= set(all_keys())
    assert not KEYS.keys() & NOTES.keys() and not (KEYS.keys() | NOTES.keys()) & (set(all_keys()) | set(sections()))
    assert nearest("epochs") == "stop.epochs" and nearest("evaluation.every_steps") == "evaluate.every_steps"
    assert nearest("optimizer.lr") == "optimizer.learning_rate" and nearest("qqqqqqq") is None


@pytest.mark.parametrize(
    "key", ["compute", "data.topology", "training", "trainer", "hardware", "job", "validation.path", "network.kind"]
)
def test_words_that_merely_look_alike_are_no_suggestion(key):
    assert nearest(key) is None and hint(key) == "; `manyhands config` lists all keys"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("batch_size", "counts one GPU"),
        ("training.per_device_train_batch_size", "`batch.samples` is the global batch"),
        ("adapter", "`method.name: lora`"),
        ("base_model", "here it is `model.name`"),
        ("datasets", "here it is `data.train`"),
        ("report_to", "`log.tensorboard`"),
        ("load_in_4bit", "`method.name: qlora`"),
        ("deepspeed", "`parallel.strategy: zero1`, `zero2` or `zero3`"),
        ("rl", "DPO"),
        ("resume_from_checkpoint", "starting the same run again resumes it"),
        ("sample_packing", "here it is `data.packing`"),
        ("learning-rate", "did you mean `optimizer.learning_rate`"),
        ("optimizer.learning_rat", "did you mean `optimizer.learning_rate`"),
        ("optimizer.weight_deacy", "did you mean `optimizer.weight_decay`"),
        ("data.max_len", "did you mean `data.max_length`"),
        ("num_samples", "here it is `data.max_samples`"),
        ("evaluate.num_samples", "`evaluate.max_tokens` limits the validation tokens"),
        ("evaluate.max_samples", "`evaluate.prompts` is the number of prompts"),
        ("evaluate.num_prompts", "here it is `evaluate.prompts`"),
    ],
)
def test_words_of_other_tools_lead_to_ours(key, words):
    assert words in hint(key)
    with pytest.raises(UserError) as raised:
        show_key(key)
    assert words in raised.value.fix


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("relora", True, ": a key of Axolotl: ReLoRA is not available"),
        ("method.galore_rank", 8, ": a key of LLaMA-Factory: only use_galore reads it"),
        ("push_to_hub", None, ": a key of LLaMA-Factory: nothing is uploaded by itself"),
        ("plot_loss", True, ": a key of LLaMA-Factory: the run's report has the curves"),
        ("lr_quadratic_warmup", True, "a key of Axolotl: a quadratic warm-up is not available"),
        ("dataloader_pin_memory", True, "a key of Axolotl: it has no effect here: remove it"),
        ("curriculum_sampling", True, "a key of Axolotl: here it is `data.order: as_given`"),
    ],
)
def test_keys_of_other_tools_are_told_as_their_translation_has_them(key, value, words):
    assert words in hint(key, value)
    assert hint("fluxcapacitor", value) == "; `manyhands config` lists all keys"


def test_the_json_schema_tells_editors_what_we_accept():
    schema = json_schema()
    assert schema["required"] == ["model", "data"] and schema["additionalProperties"] is False
    assert schema["$defs"]["BatchSection"]["properties"]["samples"]["description"].startswith(
        "Samples in the global batch"
    )


def test_the_commented_file_loads_and_changes_nothing(tmp_path):
    given = {
        "model.name": "a: b",
        "data.train": "no",
        "optimizer.learning_rate": 1e-5,
        "method.target_modules": ["q_proj", "*"],
        "task": "sft",
    }
    path = tmp_path / "run.yaml"
    path.write_text(commented_yaml(given))
    config = load_config(path)
    assert (config.model.name, config.data.train, config.optimizer.learning_rate) == ("a: b", "no", 1e-5)
    plain = RunConfig.model_validate(
        {
            "name": "run",
            "model": {"name": "a: b"},
            "data": {"train": "no"},
            "optimizer": {"learning_rate": 1e-5},
            "method": {"target_modules": ["q_proj", "*"]},
        }
    )
    assert config == plain


def test_the_comments_are_the_defaults():
    """Uncommented, the file still says the same: so what it shows as a default is one."""
    text = commented_yaml({"model.name": "m", "data.train": "t", "name": "n"})
    uncommented = re.sub(r"^( *)# (\w+:(?: |$))", r"\1\2", text, flags=re.MULTILINE)
    mapping = yaml.safe_load(uncommented)
    mapping["optimizer"]["eps"] = float(mapping["optimizer"]["eps"])
    assert RunConfig.model_validate(mapping) == RunConfig.model_validate(
        {"name": "n", "model": {"name": "m"}, "data": {"train": "t"}}
    )
    assert len(mapping) == len(RunConfig.model_fields)


def test_an_unknown_key_in_a_commented_file_is_a_bug():
    with pytest.raises(KeyError, match=r"batch\.sample"):
        commented_yaml({"batch.sample": 3})
