"""TheWorld's flat JSON: a vision-language model trained by transformers' Trainer.

Its switches say which parts of Gemma are trained: ``freeze_gemma_vision`` is for the vision tower and its projector,
``freeze_gemma_language`` for the language model, and both are frozen unless they are false. Its second tower, a video
VAE (Cosmos) whose latents a projector of its own leads to the text, is refused by name: no checkpoint of Gemma has it,
and transformers has no such model. It is there unless ``enable_world`` is false. Keys that begin with ``_`` are
comments (``TrainingConfig.from_dict``).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.config.text import names, show
from manyhands.importers import shared
from manyhands.importers import transformers as hf
from manyhands.importers.shared import map_dtype
from manyhands.importers.translation import Translator, split_output

TOOL = "TheWorld"
REFUSES_UNKNOWN = True
NO_IMAGES = "the file names no images (`image_folder`)"
NO_WORLD = (
    "the world model (a video VAE as a second tower, with a projector of its own) is code of TheWorld's that no "
    "published model has; a run without it would be another run"
)
IMAGE_SETS = ("llava_pretrain", "spatial_rgpt")
LLAVA = "liuhaotian/LLaVA-CC3M-Pretrain-595K"  # the set that `llava_pretrain` is: chat.json, and images.zip
LLAVA_ROWS = 595_375
LLAVA_FOLDER = "data/llava-cc3m/images"
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
    "ddp_find_unused_parameters": "only trained weights are reduced",
}
WORLD = names(
    """
    cosmos_model_name world_projection_mode projection_architecture num_world_steps max_world_steps
    random_projection_init load_full_cosmos_pipeline freeze_cosmos_vae
    """
)
IMAGES = WORLD | names("image_folder draw_bboxes question_template")
UPLOADS = names("push_to_hub hub_model_id hub_strategy hub_private_repo hf_token")
KEYS = frozenset(ALREADY) | frozenset(ALIASES.values()) | IMAGES | UPLOADS | names(
    """
    model_name enable_world freeze_gemma_vision freeze_gemma_language dataset_name num_samples log_to_tensorboard
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
    for key in [key for key in t.values if key.startswith("_")]:
        t.no_op(key, "a comment")
    for key, why in ALREADY.items():
        t.no_op(key, why)
    _map_model(t)
    _map_data(t)
    hf.map_optimizer(t)
    hf.map_schedule(t, default="linear", warmup=("warmup_steps", 100))
    hf.map_length(t, epochs=3)
    hf.map_batch(t, per_device=4, accumulation=4)
    precision = str(t.get("mixed_precision", "bf16"))
    if precision in ("bf16", "fp16"):
        map_dtype(t, "mixed_precision", precision)
    elif precision == "no":
        t.no_op("mixed_precision", "model.dtype decides")
    else:
        t.refuse("mixed_precision", f"got {show(precision)}, allowed: no, fp16, bf16")
    if t.has("gradient_checkpointing"):
        asked = "full" if t.flag("gradient_checkpointing") else "none"
        t.map("gradient_checkpointing", "parallel.activation_checkpointing", asked)
    t.map("log_to_tensorboard", "log.tensorboard", t.flag("log_to_tensorboard"))
    _map_intervals(t)
    for key, (native, value) in DEFAULTS.items():
        if not t.has(key):
            t.set_tool_default(native, value, "TheWorld's default")


def _map_model(t: Translator) -> None:
    t.map("model_name", "model.name")
    _map_world(t)
    for key in ("draw_bboxes", "question_template"):
        t.only(
            key, (None, False), "questions and boxes are drawn by TheWorld's own data sets: write them into the rows"
        )
    vision, language = (t.flag(f"freeze_gemma_{part}", True) for part in ("vision", "language"))
    given = [key for key in ("freeze_gemma_language", "freeze_gemma_vision") if t.has(key)]
    if _has_images(t):
        held = "frozen" if vision else "trained"
        parts = {"vision": held, "projector": held, "language": "frozen" if language else "full"}
        if vision and language:
            t.refuse(
                given[0] if given else "freeze_gemma_language",
                "no part of Gemma would be trained: TheWorld trains its world model's projector alone; set "
                "freeze_gemma_vision (the tower and its projector) or freeze_gemma_language to false",
            )
        for key in given:
            t.map(key, "method.parts", parts, "" if key == given[0] else "`method.parts` has it")
        t.set_tool_default("method.parts", parts, "TheWorld's default")
    elif language and (given or _is_whole(t)):
        t.refuse("freeze_gemma_language", f"{NO_IMAGES}, and true freezes the language model: set it to false")
    else:
        t.map("freeze_gemma_language", "method.name", "full")
        t.set_tool_default("method.name", "full", "TheWorld has no adapters")
    if not _has_images(t):
        t.only("freeze_gemma_vision", (True,), f"{NO_IMAGES}: nothing would pass through the vision tower")


