"""``FastLanguageModel`` and ``Trainer`` as in Unsloth's and TRL's quick starts. Imports no torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.api.arguments import (
    ADAPTER,
    MODEL,
    PROJECTIONS,
    SFT,
    load_given,
    read_arguments,
    read_model_options,
    read_quantization,
)
from manyhands.api.callbacks import Callback, Callbacks, check_functions
from manyhands.api.distributed import get_rank
from manyhands.api.model import LanguageModel, check_device_map
from manyhands.api.process import run_module
from manyhands.api.results import TrainerState, TrainOutput, TransformersCallbacks, early_stopping, repository_of
from manyhands.api.runs import check_overrides, plan
from manyhands.api.sources import list_rows, write_rows
from manyhands.api.start import start
from manyhands.config.keys import table
from manyhands.config.schema import DataSection
from manyhands.config.text import names
from manyhands.core.errors import UserError
from manyhands.core.files import write_json
from manyhands.core.text import report_aside
from manyhands.core.units import count_of
from manyhands.facts.adapter import CONFIG, describe_method, locate_adapter, read_adapter_config
from manyhands.importers.load import LoadedRun

if TYPE_CHECKING:
    from manyhands.planner.types import Plan


class FastLanguageModel:
    """Unsloth's entry, under the same names and defaults."""

    @staticmethod
    def from_pretrained(
        model_name: str | os.PathLike[str],
        max_seq_length: int | None = 2048,
        dtype: Any = None,
        load_in_4bit: bool = True,
        load_in_8bit: bool = False,
        full_finetuning: bool = False,
        device_map: str | Mapping[str, Any] | None = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        use_gradient_checkpointing: bool | str | None = None,
        quantization_config: Any = None,
        **refused: Any,
    ) -> tuple[LanguageModel, Any]:
        """The model, and transformers' tokenizer of it. Weights are read when it is trained or answers.

        ``load_in_4bit`` trains an adapter beside 4-bit weights (NF4), ``full_finetuning`` all weights. ``dtype``: None
        is bfloat16 where the GPU has it. ``device_map``: ``auto`` gives each process its GPU in training, sharded where
        the model does not fit, and for answers the model is on as few GPUs as hold it. A folder with an adapter, also a
        run's, is its base with that adapter, which answers or is trained on. Raises ``UserError``.
        """
        from manyhands.data.tokenize.tokenizer import load_tokenizer
        from manyhands.facts.hub import locate_model

        wanted = MODEL | {"max_seq_length", "use_gradient_checkpointing"}
        given = {name: value for name, value in locals().items() if name in wanted}
        _refuse("FastLanguageModel.from_pretrained", refused, FROM_PRETRAINED)
        given["model_name"] = name = os.fspath(model_name)
        given["load_in_4bit"] = load_in_4bit and not (full_finetuning or load_in_8bit)
        given |= read_quantization(quantization_config)
        given["device_map"] = check_device_map(device_map)
        saved = _read_adapter(Path(name))
        given |= saved
        name = given["model_name"]
        folder = locate_model(name, given["revision"], False, trust_remote_code=trust_remote_code)
        own = Path(saved.get("adapter", folder)) / "tokenizer_config.json"
        tokenizer = load_tokenizer(own.parent if own.is_file() else folder, trust_remote_code=trust_remote_code)
        place = Path(saved.get("adapter", name))
        return LanguageModel(place, device_map=given["device_map"], given=given), tokenizer

    @staticmethod
    def get_peft_model(
        model: LanguageModel,
        r: int = 16,
        target_modules: Sequence[str] | str = PROJECTIONS,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        bias: str = "none",
        layers_to_transform: Any = None,
        layers_pattern: Any = None,
        use_gradient_checkpointing: bool | str = "unsloth",
        random_state: int | None = None,
        max_seq_length: int | None = None,
        use_rslora: bool = False,
        modules_to_save: Sequence[str] | None = None,
        init_lora_weights: bool | str = True,
        loftq_config: Mapping[str, Any] | None = None,
        use_dora: bool = False,
        **refused: Any,
    ) -> LanguageModel:
        """The model with a LoRA adapter to train."""
        adapter = {name: value for name, value in locals().items() if name in ADAPTER}
        _refuse("FastLanguageModel.get_peft_model", refused, GET_PEFT_MODEL)
        length = {} if max_seq_length is None else {"max_seq_length": max_seq_length}
        return LanguageModel(model.folder, device_map=model.device_map, given={**model.given, **length, **adapter})

    @staticmethod
    def for_inference(model: LanguageModel) -> LanguageModel:
        """The same: nothing has to be switched."""
        return model

    @staticmethod
    def for_training(model: LanguageModel, use_gradient_checkpointing: bool = True) -> LanguageModel:
        """The same: nothing has to be switched."""
        if not use_gradient_checkpointing:
            raise UserError(
                "use_gradient_checkpointing=False has no effect here",
                where="FastLanguageModel.for_training",
                fix="give it to get_peft_model, or gradient_checkpointing to TrainingArguments",
            )
        return model


