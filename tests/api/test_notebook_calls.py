"""What notebooks of Unsloth and TRL call, before and after training: each call works, or its error names the way.

The calls are those of five public notebooks (two of text, three with images or adapters of PEFT), and what their
trainers' users call besides.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.export import push as push_module
from tests.support.tiny import write_tiny_model
from tests.support.vision import write_tiny_vision
from tests.support.zygote import forking

WORDS = ("alpha", "beta", "gamma", "delta", "alpha beta", "gamma delta", "beta gamma", "delta alpha")
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": WORDS[-number]}]}
    for number, word in enumerate(WORDS)
]
HELD_OUT = [{"messages": [{"role": "user", "content": "delta gamma"}, {"role": "assistant", "content": "beta alpha"}]}]
ADAPTER: dict[str, Any] = dict(
    r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8, lora_dropout=0, bias="none",
    use_gradient_checkpointing="unsloth", random_state=3407, use_rslora=False, loftq_config=None,
)  # fmt: skip
ARGUMENTS: dict[str, Any] = dict(
    per_device_train_batch_size=2, gradient_accumulation_steps=1, warmup_steps=1, max_steps=3, learning_rate=1e-2,
    logging_steps=1, optim="adamw_torch", weight_decay=0.001, lr_scheduler_type="linear", seed=3407, report_to="none",
    bf16=False, max_length=64,
)  # fmt: skip


class Recorder:
    """A callback as transformers' are: events by name, with arguments, state and control."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.events: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append("begin")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **given: Any) -> None:
        self.logged.append((state.global_step, logs))

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append("end")


class Api:
    """huggingface_hub's, which takes everything."""

    def __init__(self, token: str) -> None:
        self.token = token

    def repo_info(self, name: str, repo_type: str) -> Any:
        return types.SimpleNamespace(private=False)

    def create_commit(self, name: str, operations: Any, **given: Any) -> Any:
        files = sorted(operation.path_in_repo for operation in operations)
        return types.SimpleNamespace(commit_url=f"{name} {self.token} {' '.join(files)}")


