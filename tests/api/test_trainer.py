"""The trainer's parameters as keys of a run: each has its meaning, or is refused by name. Nothing is trained here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.api.arguments import as_file, translate
from manyhands.config.patterns import matches
from manyhands.config.schema import RunConfig, Source
from manyhands.importers.translation import ImportContext
from tests.support.tiny import write_tiny_model

ROWS = [{"text": f"row {number}"} for number in range(4)]
ADAPTER = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MANYHANDS_NUM_PROCESSES", "MANYHANDS_FORCE_SINGLE_GPU"):
        monkeypatch.delenv(name, raising=False)


def rows_of(config: RunConfig) -> Path:
    [source] = config.data.train
    assert isinstance(source, Source)
    return Path(source.path)


def load(folder: Path, cache: Path, arguments: dict[str, Any] | None = None, **options: Any) -> RunConfig:
    """The run of a trainer on a model without 4-bit weights; ``options`` are of from_pretrained, or of the trainer."""
    of_model = {
        k: options.pop(k) for k in list(options) if k in ("dtype", "device_map", "load_in_4bit", "max_seq_length")
    }
    model, tokenizer = mh.FastLanguageModel.from_pretrained(folder, **{"load_in_4bit": False, **of_model})
    options = {"tokenizer": tokenizer, "train_dataset": ROWS, **options}
    args = mh.TrainingArguments(**(arguments or {}))
    return mh.Trainer(model=model, args=args, overrides={"data.cache": cache}, **options).load().config


def test_the_guides_quick_start(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_NUM_PROCESSES", "3")
    model, tokenizer = mh.FastLanguageModel.from_pretrained(
        model_name=str(folder), max_seq_length=512, dtype=None, load_in_4bit=True, device_map="auto"
    )
    args = mh.TrainingArguments(
        per_device_train_batch_size=2, gradient_accumulation_steps=4, enable_distributed_training=True,
        distributed_backend="nccl", output_dir="./out/first",
    )  # fmt: skip
    trainer = mh.Trainer(
        model=model, tokenizer=tokenizer, train_dataset=ROWS, args=args, overrides={"data.cache": tmp_path}
    )
    loaded = trainer.load()
    config = loaded.config
    assert (config.model.name, config.data.max_length, config.model.dtype) == (str(folder), 512, "auto")
    assert (config.method.name, config.method.rank, config.method.alpha) == ("qlora", 16, 16)
    assert config.method.target_modules == tuple(ADAPTER) and config.method.double_quant
    assert (config.batch.samples, config.parallel.gpus) == (2 * 3 * 4, "auto")
    assert (config.output.dir, config.name) == ("./out", "first")
    assert rows_of(config).parent == tmp_path / "memory"
    [outcome] = [outcome for outcome in loaded.translations[0].outcomes if outcome.key == "distributed_backend"]
    assert (outcome.kind, "gloo" in outcome.why) == ("ignored", True)


ACTS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}, {"batch.samples": 6}),
    ({"learning_rate": 2e-4}, {"optimizer.learning_rate": 2e-4}),
    ({}, {"optimizer.learning_rate": 2e-5, "stop.epochs": 3, "batch.samples": 8}),
    ({"max_steps": 5}, {"stop.max_steps": 5}),
    ({"enable_distributed_training": False}, {"parallel.gpus": 1}),
    ({"gradient_checkpointing": True}, {"parallel.activation_checkpointing": "full"}),
    ({"gradient_checkpointing": False}, {"parallel.activation_checkpointing": "none"}),
    ({"dataloader_num_workers": 0}, {"data.workers": 0}),
    ({"dataloader_num_workers": 2}, {"data.workers": 2}),
    ({"auto_find_batch_size": True}, {"batch.micro_samples": "auto"}),
    ({"ddp_bucket_cap_mb": 25}, {"parallel.ddp_bucket_mb": 25}),
    ({"seed": 7}, {"seed": 7}),
    ({"bf16": True}, {"model.dtype": "bfloat16"}),
    ({"optim": "adamw_bnb_8bit", "fsdp": "full_shard offload"}, {"parallel.offload": "all", "optimizer.name": "adamw"}),
)


@pytest.mark.parametrize(("arguments", "expected"), ACTS, ids=lambda value: "-".join(value) or "defaults")
def test_an_argument_acts(folder: Path, tmp_path: Path, arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    config = load(folder, tmp_path, arguments).model_dump()
    flat = {key: config[key.split(".")[0]][key.split(".")[1]] if "." in key else config[key] for key in expected}
    assert flat == expected


def test_what_is_always_so_is_accepted(folder: Path, tmp_path: Path) -> None:
    arguments = {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False, "dataloader_pin_memory": True,
                 "auto_find_batch_size": False, "distributed_backend": "gloo"}  # fmt: skip
    assert load(folder, tmp_path, arguments) == load(folder, tmp_path)


REFUSED: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({"ddp_find_unused_parameters": True}, {}, "`ddp_find_unused_parameters`: every trained weight"),
    ({"ddp_broadcast_buffers": True}, {}, "`ddp_broadcast_buffers`: no buffer changes"),
    ({"distributed_backend": "mpi"}, {}, "`distributed_backend`: `mpi`: write nccl"),
    ({"label_smoothing_factor": 0.1}, {}, "`label_smoothing_factor`"),
    ({}, {"device_map": {"model.layers.0": 0, "model.layers.1": 1}}, "splits the layers over GPUs"),
    ({}, {"dtype": "int8"}, "write bfloat16 or float32"),
)


@pytest.mark.parametrize(("arguments", "options", "reason"), REFUSED)
def test_what_cannot_be_had_is_refused_by_name(
    folder: Path, tmp_path: Path, arguments: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(mh.UserError, match="cannot be run as they are, for 1 reason") as error:
        load(folder, tmp_path, arguments, **options)
    assert reason in error.value.details[0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"distributed_backend": "gloo"}, "gloo is for CPUs"),
        ({"dataloader_pin_memory": False}, "batches reach a GPU from pinned memory"),
        ({"device_map": "balanced"}, "balanced splits the layers over GPUs that one process uses in turn"),
        ({"device_map": "sequential"}, "splits the layers"),
    ],
)
def test_refused_where_there_are_gpus(arguments: dict[str, Any], reason: str) -> None:
    given = as_file({"model_name": "a/b", "train_dataset": "rows.jsonl", **arguments})
    context = ImportContext(count_gpus=lambda: 2)
    translate(given, context, num_gpus=0)
    with pytest.raises(mh.UserError) as error:
        translate(given, context, num_gpus=2)
    assert reason in error.value.details[0]


def test_a_device_map_that_splits_nothing_is_this_ranks_gpu(folder: Path, tmp_path: Path) -> None:
    for same in ({"": 0}, {"": "cpu"}, "sequential", "balanced", None):
        assert load(folder, tmp_path, device_map=same) == load(folder, tmp_path)


def test_unknown_names_are_refused_where_they_are_given(folder: Path) -> None:
    with pytest.raises(mh.UserError, match="no training argument 'learning_rat'") as error:
        mh.TrainingArguments(learning_rat=1)
    assert error.value.fix == "did you mean learning_rate?"
    arguments = mh.TrainingArguments()
    arguments.learning_rate = 0.5
    assert arguments.given["learning_rate"] == arguments.learning_rate == 0.5
    with pytest.raises(mh.UserError, match="no training argument"):
        arguments.nonsense = 1
    with pytest.raises(mh.UserError, match="not available") as error:
        mh.FastLanguageModel.from_pretrained(folder, token="secret", max_seq_len=5)
    assert ["HF_TOKEN" in error.value.details[0], "max_seq_length" in error.value.details[1]] == [True, True]
    with pytest.raises(mh.UserError, match="not available"):
        mh.Trainer(str(folder), train_dataset=ROWS, callbacks=[object()])
    with pytest.raises(mh.UserError, match="no train_dataset"):
        mh.Trainer(str(folder))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": None}, "model is a NoneType"),
        ({"tokenizer": "name"}, "the tokenizer is a str"),
        ({"peft_config": "lora"}, "peft_config is a str"),
        ({"overrides": ["a=b"]}, "overrides are a list"),
        ({"formatting_func": "text"}, "formatting_func is a str"),
        ({"on_evaluate": 3}, "on_evaluate is a int"),
        ({"hooks": "module:name"}, "hooks is a str"),
    ],
)
def test_wrong_types_are_refused(folder: Path, tmp_path: Path, options: dict[str, Any], says: str) -> None:
    asked: dict[str, Any] = {"model": folder, "train_dataset": ROWS, "overrides": {"data.cache": tmp_path}, **options}
    with pytest.raises(mh.UserError, match=says):
        mh.Trainer(**asked).load()


def test_an_empty_list_of_callbacks_asks_for_nothing(folder: Path) -> None:
    mh.Trainer(folder, train_dataset=ROWS, callbacks=[])


def test_an_adapter_of_get_peft_model_and_of_peft(folder: Path, tmp_path: Path) -> None:
    model, _ = mh.FastLanguageModel.from_pretrained(folder, load_in_4bit=False)
    model = mh.FastLanguageModel.get_peft_model(
        model, r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj"], random_state=5, use_rslora=True
    )
    overrides = {"data.cache": tmp_path}
    config = mh.Trainer(model, train_dataset=ROWS, overrides=overrides).load().config
    method = config.method
    assert (method.name, method.rank, method.alpha, method.dropout) == ("lora", 4, 8, 0.1)
    assert (method.target_modules, method.rslora, config.seed) == (("q_proj",), True, 5)
    peft = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["q_proj"], "use_rslora": True}
    args = mh.TrainingArguments(seed=5, max_seq_length=2048)
    same = mh.Trainer(str(folder), args, train_dataset=ROWS, peft_config=peft, overrides=overrides)
    assert same.load().config.method == method
    model, _ = mh.FastLanguageModel.from_pretrained(folder, load_in_4bit=False)
    assert (
        mh.Trainer(model, args, train_dataset=ROWS, peft_config=peft, overrides=overrides).load().config.method
        == method
    )
    lora = pytest.importorskip("peft").LoraConfig(**peft, task_type="CAUSAL_LM")
    same = mh.Trainer(str(folder), args, train_dataset=ROWS, peft_config=lora, overrides=overrides)
    assert same.load().config.method == method
    full = mh.Trainer(str(folder), train_dataset=ROWS, overrides=overrides).load().config
    assert full.method.name == "full"


@pytest.mark.parametrize(
    ("asked", "native"),
    [
        (r".*layers\.(0|1)\..*_proj", (r"re:.*layers\.(0|1)\..*_proj",)),
        (r"re:.*layers\.(0|1)\..*_proj", (r"re:.*layers\.(0|1)\..*_proj",)),
        ("q_proj", ("q_proj",)),
        ("*_proj", ("*_proj",)),
        (["q_proj", "v_proj"], ("q_proj", "v_proj")),
        ("all-linear", "all-linear"),
    ],
)
def test_a_text_of_target_modules_is_an_expression_as_in_peft(
    folder: Path, tmp_path: Path, asked: Any, native: Any
) -> None:
    model, _ = mh.FastLanguageModel.from_pretrained(folder, load_in_4bit=False)
    model = mh.FastLanguageModel.get_peft_model(model, target_modules=asked)
    trainer = mh.Trainer(model, train_dataset=ROWS, overrides={"data.cache": tmp_path})
    assert trainer.load().config.method.target_modules == native


def test_layers_to_transform_is_refused_with_an_expression_that_reaches_them(folder: Path, tmp_path: Path) -> None:
    peft = {"r": 4, "target_modules": ["q_proj"], "layers_to_transform": [30, 31]}
    trainer = mh.Trainer(str(folder), train_dataset=ROWS, peft_config=peft, overrides={"data.cache": tmp_path})
    with pytest.raises(mh.UserError, match="cannot be run") as error:
        trainer.load()
    expression = error.value.details[0].split("`")[-2]
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in (3, 30, 31)]
    assert [matches(name, expression) for name in names] == [False, True, True]


@pytest.mark.parametrize("field", [{"rank_pattern": {"q_proj": 8}}, {"exclude_modules": ["v_proj"]}, {"rank": 4}])
def test_what_a_peft_config_asks_besides_is_refused(folder: Path, field: dict[str, Any]) -> None:
    with pytest.raises(mh.UserError, match="not available") as error:
        mh.Trainer(str(folder), train_dataset=ROWS, peft_config={"r": 4, **field})
    assert error.value.where == "peft_config" and next(iter(field)) in error.value.details[0]
    if "rank" not in field:
        with pytest.raises(mh.UserError, match="not available"):
            mh.Trainer(str(folder), train_dataset=ROWS, peft_config=pytest.importorskip("peft").LoraConfig(**field))


def test_a_changed_tokenizer_acts(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = mh.FastLanguageModel.from_pretrained(folder, load_in_4bit=False)
    overrides = {"data.cache": tmp_path}
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.add_tokens(["<tool>"], special_tokens=True)
    config = mh.Trainer(model, tokenizer=tokenizer, train_dataset=ROWS, overrides=overrides).load().config
    assert (config.model.chat_template, config.model.new_tokens) == (tokenizer.chat_template, ("<tool>",))
    tokenizer.add_tokens(["plain"])
    with pytest.raises(mh.UserError, match="1 added token not marked as special"):
        mh.Trainer(model, tokenizer=tokenizer, train_dataset=ROWS, overrides=overrides).load()


def test_rows_are_formatted_one_by_one(folder: Path, tmp_path: Path) -> None:
    config = load(folder, tmp_path, train_dataset=[{"a": "x"}], formatting_func=lambda row: f"<{row['a']}>")
    assert rows_of(config).read_text() == '{"text": "<x>"}\n'
    with pytest.raises(mh.UserError, match="returned a list, not text"):
        load(folder, tmp_path, formatting_func=lambda row: ["batched"])


def test_arguments_of_transformers_are_read(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"), learning_rate=1e-3, max_steps=2, use_cpu=True
    )
    config = mh.Trainer(str(folder), args, train_dataset=ROWS, overrides={"data.cache": tmp_path}).load().config
    assert (config.optimizer.learning_rate, config.stop.max_steps, config.name) == (1e-3, 2, "run")


def test_variables_of_ours(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands.launch.environment import apply_variables

    arguments = {"per_device_train_batch_size": 2}
    monkeypatch.setenv("MANYHANDS_NUM_PROCESSES", "4")
    assert load(folder, tmp_path, arguments).batch.samples == 8
    monkeypatch.setenv("MANYHANDS_FORCE_SINGLE_GPU", "1")
    monkeypatch.setenv("MANYHANDS_COMPILE_MAXIMUM", "1")
    config, notes = apply_variables(load(folder, tmp_path, arguments))
    assert (config.batch.samples, config.parallel.gpus, config.parallel.compile) == (2, 1, True)
    assert len(notes) == 2
    trainer = mh.Trainer(str(folder), train_dataset=ROWS, overrides={"data.cache": tmp_path})
    assert trainer.plan().layout.world_size == 1
    monkeypatch.delenv("MANYHANDS_FORCE_SINGLE_GPU")
    monkeypatch.delenv("MANYHANDS_COMPILE_MAXIMUM")
    assert trainer.plan().layout.world_size == 4
    monkeypatch.setenv("MANYHANDS_FORCE_SINGLE_GPU", "maybe")
    with pytest.raises(mh.UserError, match="neither 0 nor 1"):
        load(folder, tmp_path, arguments)


@pytest.mark.parametrize(
    ("fix", "added"),
    [("use optimizer.name=adamw", "; of a trainer: overrides={'optimizer.name': ...}"), ("free some memory", "")],
)
def test_an_error_that_names_a_key_says_how_a_trainer_is_given_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fix: str, added: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise mh.UserError("it does not run here", fix=fix)

    monkeypatch.setattr("manyhands.api.trainer.plan", refuse)
    trainer = mh.Trainer(str(folder), train_dataset=ROWS, overrides={"data.cache": tmp_path})
    with pytest.raises(mh.UserError, match="does not run here") as error:
        trainer.plan()
    assert error.value.fix == fix + added