class FastVisionModel(FastLanguageModel):
    """Unsloth's entry for models of text and images."""

    @staticmethod
    def from_pretrained(model_name: str | os.PathLike[str], *args: Any, **options: Any) -> tuple[LanguageModel, Any]:
        """As of ``FastLanguageModel``, with transformers' processor in place of the tokenizer."""
        from transformers import AutoProcessor

        from manyhands.facts.hub import locate_model

        model, tokenizer = FastLanguageModel.from_pretrained(model_name, *args, **options)
        folder = locate_model(model.given["model_name"], model.given["revision"], False)
        try:
            return model, AutoProcessor.from_pretrained(folder, trust_remote_code=model.given["trust_remote_code"])
        except ImportError as error:  # training has an image processor of its own
            report_aside(f"the tokenizer stands for the processor, which transformers cannot open: {error}")
            return model, tokenizer

    @staticmethod
    def get_peft_model(  # type: ignore[override]
        model: LanguageModel,
        *,
        finetune_vision_layers: bool = True,
        finetune_language_layers: bool = True,
        finetune_attention_modules: bool = True,
        finetune_mlp_modules: bool = True,
        target_modules: Sequence[str] | str | None = "all-linear",
        **adapter: Any,
    ) -> LanguageModel:
        """The model with a LoRA adapter of its language model, never of its vision tower, which is reported."""
        if not finetune_language_layers or not (finetune_attention_modules or finetune_mlp_modules):
            raise UserError(
                "there is no layer of the language model to adapt",
                where="FastVisionModel.get_peft_model",
                why="adapters are for the language model alone",
                fix="leave out get_peft_model, and give Trainer overrides={'method.parts': {'vision': 'trained', "
                "'language': 'frozen'}}, which trains the tower's own weights",
            )
        if target_modules in (None, "all-linear"):
            attention, mlp = PROJECTIONS[:4], PROJECTIONS[4:]
            every = finetune_attention_modules and finetune_mlp_modules
            target_modules = "all-linear" if every else attention if finetune_attention_modules else mlp
        made = FastLanguageModel.get_peft_model(model, target_modules=target_modules or "all-linear", **adapter)
        made.given["finetune_vision_layers"] = finetune_vision_layers
        return made


FastModel = FastVisionModel


