"""TheWorld's flat JSON: a vision-language model trained by transformers' Trainer.

Its switches say which parts are trained: the projector always, vision tower and language model unless they are frozen.
Its second tower, a video VAE (Cosmos) whose latents a projector of its own leads to the text, is refused by name: no
checkpoint of Gemma has it, and transformers has no such model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.config.dialects import transformers as hf
from manyhands.config.dialects.translation import Translator, clean_name, names
from manyhands.config.keys import show

TOOL = "TheWorld"
REFUSES_UNKNOWN = True
NO_IMAGES = "the file names no images (`image_folder`)"
NO_WORLD = (
    "the world model (a video VAE as a second tower, with a projector of its own) is code of TheWorld's that no "
    "published model has; a run without it would be another run"
)
IMAGE_SETS = ("llava_pretrain", "spatial_rgpt")
ALIASES: Mapping[str, str] = {
    "num_train_epochs": "num_epochs",
    "per_device_train_batch_size": "batch_size",
    "gradient_checkpointing": "use_gradient_checkpointing",
    "per_device_eval_batch_size": "eval_batch_size",
}
ALREADY: Mapping[str, str] = {
    "num_workers": "`data.workers: auto` takes as many as the batches need",
    "pin_memory": "batches are copied from pinned memory",
    "persistent_workers": "always so",
    "prefetch_factor": "batches are prepared ahead",
    "save_safetensors": "always so",
    "streaming": "rows are tokenized once, into a cache",
    "log_to_tensorboard": "",
    "ddp_find_unused_parameters": "only trained weights are reduced",
}
WORLD = names(
    """
    cosmos_model_name world_projection_mode projection_architecture num_world_steps max_world_steps
    random_projection_init load_full_cosmos_pipeline
    """
)
IMAGES = WORLD | names("image_folder draw_bboxes question_template")
UPLOADS = names("push_to_hub hub_model_id hub_strategy hub_private_repo hf_token")
KEYS = frozenset(ALREADY) | frozenset(ALIASES.values()) | IMAGES | UPLOADS | names(
    """
    model_name enable_world freeze_gemma_vision freeze_gemma_language freeze_cosmos_vae dataset_name num_samples
    train_dataset_path eval_dataset_path learning_rate gradient_accumulation_steps max_steps max_seq_length
    mixed_precision output_dir save_steps save_total_limit resume_from_checkpoint do_eval eval_steps logging_steps
    log_to_wandb wandb_project wandb_run_name warmup_steps weight_decay max_grad_norm
    """
)  # fmt: skip
MARKS = IMAGES | names(
    "use_gradient_checkpointing batch_size freeze_gemma_vision freeze_gemma_language freeze_cosmos_vae enable_world"
)
OPEN: frozenset[str] = frozenset()
DEFAULTS: Mapping[str, tuple[str, Any]] = {
    "learning_rate": ("optimizer.learning_rate", 1e-4),
    "weight_decay": ("optimizer.weight_decay", 0.01),
    "max_seq_length": ("data.max_length", 2048),
    "logging_steps": ("log.every_steps", 10),
    "save_total_limit": ("checkpoint.keep_last", 3),
}


def translate(t: Translator) -> None:
    """Every key of a TheWorld file."""
    t.aliases = ALIASES
    for key, why in ALREADY.items():
        t.already(key, why)
    _map_model(t)
    _map_data(t)
    hf.map_optimizer(t)
    hf.map_schedule(t, default="linear", warmup=("warmup_steps", 100))
    hf.map_length(t, epochs=3)
    hf.map_batch(t, per_device=4, accumulation=4)
    precision = str(t.get("mixed_precision", "bf16"))
    if precision == "bf16":
        t.map("mixed_precision", "model.dtype", "bfloat16")
    elif precision == "fp16":
        t.substitute("mixed_precision", {"model.dtype": "bfloat16"}, "float16 is not available: bfloat16")
    elif precision == "no":
        t.already("mixed_precision", "model.dtype decides")
    else:
        t.refuse("mixed_precision", f"got {show(precision)}, allowed: no, fp16, bf16")
    if t.has("gradient_checkpointing"):
        asked = "full" if t.flag("gradient_checkpointing") else "none"
        t.map("gradient_checkpointing", "parallel.activation_checkpointing", asked)
    _map_intervals(t)
    for key, (native, value) in DEFAULTS.items():
        if not t.has(key):
            t.carry(native, value, "TheWorld's default")


def _map_model(t: Translator) -> None:
    t.map("model_name", "model.name")
    for key in WORLD:
        if t.get(key) in (None, False):
            t.already(key)
        elif key in ("num_world_steps", "max_world_steps") and t.get("enable_world") is False:
            t.already(key, "`enable_world` is false")
        else:
            t.refuse(key, NO_WORLD)
    for key in ("draw_bboxes", "question_template"):
        t.only(
            key, (None, False), "questions and boxes are drawn by TheWorld's own data sets: write them into the rows"
        )
    t.only("enable_world", (False,), f"{NO_WORLD}: the model without it has `enable_world: false`")
    t.only("freeze_cosmos_vae", (True,), NO_WORLD)
    if _has_images(t):
        _map_parts(t)
    elif t.has("freeze_gemma_language"):
        if t.flag("freeze_gemma_language"):
            _map_parts(t)  # the plan refuses it where no row has an image
        else:
            t.map("freeze_gemma_language", "method.name", "full")
            t.only("freeze_gemma_vision", (True,), f"{NO_IMAGES}: nothing would pass through the vision tower")
    else:
        t.carry("method.name", "full", "TheWorld has no adapters")
        t.only("freeze_gemma_vision", (True,), f"{NO_IMAGES}: nothing would pass through the vision tower")


def _has_images(t: Translator) -> bool:
    return t.get("image_folder") is not None or t.get("dataset_name") in IMAGE_SETS


def _map_parts(t: Translator) -> None:
    """The projector is always trained; TheWorld freezes the tower and the language model unless told otherwise."""
    vision = "frozen" if t.get("freeze_gemma_vision") is None or t.flag("freeze_gemma_vision") else "trained"
    language = "frozen" if t.get("freeze_gemma_language") is None or t.flag("freeze_gemma_language") else "full"
    parts = {"vision": vision, "projector": "trained", "language": language}
    given = [key for key in ("freeze_gemma_language", "freeze_gemma_vision") if t.has(key)]
    for key in given[1:]:
        t.already(key, "`method.parts` has it")
    if given:
        t.map(given[0], "method.parts", parts)
    else:
        t.carry("method.parts", parts, "TheWorld trains the projector alone")


def _map_data(t: Translator) -> None:
    if t.get("dataset_name") in IMAGE_SETS and t.get("train_dataset_path") is not None:
        t.already("dataset_name", "`train_dataset_path` names the rows")
    else:
        t.only("dataset_name", (None, "custom"), "it is looked up in TheWorld's own code: write custom, and name the "
               "rows in `train_dataset_path`")  # fmt: skip
    t.map("train_dataset_path", "data.train")
    t.map("eval_dataset_path", "data.validation")
    if t.get("image_folder") is not None:
        t.map("image_folder", "data.image_folder")
    t.carry("data.validation_fraction", 0, "TheWorld holds nothing out")
    if t.has("num_samples"):
        t.map("num_samples", "data.max_samples", t.integer("num_samples"))
    if t.has("max_seq_length"):
        t.map("max_seq_length", "data.max_length", t.integer("max_seq_length"))
    t.carry("data.too_long", "truncate", "TheWorld cuts the end off")


def _map_intervals(t: Translator) -> None:
    for key, native in (("save_steps", "checkpoint.every_steps"), ("logging_steps", "log.every_steps"),
                        ("save_total_limit", "checkpoint.keep_last")):  # fmt: skip
        if t.has(key):
            t.map(key, native, t.integer(key))
    t.carry("checkpoint.every_steps", 500, "TheWorld's default")
    if t.flag("do_eval"):
        t.map("do_eval", "evaluate.every_steps", t.integer("eval_steps", 500))
        t.already("eval_steps")
    else:
        t.already("do_eval")
        t.already("eval_steps", "`do_eval` is false")
    t.only("resume_from_checkpoint", (None, False, "latest"), "a run resumes from its own newest checkpoint")
    for key in ("log_to_wandb", "wandb_project", "wandb_run_name"):
        if t.get(key) in (None, False):
            t.already(key)
        else:
            t.ignore(key, "trackers are opened by log.wandb, log.mlflow and log.trackio alone")
    for key in UPLOADS:
        if t.get(key) in (None, False):
            t.already(key)
        else:
            t.ignore(key, "nothing is uploaded: `hf upload` takes the run's folder")
    if t.has("output_dir"):
        folder, _, name = str(t.get("output_dir")).rstrip("/").rpartition("/")
        t.map("output_dir", {"output.dir": folder or ".", "name": clean_name(name)})