def _map_world(t: Translator) -> None:
    """``enable_world`` and the keys of the world model, which do not matter without it."""
    enabled = t.flag("enable_world", _is_whole(t))
    if enabled:
        default = "" if t.has("enable_world") else "left out it is true in TheWorld: "
        t.refuse("enable_world", f"{default}{NO_WORLD}: the model without it has `enable_world: false`")
    t.no_op("enable_world")
    for key in WORLD & t.values.keys():
        if key == "freeze_cosmos_vae" and not t.flag(key, True):
            t.refuse(key, "TheWorld itself refuses false without the world model" if not enabled else NO_WORLD)
        elif enabled:
            t.ignore(key, "not looked at, because of `enable_world`")
        else:
            t.no_op(key, "`enable_world` is false" if t.has("enable_world") else "")


def _is_whole(t: Translator) -> bool:
    """Whether the file is a run, not a few keys to be added to one."""
    return any(t.has(key) for key in ("model_name", "dataset_name", "train_dataset_path", "image_folder"))


def _has_images(t: Translator) -> bool:
    return t.get("image_folder") is not None or t.get("dataset_name") in IMAGE_SETS


def _map_data(t: Translator) -> None:
    if t.get("dataset_name") == "llava_pretrain" and t.get("train_dataset_path") in (None, LLAVA):
        _map_llava(t)
        return
    if t.get("dataset_name") in IMAGE_SETS and t.get("train_dataset_path") is not None:
        t.no_op("dataset_name", "`train_dataset_path` names the rows")
    else:
        t.only("dataset_name", (None, "custom"), "it is looked up in TheWorld's own code: write custom, and name the "
               "rows in `train_dataset_path`")  # fmt: skip
    t.map("train_dataset_path", "data.train")
    t.map("eval_dataset_path", "data.validation")
    if t.get("image_folder") is not None:
        t.map("image_folder", "data.image_folder")
    t.set_tool_default("data.validation_fraction", 0, "TheWorld holds nothing out")
    t.map("num_samples", "data.max_samples", t.integer("num_samples"))
    _map_length(t)


def _map_llava(t: Translator) -> None:
    """LLaVA's pretraining set from the hub; images from the folder where TheWorld unpacks them, else the hub."""
    rows = t.integer("num_samples")
    source = {"path": f"hub:{LLAVA}", "files": ["chat.json"], "format": "sharegpt"}
    source |= {"split": f"train[:{rows}]"} if rows else {}
    t.map("dataset_name", "data.train", [source], f"{LLAVA}; an image stands where the text has <image>, in TheWorld "
          "in front of it")  # fmt: skip
    t.map("num_samples", {}, why="the first rows of the set")
    t.no_op("train_dataset_path", "the set that `dataset_name` names")
    t.no_op("eval_dataset_path", "TheWorld does not read it with this set")
    folder = str(t.get("image_folder", LLAVA_FOLDER))
    found = next((path for start in (t.context.folder, Path()) if (path := start / folder).is_dir()), None)
    if found is None:
        images, why = f"hub:{LLAVA}/images.zip", f"{folder} is not there: the images of the set are fetched"
    else:
        images, why = str(found), ""
    t.map("image_folder", "data.image_folder", images, why)
    t.set_tool_default("data.image_folder", images, why or "TheWorld's default")
    t.set_tool_default("data.bad_images", "skip", "TheWorld leaves out rows whose image is missing or damaged")
    held = max(100, (rows or LLAVA_ROWS) // 100) / (rows or LLAVA_ROWS) if t.flag("do_eval") else 0
    if held >= 1:
        t.refuse("num_samples", f"{rows}: TheWorld holds out 100 of them with `do_eval`, and nothing would be trained")
    else:
        t.set_tool_default("data.validation_fraction", held,
                           "TheWorld holds out 1 %, at least 100 rows" if held else "TheWorld "
                "holds nothing out")  # fmt: skip
    _map_length(t)


def _map_length(t: Translator) -> None:
    t.map("max_seq_length", "data.max_length", t.integer("max_seq_length"))
    t.set_tool_default("data.too_long", "drop", "TheWorld leaves longer samples out")


def _map_intervals(t: Translator) -> None:
    for key, native in (("save_steps", "checkpoint.every_steps"), ("logging_steps", "log.every_steps"),
                        ("save_total_limit", "checkpoint.keep_last")):  # fmt: skip
        t.map(key, native, t.integer(key))
    t.set_tool_default("checkpoint.every_steps", 500, "TheWorld's default")
    if t.flag("do_eval"):
        t.map("do_eval", "evaluate.every_steps", t.integer("eval_steps", 500))
        t.no_op("eval_steps")
    else:
        t.no_op("do_eval")
        t.no_op("eval_steps", "`do_eval` is false")
    t.only("resume_from_checkpoint", (None, False, "latest"), "a run resumes from its own newest checkpoint")
    opened = ["wandb"] * t.flag("log_to_wandb")
    shared.map_trackers(t, {"log_to_wandb": opened}, {"wandb": "wandb_project"})
    shared.map_tracker_options(t, opened)
    why = "nothing is uploaded: `hf upload` takes the run's folder"
    hf.note_so(t, dict.fromkeys(UPLOADS, ((False,), why)))
    t.map("output_dir", split_output(t.get("output_dir")))
