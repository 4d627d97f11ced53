"""FSDP's options, versions 1 and 2, as accelerate, transformers and Axolotl spell them; used by importers."""

from collections.abc import Collection, Mapping
from typing import Any

from manyhands.config.text import names, show
from manyhands.importers.shared import DTYPES, map_dtype
from manyhands.importers.translation import Translator

_WRAP = "every block is a unit"
_STATE = "checkpoints are sharded, the exported model is whole"
_BY_DESIGN = "always so"
ALREADY: Mapping[str, str] = {
    "version": "FSDP2",
    "auto_wrap_policy": _WRAP,
    "transformer_layer_cls_to_wrap": _WRAP,
    "transformer_cls_to_wrap": _WRAP,
    "transformer_cls_names_to_wrap": _WRAP,
    "min_num_params": _WRAP,
    "backward_prefetch": "communication only",
    "backward_prefetch_policy": "communication only",
    "forward_prefetch": "communication only",
    "limit_all_gathers": "communication only",
    "state_dict_type": _STATE,
    "final_state_dict_type": _STATE,
    "state_dict_config": _STATE,
    "optim_state_dict_config": _STATE,
    "use_orig_params": _BY_DESIGN,
    "sync_module_states": "each rank reads its own part of the weights",
    "cpu_ram_efficient_loading": "each rank reads its own part of the weights",
    "cpu_offload_pin_memory": "host memory is pinned where there is enough",
    "xla_fsdp_settings": "XLA only",
    "xla_fsdp_grad_ckpt": "XLA only",
    "xla_fsdp_v2": "XLA only",
}
"""Options that are true by construction or have no effect on training, with the reason."""

OPTIONS = frozenset(ALREADY) | names(
    """
    sharding_strategy reshard_after_forward offload_params cpu_offload activation_checkpointing
    activation_checkpointing_offload mixed_precision_policy ignored_modules xla
    """
)
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    # in accelerate's order: they may be written as numbers from 1
    "FULL_SHARD": {"parallel.strategy": "fsdp"},
    "SHARD_GRAD_OP": {"parallel.strategy": "fsdp", "parallel.reshard_after_forward": False},
    "NO_SHARD": {"parallel.strategy": "ddp"},
    "HYBRID_SHARD": {"parallel.strategy": "hsdp"},
    "HYBRID_SHARD_ZERO2": {"parallel.strategy": "hsdp", "parallel.reshard_after_forward": False},
}


def fsdp_keys(section: str) -> frozenset[str]:
    """Every option below ``section``, with and without ``fsdp_``: what an importer adds to its known keys."""
    return frozenset(f"{section}.{prefix}{name}" for name in OPTIONS for prefix in ("", "fsdp_"))


def fsdp_options(t: Translator, section: str) -> dict[str, str]:
    """Option to key, of the options that the file has below ``section``."""
    found: dict[str, str] = {}
    for key in t.values:
        if key.startswith(f"{section}."):
            name = key.removeprefix(f"{section}.").removeprefix("fsdp_")
            if name in found:
                t.no_op(found[name], "written twice")
                if t.get(key) != t.get(found[name]):
                    t.contradict(key, f"{t.place(found[name])} says otherwise: keep one")
            found[name] = key
    return found


def read_words(asked: Any) -> list[str]:
    """The options of a key ``fsdp``: a list, or a text with spaces or commas."""
    text = " ".join(map(str, asked)) if isinstance(asked, list) else str(asked or "").replace(",", " ")
    return text.split()


def map_words(t: Translator, key: str, words: Collection[str], strategy: str) -> None:
    """``strategy``, and what else the options of a key ``fsdp`` say."""
    native: dict[str, Any] = {"parallel.strategy": strategy}
    if "shard_grad_op" in words:
        native["parallel.reshard_after_forward"] = False
    if "offload" in words:
        native["parallel.offload"] = "all"
    t.map(key, native)


def map_fsdp(t: Translator, options: Mapping[str, str], *, version: int = 1, strategy: str | None = "fsdp") -> None:
    """Gives every option its outcome. ``options``: option (a name of ``OPTIONS``) to the key that holds it.
    ``version``: of FSDP where no option says it. ``strategy``: ``parallel.strategy`` where no option says it; None
    leaves it out.
    """
    if "version" in options:
        version = t.integer(options["version"], version) or version
    for name, key in options.items():
        if name in ALREADY:
            t.no_op(key, ALREADY[name])
    _map_sharding(t, options, version, strategy)
    for name, native, value in (
        ("offload_params", "parallel.offload", "all"),
        ("cpu_offload", "parallel.offload", "all"),
        ("activation_checkpointing", "parallel.activation_checkpointing", "full"),
        ("activation_checkpointing_offload", "parallel.offload_activations", True),
    ):
        if name in options:
            t.switch(options[name], native, value)
    if "mixed_precision_policy" in options:
        _map_precision(t, options["mixed_precision_policy"])
    if "ignored_modules" in options:
        t.only(options["ignored_modules"], (None, "None"), "every module is sharded: remove it")
    if "xla" in options:
        t.only(options["xla"], (False,), "XLA is not available: set it to false")


def _map_sharding(t: Translator, options: Mapping[str, str], version: int, strategy: str | None) -> None:
    """Version 1 goes by ``sharding_strategy`` (or its name in ``reshard_after_forward``), version 2 by a boolean."""
    key, reshard = options.get("sharding_strategy"), options.get("reshard_after_forward")
    named = None if key is None or not t.has(key) else _strategy(t, key)
    if reshard is not None and t.has(reshard):
        value = str(t.get(reshard)).lower()
        if value in ("true", "false") and (version == 2 or named is None):
            t.map(reshard, "parallel.reshard_after_forward", value == "true")
        elif value in ("true", "false"):
            t.ignore(reshard, "FSDP 1 goes by `sharding_strategy`")
        elif version == 1 and named is None:
            t.map(reshard, STRATEGIES.get(_strategy(t, reshard) or "", {}))
            return
        elif version == 1:
            t.ignore(reshard, "`sharding_strategy` takes precedence")
        else:
            t.refuse(reshard, f"{show(t.get(reshard))}: write true or false (FSDP 2)")
    if key is not None and named is not None:
        if version == 2 and named == "FULL_SHARD":  # what accelerate launch always exports
            t.map(key, "parallel.strategy", "fsdp")
        else:
            t.map(key, STRATEGIES[named])
    elif (key is None or not t.has(key)) and strategy is not None:
        t.set_tool_default("parallel.strategy", strategy, "FSDP's default")


def _strategy(t: Translator, key: str) -> str | None:
    """The name of a sharding strategy, also from its number; None and refused if it is none."""
    word = str(t.get(key)).upper().removeprefix("SHARDINGSTRATEGY.").lstrip("_")
    if word.isdecimal() and 1 <= int(word) <= len(STRATEGIES):
        return list(STRATEGIES)[int(word) - 1]
    if word in STRATEGIES:
        return word
    t.refuse(key, f"got {show(t.get(key))}, allowed: {', '.join(STRATEGIES)}")
    return None


def _map_precision(t: Translator, key: str) -> None:
    asked = str(t.get(key)).lower()
    if asked in DTYPES:
        map_dtype(t, key, asked)
    elif asked == "none":
        t.no_op(key, "model.dtype decides")
    else:
        t.refuse(key, f"got {show(t.get(key))}, allowed: bf16, fp16 or fp32")