class Notebook:
    """One notebook that has trained: its variables by name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.base = folder, write_tiny_model(folder / "base")
        self.model, self.tokenizer = mh.FastLanguageModel.from_pretrained(
            model_name=str(self.base), max_seq_length=2048, load_in_4bit=False
        )
        self.model = mh.FastLanguageModel.get_peft_model(self.model, **ADAPTER)
        self.recorder = Recorder()
        self.args = mh.SFTConfig(output_dir=str(folder / "outputs"), overwrite="number", **ARGUMENTS)
        self.trainer = mh.SFTTrainer(
            model=self.model,
            processing_class=self.tokenizer,
            train_dataset=ROWS,
            eval_dataset=HELD_OUT,
            args=self.args,
            callbacks=[self.recorder],
            overrides={"data.cache": folder / "cache"},
        )
        self.before = self.model.get_nb_trainable_parameters()
        self.stats = self.trainer.train()


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with pytest.MonkeyPatch.context() as patch, forking():
        for name in ("RANK", "WORLD_SIZE", "MANYHANDS_NUM_PROCESSES", "HF_TOKEN"):
            patch.delenv(name, raising=False)
        upload = push_module.upload
        patch.setattr(push_module, "upload", lambda planned, **o: upload(planned, connect=Api, **o))
        yield Notebook(tmp_path_factory.mktemp("notebook"))


def tensors(n: Notebook) -> Any:
    return n.tokenizer(["alpha beta"], return_tensors="pt").to("cpu")


def generate(n: Notebook) -> int:
    from transformers import TextStreamer

    inputs = tensors(n)
    streamer = TextStreamer(n.tokenizer, skip_prompt=True)
    ids = n.model.generate(
        **inputs, streamer=streamer, max_new_tokens=3, use_cache=True, temperature=0.7, top_p=0.8, top_k=20
    )
    return int(ids.shape[1] - inputs["input_ids"].shape[1])


def files_of(call: Callable[[Path], Any], n: Notebook, name: str) -> list[str]:
    call(n.folder / name)
    return sorted(path.name for path in (n.folder / name).rglob("*") if path.suffix in (".safetensors", ".gguf"))


def merged(n: Notebook) -> bool:
    whole = n.model.merge_and_unload()
    whole.save_pretrained(n.folder / "merged-copy")
    return whole.generate("alpha", max_new_tokens=4) == n.model.generate("alpha", max_new_tokens=4)


def reopened(n: Notebook) -> list[Any]:
    """From the folder that the notebook has saved: it answers, and another trainer trains it on."""
    n.model.save_pretrained(n.folder / "again")
    n.tokenizer.save_pretrained(n.folder / "again")
    model, tokenizer = mh.FastLanguageModel.from_pretrained(str(n.folder / "again"), load_in_4bit=False)
    trainer = mh.SFTTrainer(model, train_dataset=ROWS, processing_class=tokenizer, overrides={"data.cache": n.folder})
    method = trainer.load().config.method
    same = model.generate("alpha", max_new_tokens=4) == n.model.generate("alpha", max_new_tokens=4)
    goes_on = trainer.plan().num_trained == n.before[0]
    return ["lora_alpha" if method.alpha == 8 else "", method.target_modules[0], same, goes_on]


def opened_by_peft(n: Notebook) -> bool:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    n.model.save_pretrained(n.folder / "peft")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(n.base), n.folder / "peft")
    with torch.no_grad():
        return torch.allclose(theirs(**tensors(n)).logits, n.model(**tensors(n)).logits, atol=1e-4)


WORKS: dict[str, tuple[Callable[[Notebook], Any], Any]] = {
    "metrics['train_runtime']": (lambda n: n.stats.metrics["train_runtime"] > 0, True),
    "training_loss, global_step": (lambda n: (n.stats.training_loss > 0, n.stats.global_step), (True, 3)),
    "rows and losses are there as of mh.train": (lambda n: len(n.stats.losses), 3),
    "state": (lambda n: (n.trainer.state.global_step, n.trainer.state.max_steps), (3, 3)),
    "state.log_history": (
        lambda n: [set(row) >= {"loss", "learning_rate", "epoch", "step"} for row in n.trainer.state.log_history
                   if "loss" in row],
        [True] * 3,
    ),
    "state.best_metric": (
        lambda n: n.trainer.state.best_metric
        == min(row["eval_loss"] for row in n.trainer.state.log_history if "eval_loss" in row),
        True,
    ),
    "evaluate": (lambda n: n.trainer.evaluate()["eval_loss"] == n.stats.evaluations[-1]["loss"], True),
    "evaluate, of other rows": (
        lambda n: abs(n.trainer.evaluate(HELD_OUT, metric_key_prefix="t")["t_loss"] - n.stats.evaluations[-1]["loss"])
        < 1e-4,
        True,
    ),
    "callbacks": (lambda n: (n.recorder.events, [step for step, logs in n.recorder.logged if "loss" in logs]),
                  (["begin", "end"], [1, 2, 3])),
    "print_trainable_parameters": (lambda n: n.model.print_trainable_parameters(), None),
    "trained parameters, planned and in the run": (lambda n: n.model.get_nb_trainable_parameters() == n.before, True),
    "parameters": (lambda n: sum(p.numel() for p in n.model.parameters()) == n.before[1], True),
    "named_parameters, state_dict": (
        lambda n: {name for name, _ in n.model.named_parameters()} <= n.model.state_dict().keys(), True
    ),
    "config, generation_config": (
        lambda n: (n.model.config.model_type, type(n.model.generation_config).__name__), ("llama", "GenerationConfig")
    ),
    "device, eval, train, to": (lambda n: n.model.eval().train().to(n.model.device) is n.model, True),
    "model(**inputs)": (lambda n: n.model(**tensors(n)).logits.shape[0], 1),
    "generate(**inputs, streamer=...)": (generate, 3),
    "for_inference": (lambda n: mh.FastLanguageModel.for_inference(n.model) is n.model, True),
    "apply_chat_template": (
        lambda n: bool(n.tokenizer.apply_chat_template(ROWS[0]["messages"], tokenize=False)), True
    ),
    "save_pretrained": (lambda n: files_of(n.model.save_pretrained, n, "lora"), ["adapter_model.safetensors"]),
    "an adapter that was saved, opened again": (reopened, ["lora_alpha", "q_proj", True, True]),
    "an adapter that was saved, opened by PEFT": (opened_by_peft, True),
    "tokenizer.save_pretrained": (lambda n: bool(n.tokenizer.save_pretrained(n.folder / "tokenizer")), True),
    "save_model": (lambda n: files_of(n.trainer.save_model, n, "saved"), ["adapter_model.safetensors"]),
    "save_model()": (lambda n: n.trainer.save_model(), None),
    "save_pretrained_merged": (
        lambda n: files_of(lambda f: n.model.save_pretrained_merged(f, n.tokenizer, save_method="merged_16bit"), n,
                           "16bit"),
        ["model.safetensors"],
    ),
    "save_pretrained_merged, lora": (
        lambda n: files_of(lambda f: n.model.save_pretrained_merged(f, n.tokenizer, save_method="lora"), n, "lora-2"),
        ["adapter_model.safetensors"],
    ),
    "merge_and_unload": (merged, True),
    "push_to_hub": (lambda n: n.model.push_to_hub("me/lora", token="t", private=False, base="org/base").split()[:2],
                    ["me/lora", "t"]),
    "push_to_hub_merged": (
        lambda n: "model.safetensors" in n.model.push_to_hub_merged("me/m", n.tokenizer, token="t", private=False),
        True,
    ),
    "log_metrics, save_metrics, save_state": (
        lambda n: (n.trainer.log_metrics("train", n.stats.metrics), n.trainer.save_metrics("train", n.stats.metrics),
                   n.trainer.save_state(), (n.stats.folder / "train_results.json").is_file())[-1],
        True,
    ),
    "trainer.model, processing_class": (
        lambda n: (n.trainer.model is n.model, n.trainer.processing_class is n.tokenizer), (True, True)
    ),
}  # fmt: skip

REFUSED: dict[str, tuple[Callable[[Notebook], Any], str]] = {
    "save_pretrained_merged, 4 bits": (
        lambda n: n.model.save_pretrained_merged("x", n.tokenizer, save_method="merged_4bit"), "save_pretrained_gguf"
    ),
    "save_pretrained_gguf without llama.cpp": (
        lambda n: n.model.save_pretrained_gguf(n.folder / "gguf", n.tokenizer, quantization_method="q8_0"),
        'llama_cpp="path/to/llama.cpp"',
    ),
    "push_to_hub_gguf without llama.cpp": (
        lambda n: n.model.push_to_hub_gguf("me/gguf", n.tokenizer, quantization_method="q4_k_m", token="t"),
        "llama.cpp",
    ),
    "a type that llama.cpp has not": (
        lambda n: n.model.save_pretrained_gguf(n.folder / "gguf", quantization_method="q9"), "choose one of f32"
    ),
    "push_to_hub without a token": (lambda n: n.model.push_to_hub("me/lora", base="org/base"), "export HF_TOKEN"),
    "push_to_hub of an adapter for a folder": (
        lambda n: n.model.push_to_hub("me/lora", token="t"), 'base="OWNER/NAME"'
    ),
    "push_to_hub to a public repository": (
        lambda n: n.model.push_to_hub("me/lora", token="t", base="org/base"), "private=False"
    ),
    "trainer.push_to_hub": (lambda n: n.trainer.push_to_hub(dataset_name="a/b"), "hub_model_id"),
    "predict": (lambda n: n.trainer.predict(ROWS), "generate_file"),
    "to another device": (lambda n: n.model.to("meta"), "device_map"),
    "parameters before training": (
        lambda n: mh.FastLanguageModel.get_peft_model(
            mh.FastLanguageModel.from_pretrained(n.base, load_in_4bit=False)[0]
        ).parameters(),
        "print_trainable_parameters()",
    ),
    "save_pretrained_merged before training": (
        lambda n: mh.FastLanguageModel.from_pretrained(n.base, load_in_4bit=False)[0].save_pretrained_merged("x"),
        "after Trainer(...).train()",
    ),
    "evaluate before training": (
        lambda n: mh.SFTTrainer(str(n.base), train_dataset=ROWS).evaluate(), "call train() first"
    ),
    "a callback of the ranks": (
        lambda n: n.trainer.add_callback(type("Mine", (), {"on_optimizer_step": lambda *_, **__: None})),
        "hooks, which run in the ranks",
    ),
}  # fmt: skip


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize("call", WORKS)
def test_a_call_after_training_works(notebook: Notebook, call: str) -> None:
    function, expected = WORKS[call]
    assert function(notebook) == expected


@pytest.mark.ci
@pytest.mark.parametrize("call", REFUSED)
def test_a_call_that_cannot_work_names_the_way(
    notebook: Notebook, call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no converter of llama.cpp
    function, way = REFUSED[call]
    with pytest.raises(mh.UserError) as error:
        function(notebook)
    assert way in str(error.value), error.value


@pytest.mark.ci
def test_the_same_output_dir_takes_a_numbered_folder(notebook: Notebook) -> None:
    notebook.trainer.args.max_steps = 1
    again = notebook.trainer.train()
    assert (notebook.stats.folder.name, again.folder.name, again.global_step) == ("outputs", "outputs-2", 1)


def test_a_notebook_of_images(tmp_path: Path) -> None:
    """Vision: the processor, its adapter, rows with Pillow's images, and the collator that stands for nothing."""
    image = pytest.importorskip("PIL.Image").new("RGB", (20, 20), "red")
    base = write_tiny_vision(tmp_path / "base", "qwen2_vl")
    model, processor = mh.FastVisionModel.from_pretrained(
        str(base), load_in_4bit=False, use_gradient_checkpointing=True
    )
    asked = {**ADAPTER, "target_modules": "all-linear"}
    model = mh.FastVisionModel.get_peft_model(
        model, finetune_vision_layers=True, finetune_language_layers=True, finetune_mlp_modules=False, **asked
    )
    question = [{"type": "text", "text": "What is it?"}, {"type": "image", "image": image}]
    answer = [{"type": "text", "text": "red"}]
    row = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    trainer = mh.SFTTrainer(
        model=mh.FastVisionModel.for_training(model),
        train_dataset=[row] * 4,
        processing_class=getattr(processor, "tokenizer", processor),
        data_collator=mh.UnslothVisionDataCollator(model, processor),
        args=mh.SFTConfig(
            remove_unused_columns=False,
            dataset_text_field="",
            dataset_kwargs={"skip_prepare_dataset": True},
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            optim="adamw_torch_fused",
            report_to="none",
            max_length=512,
        ),
        overrides={"data.cache": tmp_path / "cache"},
    )
    loaded = trainer.load()
    assert loaded.config.method.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    [outcome] = [one for one in loaded.translations[0].outcomes if one.key == "finetune_vision_layers"]
    assert outcome.kind == "substituted" and "'vision': 'trained'" in outcome.why
    made = trainer.plan()
    assert made.data.images == 4 and made.parts == {"vision": "frozen", "projector": "frozen", "language": "trained"}
    with pytest.raises(mh.UserError, match="no layer of the language model") as error:
        mh.FastVisionModel.get_peft_model(model, finetune_language_layers=False)
    assert "'language': 'frozen'" in error.value.fix