class Trainer:
    """Trains a model on rows, by TRL's and Unsloth's names. ``train()`` starts a process per GPU, or is one of the
    ranks of torchrun, accelerate or SLURM; see ``manyhands.train``, also for ``on_step`` and its like.

    ``model``: of ``FastLanguageModel``, or a hub name or folder, of which all weights are trained unless there is a
    ``peft_config`` (``peft.LoraConfig`` or its fields). ``tokenizer`` (also ``processing_class``): its chat template,
    end-of-text token and added tokens are the run's. ``train_dataset``, ``eval_dataset``: a list of dicts, a
    ``datasets.Dataset``, a pandas ``DataFrame``, an iterable of dicts, or a path. ``formatting_func``: a row to its
    text. ``args``: ``TrainingArguments``. ``overrides``: keys of a run file, ``{"data.cache": ...}``, which win.
    """

    def __init__(
        self,
        model: LanguageModel | str | os.PathLike[str],
        args: Any = None,
        *,
        tokenizer: Any = None,
        processing_class: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[Any], str] | None = None,
        on_step: Callback | None = None,
        on_evaluate: Callback | None = None,
        on_checkpoint: Callback | None = None,
        hooks: Sequence[Any] = (),
        metrics: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        callbacks = others.pop("callbacks", None)
        if type(others.get("data_collator")).__name__ in PADDING_ALONE:
            others.pop("data_collator", None)
        further = {name: value for name, value in others.items() if name in SFT}
        _refuse("Trainer", {name: value for name, value in others.items() if name not in SFT}, TRAINER)
        if not isinstance(model, (LanguageModel, str, os.PathLike)):
            raise UserError(
                f"model is a {type(model).__name__}",
                where="Trainer",
                why="its weights are in this process, and each rank reads its own" if hasattr(model, "forward") else "",
                fix="give the model of FastLanguageModel.from_pretrained, or a hub name or folder"
                + (f": {name!r}" if (name := getattr(model, "name_or_path", "")) else ""),
            )
        self.model = model if isinstance(model, LanguageModel) else LanguageModel(Path(os.fspath(model)))
        self.model.given |= _read_peft(peft_config)
        self._given = dict(self.model.given)  # training changes the model's: this trainer's run stays what it is
        self.args = args
        self.tokenizer = tokenizer if tokenizer is not None else processing_class
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        if formatting_func is not None and not callable(formatting_func):
            raise UserError(f"formatting_func is a {type(formatting_func).__name__}", fix="give a function of one row")
        self.formatting_func = formatting_func
        self.functions = {"step": on_step, "evaluation": on_evaluate, "checkpoint": on_checkpoint}
        check_functions(self.functions, hooks, metrics)
        self.hooks, self.metrics = tuple(hooks), dict(metrics or {})
        self.overrides = dict(check_overrides(overrides) or {})
        self.run: TrainOutput | None = None
        self._further = further
        self._callbacks = TransformersCallbacks(args)
        for callback in callbacks or ():
            self.add_callback(callback)
        if train_dataset is None:
            raise UserError("there is no train_dataset", where="Trainer", fix="give rows, or the path of a data file")

    def train(self, resume_from_checkpoint: bool | str | None = None, *, fresh: bool = False) -> TrainOutput:
        """Plans, trains, saves and verifies in ``output_dir``. Afterwards ``model`` answers as trained, and another
        trainer continues from there.

        A run that was interrupted is resumed, a finished one is returned; ``fresh``, or ``overwrite="number"`` of the
        arguments, starts another one beside it, in a numbered folder.
        """
        if isinstance(resume_from_checkpoint, str):
            raise UserError(
                "resume_from_checkpoint names a checkpoint",
                where="Trainer.train",
                why="a run resumes from its own newest checkpoint",
                fix="leave it out; to begin from other weights give their folder as the model",
            )
        self.model.release()
        called = self._callbacks
        called.state = TrainerState()
        called.call("on_train_begin")
        functions = {kind: called.function(kind, own) for kind, own in self.functions.items()}
        numbered = read_arguments(self.args).get("overwrite") == "number"
        with _keys_in_python():
            folder = start(
                self.load,
                fresh=fresh or numbered,
                callbacks=Callbacks(functions),
                hooks=self.hooks,
                metrics=self.metrics,
            )
        self.run = TrainOutput(folder)
        self.model.trained(folder, self.run.outputs)
        called.call("on_train_end")
        return self.run

    def plan(self, gpus: int | str | None = None) -> Plan:
        """What ``train`` would do, and why; as ``manyhands.plan``."""
        with _keys_in_python():
            return plan(self.load().config, gpus=gpus)

    @property
    def state(self) -> TrainerState:
        """``log_history``, ``global_step``, ``epoch``, ``best_metric`` of the run; empty before ``train``."""
        if self.run is None:
            return self._callbacks.state
        return TrainerState(self.run.rows, self.run.plan.num_steps, is_world_process_zero=get_rank() == 0)

    @property
    def processing_class(self) -> Any:
        return self.tokenizer

    def is_world_process_zero(self) -> bool:
        return get_rank() == 0

    def add_callback(self, callback: Any) -> None:
        """A ``TrainerCallback`` of transformers, or its class: ``on_train_begin``, ``on_train_end``, and for each
        logged row ``on_step_end``, ``on_log``, ``on_evaluate``, ``on_save``, in this process, without the model.
        ``EarlyStoppingCallback`` is the run's own (``stop.patience``).
        """
        patience = early_stopping(callback)
        if patience is not None:
            self.overrides["stop.patience"] = patience
        else:
            self._callbacks.add(callback)

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Losses of the trained model: the run's last evaluation, or ``manyhands eval`` on other rows."""
        if self.run is None:
            raise UserError(
                "the model has not been trained",
                where="Trainer.evaluate",
                fix="call train() first; eval_on_start=True evaluates before the first step, for state.log_history",
            )
        if eval_dataset is None and self.run.evaluations:
            logs = [row for row in self.state.log_history if "eval_loss" in row][-1]
            return {name.replace("eval_", f"{metric_key_prefix}_", 1): value for name, value in logs.items()}
        cache = Path(self.run.config.data.cache)
        data = None if eval_dataset is None else write_rows(self._format(eval_dataset, "eval_dataset"), cache, "eval")
        asked = {"folder": str(self.run.folder), "data": data, "with_base": False, "as_json": True}
        found = json.loads(run_module("manyhands.infer", "evaluate", json.dumps(asked)))
        return {f"{metric_key_prefix}_{name}": value for name, value in found["columns"]["measured"].items()}

    def predict(self, *args: Any, **options: Any) -> None:
        raise UserError(
            "there is no predict",
            where="Trainer.predict",
            fix="model.generate(prompts) and model.generate_file(input, output) answer; evaluate(rows) measures losses",
        )

    def save_model(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Copies the run's PEFT adapter or model to ``folder``; without one it stays where it is."""
        if folder is not None or self.run is None:
            self.model.save_pretrained(folder or "")

    def push_to_hub(self, commit_message: str | None = None, *, dataset_name: Any = None, **options: Any) -> str:
        """``model.push_to_hub`` to ``hub_model_id`` of the arguments. The card names the data sets by itself."""
        return self.model.push_to_hub(repository_of(self.args), **options)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Prints them, one a line."""
        width = max((len(name) for name in metrics), default=0)
        print("\n".join([f"{split}:", *(f"  {name:<{width}}  {value}" for name, value in sorted(metrics.items()))]))

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = False) -> None:
        """Writes them to ``{split}_results.json`` in the run's folder."""
        if self.run is not None:
            write_json(self.run.folder / f"{split}_results.json", dict(metrics))

    def save_state(self) -> None:
        """Nothing: the run's folder has metrics.jsonl and its checkpoints."""

    def load(self) -> LoadedRun:
        """The run that the arguments mean, with its data written where they were in memory. Raises ``UserError``."""
        tokenizer = {} if self.tokenizer is None else tokenizer_differences(self.tokenizer, self.model)
        arguments = {**read_arguments(self.args), **self._further}
        model = self._given | read_model_options(arguments.pop("model_init_kwargs", None) or {})
        if arguments.get("max_length") or arguments.get("max_seq_length"):
            model.pop("max_seq_length", None)  # of the model: the most it is loaded for
        given = {**model, **tokenizer, **arguments}
        cache = Path(str(self.overrides.get("data.cache", DataSection.model_fields["cache"].default)))
        given["train_dataset"] = write_rows(self._format(self.train_dataset, "train_dataset"), cache, "train")
        if self.eval_dataset is not None:
            given["eval_dataset"] = write_rows(self._format(self.eval_dataset, "eval_dataset"), cache, "validation")
        return load_given(given, self.overrides)

    def _format(self, data: Any, name: str) -> Any:
        """Rows as ``formatting_func`` writes them."""
        function = self.formatting_func
        if function is None:
            return data
        return lambda: ({"text": _check_text(function(row), name)} for row in list_rows(data, name))


def _read_adapter(folder: Path) -> dict[str, Any]:
    """What a folder with an adapter means, by the names of ``FastLanguageModel``; {} for any other folder or name."""
    if not any((place / CONFIG).is_file() for place in (folder, folder / "adapter")):
        return {}
    found = locate_adapter(folder)
    fields = read_adapter_config(found)
    method = describe_method(found, fields)
    targets = method.target_modules
    return {
        "adapter": str(found.resolve()),
        "model_name": fields["base_model_name_or_path"],
        "revision": fields.get("revision"),
        "r": method.rank,
        "lora_alpha": method.alpha,
        "lora_dropout": float(fields.get("lora_dropout") or 0),
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "modules_to_save": list(method.modules_to_save) or None,
        "use_rslora": method.rslora,
        "use_dora": method.dora,
    }


PEFT_FIELDS = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": None, "modules_to_save": None,
               "use_rslora": False, "use_dora": False, "bias": "none", "init_lora_weights": True,
               "layers_to_transform": None, "layers_pattern": None, "loftq_config": None}  # fmt: skip
