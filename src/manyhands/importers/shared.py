"""What several tools' files say alike: dtypes, trackers, the parts of a model of images, experts. Pure."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from manyhands.config.sources import IMAGES
from manyhands.config.text import names
from manyhands.importers.translation import Translator

NO_FLOAT16 = "float16 is not available: bfloat16"
DTYPES: Mapping[str, str] = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "fp32": "float32",
    "float32": "float32",
}  # fmt: skip


def map_dtype(t: Translator, key: str, name: str) -> None:
    """``model.dtype`` from one of the names in ``DTYPES``."""
    if DTYPES[name] == "float16":
        t.substitute(key, {"model.dtype": "bfloat16"}, NO_FLOAT16)
    else:
        t.map(key, "model.dtype", DTYPES[name])


def map_fp16(t: Translator, key: str) -> None:
    """A key that switches float16 on."""
    if t.flag(key):
        map_dtype(t, key, "fp16")
    t.no_op(key)


# Trackers that there are: what transformers calls their project where nothing else does, and the variable that may.
SINKS: Mapping[str, tuple[str, str]] = {
    "wandb": ("huggingface", "WANDB_PROJECT"),
    "mlflow": ("Default", "MLFLOW_EXPERIMENT_NAME"),
    "trackio": ("huggingface", ""),
}
NO_TRACKER = "is not available: metrics go to the run's folder, and to what log.wandb, log.mlflow and log.trackio name"
# Keys of trackers without a counterpart, in whichever tool.
TRACKER_OPTIONS: Mapping[str, str] = {
    "wandb_entity": "W&B takes it from the variable WANDB_ENTITY",
    "wandb_run_group": "W&B takes it from the variable WANDB_RUN_GROUP",
    **dict.fromkeys(("wandb_name", "wandb_run_name", "trackio_run_name"), "a tracker's run is named as the run is"),
    "wandb_run_id": "the run continues its own in the tracker",
    "wandb_watch": "gradients are not sent to trackers",
    "wandb_log_model": "no model is sent to trackers",
    **dict.fromkeys(
        ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), "Trackio keeps its runs on this machine"
    ),
}


def map_trackers(
    t: Translator,
    asked: Mapping[str, Sequence[str]],
    project_keys: Mapping[str, str],
    projects: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Trackers that the keys of ``asked`` open. A project is that of the tracker's key of ``project_keys``, else that
    of ``projects``, of the tracker's own variable, or transformers' default; a tracker that is not available is a
    substitution.
    """
    projects = {**projects, **{tracker: t.get(key) for tracker, key in project_keys.items()}}
    for tracker, key in project_keys.items():
        if any(tracker in trackers for trackers in asked.values()):
            t.map(key, f"log.{tracker}", str(t.get(key)))
        t.no_op(key, f"only {tracker} reads it" if t.has(key) else "")
    for key, trackers in asked.items():
        native: dict[str, Any] = {}
        for one in trackers:
            if one == "tensorboard":
                native["log.tensorboard"] = True
            elif one in SINKS:
                default, variable = SINKS[one]
                native[f"log.{one}"] = str(projects.get(one) or t.context.variables.get(variable) or default)
        missing = [one for one in trackers if one not in SINKS and one != "tensorboard"]
        if missing and t.has(key):
            t.substitute(key, native, f"{' and '.join(missing)} {NO_TRACKER}")
        elif trackers:
            t.map(key, native)
        t.no_op(key)


def map_tracker_options(t: Translator, opened: Collection[str], options: Mapping[str, str] = TRACKER_OPTIONS) -> None:
    """Substitutes ``options`` of the trackers in ``opened`` with their reason, unless the environment has them."""
    for key, why in options.items():
        if key not in t.known:
            continue
        tracker = key.removeprefix("hf_").partition("_")[0]
        is_told = t.get(key) not in (None, False, "false")
        is_so = str(t.get(key)) == t.context.variables.get(key.upper())
        if is_told and not is_so and ("all" in opened or tracker in opened):
            t.substitute(key, {}, why)
        t.no_op(key, "" if tracker in opened or not is_told else f"only {tracker} reads it")


# Modules that lead a tower's features to the text, as transformers' models call them.
PROJECTORS = names("multi_modal_projector merger deepstack_merger_list connector")
TOWER_ADAPTERS = (
    "adapters are for the language model alone: set it to true, or train all weights of the tower by "
    "`method.parts.vision: trained` in a native file"
)
PROJECTOR_IS_KEPT = (
    "adapters are for the language model alone, and the projector stays as it is: name it as a module to save, which "
    "trains it, or write `method.parts.projector: trained` in a native file"
)


def is_projector(module: Any) -> bool:
    """Whether a name of a module to save (``visual.merger``) is a projector's."""
    return any(part in PROJECTORS for part in str(module).split("."))