def test_names_of_the_other_tools() -> None:
    assert mh.SFTTrainer is mh.Trainer and mh.SFTConfig is mh.TrainingArguments
    assert issubclass(mh.FastVisionModel, mh.FastLanguageModel) and mh.FastModel is mh.FastVisionModel


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (types.SimpleNamespace(early_stopping_patience=3, early_stopping_threshold=0.0), 3),
        (types.SimpleNamespace(early_stopping_patience=3, early_stopping_threshold=0.1), "leave it out"),
    ],
)
def test_early_stopping_is_the_runs_own(tmp_path: Path, callback: Any, says: Any) -> None:
    stops = type("EarlyStoppingCallback", (), vars(callback))()
    trainer = mh.SFTTrainer(tmp_path, train_dataset=ROWS)
    if isinstance(says, int):
        trainer.add_callback(stops)
        assert trainer.overrides == {"stop.patience": says}
    else:
        with pytest.raises(mh.UserError) as error:
            trainer.add_callback(stops)
        assert error.value.fix == says


def test_a_callback_that_would_steer_is_told_the_argument(tmp_path: Path) -> None:
    class Stops:
        def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_save = True

    trainer = mh.SFTTrainer(tmp_path, train_dataset=ROWS, callbacks=[Stops])
    call = trainer._callbacks.function("step", None)
    assert call is not None
    row = {"kind": "step", "step": 1, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "epoch": 0.5}
    with pytest.raises(mh.UserError, match=r"has set control\.should_save") as error:
        call(row)
    assert "save_steps" in error.value.fix