# Of a LoraConfig, and nothing of the training: what the library keeps for itself.
PEFT_ASIDE = names("task_type peft_type inference_mode base_model_name_or_path revision auto_mapping peft_version")


def _read_peft(config: Any) -> dict[str, Any]:
    """A ``LoraConfig``, or its fields."""
    if config is None:
        return {}
    if not isinstance(config, Mapping) and not hasattr(config, "peft_type"):
        raise UserError(f"peft_config is a {type(config).__name__}", fix="give peft.LoraConfig(...), or its fields")
    given = dict(config) if isinstance(config, Mapping) else vars(config)
    if str(getattr(given.get("peft_type"), "value", given.get("peft_type", "LORA"))) != "LORA":
        raise UserError(f"peft_config is a {type(config).__name__}", fix="give peft.LoraConfig(...)")
    default = {} if isinstance(config, Mapping) else vars(type(config)())
    further = given.keys() - PEFT_FIELDS.keys() - PEFT_ASIDE
    changed = {name: given[name] for name in sorted(further) if name not in default or given[name] != default[name]}
    _refuse("peft_config", changed, GET_PEFT_MODEL)
    return {name: given.get(name, default) for name, default in PEFT_FIELDS.items()}


HOOKS = "give on_step, on_evaluate or on_checkpoint, functions of a row of metrics.jsonl, or hooks and metrics"
FROM_PRETRAINED = {
    "token": "set HF_TOKEN in the environment: a run's files hold no secrets",
    "fast_inference": "answers come from transformers",
    "rope_scaling": "it is that of the model's config.json",
    "attn_implementation": "the fastest attention kernel that passes a self-test is used",
}
GET_PEFT_MODEL = {
    "target_parameters": "adapters are on modules: name them in target_modules",
    "rank_pattern": "all modules have one rank",
    "alpha_pattern": "all modules have one alpha",
}
# Collators that decide nothing but padding.
PADDING_ALONE = names("NoneType DataCollatorForSeq2Seq DataCollatorWithPadding UnslothVisionDataCollator")
TRAINER = {
    "data_collator": "samples are collated by the run: packed, or padded",
    "compute_metrics": HOOKS,
    "preprocess_logits_for_metrics": HOOKS,
    "optimizers": "name one: TrainingArguments(optim=...)",
    "optimizer_cls_and_kwargs": "name one: TrainingArguments(optim=...)",
    "model_init": "give the model",
    "compute_loss_func": "the loss is the mean over the loss tokens of a step",
}