def split_projector(modules: Sequence[Any]) -> tuple[list[str], bool]:
    """(the other modules to save, whether the projector is one)."""
    return [str(name) for name in modules if not is_projector(name)], any(map(is_projector, modules))


def takes_images(model_config: Mapping[str, Any] | None) -> bool:
    """Whether config.json is that of a model with a vision tower."""
    return model_config is not None and bool(model_config.get("vision_config"))


def row_has_images(row: Mapping[str, Any]) -> bool:
    """Whether a row has a column of images, or parts that are images."""
    if any(row.get(name) not in (None, "", []) for name in IMAGES):
        return True
    turns: Sequence[Any] = next((row[name] for name in ("messages", "prompt") if isinstance(row.get(name), list)), [])
    parts = [part for turn in turns if isinstance(turn, Mapping) for part in turn.get("content") or ()]
    return any(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)


PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")  # in config.json
STACKS = {"gate_up_proj", "down_proj"}


def _read_text_config(t: Translator) -> Mapping[str, Any] | None:
    """config.json of ``model.name``, which is mapped before, or the part of it that its decoder has."""
    look, name = t.context.model_config, t.mapping.get("model", {}).get("name")
    config = look(name) if look is not None and isinstance(name, str) else None
    text = (config or {}).get("text_config")
    return text if isinstance(text, Mapping) else config


def _experts_per_token(config: Mapping[str, Any] | None) -> int | None:
    return next((config[one] for one in PER_TOKEN if isinstance(config.get(one), int)), None) if config else None


def map_all_linear(t: Translator, key: str, why: str = "") -> None:
    """``method.target_modules: all-linear``: in a mixture experts too, which other tools only adapt as parameters.
    Without ``key`` it is the tool's default.
    """
    named = t.get("lora_target_parameters")
    is_named = isinstance(named, list) and {str(name).rpartition(".")[2] for name in named} >= STACKS
    more = f"with all experts, which {t.tool} does not adapt: name layers, such as q_proj, to adapt fewer"
    adapts_more = not is_named and _experts_per_token(_read_text_config(t))
    if not t.has(key):
        default = f"{t.tool}'s default" + (f", {more}" if adapts_more else "")
        t.set_tool_default("method.target_modules", "all-linear", default)
    elif adapts_more:
        t.substitute(key, {"method.target_modules": "all-linear"}, more)
    else:
        t.map(key, "method.target_modules", "all-linear", why)


def map_router_loss(t: Translator, key: str, strength: float | Literal["model"] | None) -> None:
    """``strength`` of transformers' router loss, or "model": that of config.json. Of an even router it is as large as a
    token has experts, ours is 1. ``model.name`` is mapped before.
    """
    if not strength:
        t.no_op(key)
        return
    config = _read_text_config(t)
    per_token = _experts_per_token(config)
    if strength == "model":
        strength = (config or {}).get("router_aux_loss_coef")
    if per_token is not None and isinstance(strength, int | float):
        why = f"by document, without padding, times {per_token} experts per token: transformers' loss is larger by that"
        t.substitute(key, {"moe.balance": strength * per_token}, why)
    elif config and per_token is None:
        t.no_op(key, "the model has no experts")
    else:
        why = "the model's config.json does not have them" if config else "no config.json of the model could be fetched"
        t.refuse(key, "remove it, and set moe.balance to router_aux_loss_coef times num_experts_per_tok: transformers' "
                 f"loss is larger by that, and {why}")  # fmt: skip


def add_target_parameters(t: Translator, key: str, *, alone: bool = False) -> None:
    """Adds PEFT's ``target_parameters`` to ``method.target_modules``, which is mapped before. ``alone``: without other
    targets the tool adapts nothing else.
    """
    named = t.get(key, [])
    targets = t.mapping.get("method", {}).get("target_modules")
    if not named:
        t.no_op(key)
    elif not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        t.refuse(key, "allowed: a list of names, such as mlp.experts.gate_up_proj")
    elif targets == "all-linear":
        if {name.rpartition(".")[2] for name in named} >= STACKS:
            t.no_op(key, "all linear layers, experts among them")
        else:
            t.refuse(key, "all linear layers include all experts here: name layers to adapt fewer")
    elif not isinstance(targets, list) and alone:
        t.map(key, "method.target_modules", list(named), "nothing else, as no other target is named")
    elif not isinstance(targets, list):
        t.refuse(
            key, "name the other target modules too, such as q_proj: what PEFT takes for the model is not known here"
        )
    else:
        t.mapping["method"]["target_modules"] = targets + [name for name in named if name not in targets]
        t.map(key, {}, why="adapted beside the other target modules")