QUANTIZED = dict(load_in_4bit=True, load_in_8bit=False, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


@pytest.mark.parametrize(
    ("model", "arguments", "expected"),
    [
        ({"max_seq_length": 2048}, {"max_length": 512}, {"data.max_length": 512}),
        ({"max_seq_length": 300}, {}, {"data.max_length": 300}),
        ({}, {"dataset_text_field": ""}, {"data.format": "auto"}),
        ({}, {"model_init_kwargs": {"torch_dtype": "bfloat16", "use_cache": False}}, {"model.dtype": "bfloat16"}),
        ({"quantization_config": type("BitsAndBytesConfig", (), QUANTIZED)()}, {}, {"method.name": "qlora"}),
        ({"use_gradient_checkpointing": True}, {}, {"parallel.activation_checkpointing": "full"}),
    ],
)
def test_arguments_of_notebooks_act(
    tmp_path: Path, model: dict[str, Any], arguments: dict[str, Any], expected: dict[str, Any]
) -> None:
    base = write_tiny_model(tmp_path / "base")
    made, tokenizer = mh.FastLanguageModel.from_pretrained(base, **{"load_in_4bit": False, **model})
    trainer = mh.SFTTrainer(
        made,
        mh.SFTConfig(**arguments),
        processing_class=tokenizer,
        train_dataset=ROWS,
        overrides={"data.cache": tmp_path},
    )
    config = trainer.load().config.model_dump()
    assert {key: config[key.split(".")[0]][key.split(".")[1]] for key in expected} == expected


def test_a_model_in_memory_is_refused_with_its_name(tmp_path: Path) -> None:
    loaded = type("LlamaForCausalLM", (), {"name_or_path": "org/model", "forward": None})()
    with pytest.raises(mh.UserError, match="model is a LlamaForCausalLM") as error:
        mh.SFTTrainer(loaded, train_dataset=ROWS)
    assert "org/model" in error.value.fix