def _refuse(where: str, given: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """UserError for parameters that would not act; known ones that are None, False or empty ask for nothing."""
    from manyhands.config.text import nearest_name

    details = []
    for name, value in given.items():
        if name in reasons and (value is None or value is False or (isinstance(value, (list, tuple)) and not value)):
            continue
        near = None if name in reasons else nearest_name(name, sorted({*reasons, *SFT}))
        details.append(f"`{name}`: {reasons.get(name) or (f'did you mean {near}?' if near else 'there is none')}")
    if details:
        raise UserError("parameters that are not available", where=where, details=details, fix="remove them")


@contextmanager
def _keys_in_python() -> Iterator[None]:
    """Where an error names a key of a run, which a script has no file for, it says how a trainer is given one."""
    try:
        yield
    except UserError as error:
        key = next((key for key in re.findall(r"\w+\.\w+", error.fix) if key in table()), None)
        if key is not None and "overrides" not in error.fix:
            error.fix += f"; of a trainer: overrides={{'{key}': ...}}"
        raise


def _check_text(text: Any, name: str) -> str:
    if isinstance(text, str):
        return text
    raise UserError(
        f"formatting_func returned a {type(text).__name__}, not text",
        where=name,
        fix="return the text of one row: it is called for each row, not for batches",
    )


def tokenizer_differences(tokenizer: Any, model: LanguageModel) -> dict[str, Any]:
    """``chat_template``, ``eos_token`` and ``new_tokens`` where they are not those of the model's own tokenizer.

    UserError where the run would train other token ids than ``tokenizer`` makes. The padding token does not matter:
    padding is not trained.
    """
    from manyhands.data.tokenize.tokenizer import load_tokenizer
    from manyhands.facts.hub import locate_model

    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    if not hasattr(tokenizer, "get_vocab"):
        fix = "give the tokenizer that from_pretrained returned, or leave it out"
        raise UserError(f"the tokenizer is a {type(tokenizer).__name__}", fix=fix)
    given = model.given
    folder = locate_model(given["model_name"], given.get("revision"), False)
    own = load_tokenizer(Path(folder), trust_remote_code=bool(given.get("trust_remote_code")))
    found: dict[str, Any] = {}
    if tokenizer.chat_template != own.chat_template:
        found["chat_template"] = tokenizer.chat_template
    if tokenizer.eos_token != own.eos_token:
        found["eos_token"] = tokenizer.eos_token
    before, now = own.get_vocab(), tokenizer.get_vocab()
    added = sorted((token for token in now.keys() - before.keys()), key=now.__getitem__)
    if any(now.get(token) != number for token, number in before.items()):
        raise UserError(
            "the tokenizer is not the model's",
            where=str(getattr(tokenizer, "name_or_path", "")),
            why=f"tokens have other numbers than in {folder}",
            fix="give the tokenizer that from_pretrained returned, or leave it out",
        )
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if plain := [token for token in added if token not in special]:
        raise UserError(
            f"the tokenizer has {count_of(len(plain), 'added token')} not marked as special",
            why=f"such as {plain[0]!r}; a run adds special tokens only",
            fix="add them with tokenizer.add_tokens([...], special_tokens=True)",
        )
    if tokenizer.bos_token != own.bos_token:
        raise UserError(
            f"the tokenizer begins texts with {tokenizer.bos_token!r}, the model's own with {own.bos_token!r}",
            fix="leave bos_token as it is",
        )
    if added:
        found["new_tokens"] = added
    return found
