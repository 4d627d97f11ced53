"""How an Axolotl run computes and is distributed: precision, recomputed activations, FSDP, DeepSpeed, the GPUs that a
file names. Part of the importer ``axolotl.py``.
"""

from __future__ import annotations

from typing import Any

from manyhands.config.text import show
from manyhands.importers import axolotl_keys as keys
from manyhands.importers import deepspeed
from manyhands.importers.fsdp import fsdp_options, map_fsdp
from manyhands.importers.translation import Translator


def count_mesh(t: Translator) -> None:
    """``dp_shard_size`` x ``dp_replicate_size`` are the GPUs of the run."""
    shard, replicate = t.integer("dp_shard_size", 1) or 1, t.integer("dp_replicate_size", 1) or 1
    if shard * replicate > 1:
        t.set_gpus(shard * replicate)
    if shard > 1 and replicate > 1:
        t.map("dp_replicate_size", "parallel.strategy", "hsdp")
        t.map("dp_shard_size", "parallel.shard_degree", shard)
    for key in ("dp_shard_size", "dp_replicate_size"):
        t.no_op(key, "the GPUs of the run" if shard * replicate > 1 else "")


def map_precision(t: Translator) -> None:
    """``bf16`` is auto where it is not set; Axolotl trains in float32 only where all of them are off."""
    bf16, others = t.get("bf16", "auto"), [key for key in ("fp16", "float16") if t.flag(key)]
    on = bf16 in (True, "full", "true") or t.flag("bfloat16")
    if on:
        for key in ("bf16", "bfloat16"):
            if t.get(key) not in (None, False, "false"):
                t.map(key, "model.dtype", "bfloat16")
    elif bf16 == "auto":
        t.no_op("bf16", "`model.dtype` is auto: bfloat16 where the GPU has it")
        if t.flag("fp16"):  # then Axolotl turns bf16 off
            t.substitute("fp16", {"model.dtype": "bfloat16"}, "float16 is not available: bfloat16")
    elif bf16 not in (False, "false"):
        t.refuse("bf16", f"got {show(bf16)}, allowed: auto, true or false")
    elif others:
        t.substitute(others[0], {"model.dtype": "bfloat16"}, "float16 is not available: bfloat16")
    else:
        t.map("bf16", "model.dtype", "float32")
    if t.flag("fp8"):
        t.substitute("fp8", {"kernels.linear": "fp8"}, "another recipe than torchao's, which is checked before step 1")
    t.no_op("fp8_enable_fsdp_float8_all_gather", "weights are gathered in bfloat16" if t.flag("fp8") else "")
    for key in ("bf16", "bfloat16", "fp16", "float16", "fp8"):
        t.no_op(key)
    _map_checkpointing(t)
    if t.has("torch_compile"):
        if t.get("torch_compile") == "auto":
            t.no_op("torch_compile")
        else:
            t.map("torch_compile", "parallel.compile", t.flag("torch_compile"))


def _map_checkpointing(t: Translator) -> None:
    """Recomputed and offloaded activations; FSDP has a key of its own for the same thing."""
    native = "parallel.activation_checkpointing"
    asked, offload = t.get("gradient_checkpointing"), t.get("activation_offloading")
    in_fsdp = fsdp_options(t, "fsdp_config").get("activation_checkpointing")
    if asked in ("offload", "offload_disk"):
        t.map("gradient_checkpointing", native, "full")
        offload = "disk" if asked == "offload_disk" else True
        _map_offload(t, "gradient_checkpointing", offload)
    elif t.flag("gradient_checkpointing") and t.get("selective_checkpointing") not in (None, False):
        t.map("selective_checkpointing", native, "selective")
    elif t.flag("gradient_checkpointing"):
        t.no_op("gradient_checkpointing", "the plan recomputes as many blocks as memory requires")
    elif t.has("gradient_checkpointing") and not (in_fsdp and t.flag(in_fsdp)):
        t.map("gradient_checkpointing", native, "none")
    if offload not in (None, False, "false"):
        if not t.get("gradient_checkpointing"):
            t.contradict("activation_offloading", "Axolotl wants `gradient_checkpointing: true` beside it")
        _map_offload(t, "activation_offloading", offload)
    for key in ("gradient_checkpointing", "selective_checkpointing", "activation_offloading"):
        t.no_op(key)


def _map_offload(t: Translator, key: str, how: Any) -> None:
    if how == "disk":
        t.substitute(
            key, {"parallel.offload_activations": True}, "activations go to the host's memory, not to its disk"
        )
    else:
        t.map(key, "parallel.offload_activations", True)


def map_sharding(t: Translator) -> None:
    words = t.get("fsdp", [])
    words = " ".join(map(str, words)).split() if isinstance(words, list) else str(words).replace(",", " ").split()
    configured = [key for key in t.values if key.startswith("fsdp_config.") and t.has(key)]
    if (words or configured) and t.has("deepspeed"):
        t.contradict("deepspeed", f"{t.place('fsdp' if words else configured[0])} asks for FSDP: keep one")
    if words or configured:
        hybrid = "hybrid_shard" in words or t.mapping.get("parallel", {}).get("shard_degree")
        strategy = "ddp" if "no_shard" in words else "hsdp" if hybrid else "fsdp"
        native: dict[str, Any] = {"parallel.strategy": strategy}
        if "shard_grad_op" in words:
            native["parallel.reshard_after_forward"] = False
        if "offload" in words:
            native["parallel.offload"] = "all"
        t.map("fsdp" if words else configured[0], native)
    t.no_op("fsdp")
    options = {name: key for name, key in fsdp_options(t, "fsdp_config").items() if name in keys.FSDP}
    map_fsdp(t, options, version=t.integer("fsdp_version", 1) or 1, strategy=None)
    for key in t.values:
        if key.startswith("fsdp_config.") and key not in options.values():
            t.ignore(key, "Axolotl's `fsdp_config` has no such key and ignores it")
    t.no_op("fsdp_config")
    deepspeed.map_deepspeed(t, "deepspeed")
    for key in ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size"):
        t.only(key, (1,), "splitting a sequence or a layer over GPUs is not available: set it to 1")
