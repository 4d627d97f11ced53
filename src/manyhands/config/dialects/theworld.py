"""TheWorld's flat JSON: a vision-language model trained by transformers' Trainer.

Images are not available yet. A file that asks for them, or for the projector alone, is refused: training on its text
would be another run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.config.dialects import transformers as hf
from manyhands.config.dialects.translation import Translator, clean_name, names
from manyhands.config.keys import show

TOOL = "TheWorld"
REFUSES_UNKNOWN = True
NO_IMAGES = "images are not available yet, and training on the text alone would be another run"
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
IMAGES = names(
    """
    cosmos_model_name image_folder draw_bboxes question_template world_projection_mode projection_architecture
    num_world_steps max_world_steps random_projection_init load_full_cosmos_pipeline
    """
)
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
    for key in IMAGES:
        if t.get(key) in (None, False):
            t.already(key)
        elif key in ("num_world_steps", "max_world_steps") and t.get("enable_world") is False:
            t.already(key, "`enable_world` is false")
        else:
            t.refuse(key, NO_IMAGES)
    t.only("enable_world", (False,), f"{NO_IMAGES}: a model without images has `enable_world: false`")
    if t.has("freeze_gemma_language"):
        if t.flag("freeze_gemma_language"):
            t.refuse("freeze_gemma_language", "only the projector would be trained, which needs images, and these are "
                     "not available yet: set it to false to train the language model on text")  # fmt: skip
        else:
            t.map("freeze_gemma_language", "method.name", "full")
    else:
        t.carry("method.name", "full", "TheWorld has no adapters")
    for key, part in (("freeze_gemma_vision", "the vision tower"), ("freeze_cosmos_vae", "the world model")):
        t.only(key, (True,), f"{part} is not trained: {NO_IMAGES}")


def _map_data(t: Translator) -> None:
    t.only("dataset_name", (None, "custom"), f"{NO_IMAGES}: for text write custom, with `train_dataset_path`")
    t.map("train_dataset_path", "data.train")
    t.map("eval_dataset_path", "data.validation")
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
