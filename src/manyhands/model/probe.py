"""``python -m manyhands.model.probe FOLDER``: can this family be trained here, and packed? Asked before a run is
planned.

A shrunken copy of the model's configuration, with a few layers of each kind, narrow, random weights, on the CPU, goes
through the checks that the loaded model will go through. Prints one JSON object: ``trains``, ``packs`` and ``reason``.
Reads config.json and no weight; knows nothing of plans.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch

from manyhands.core.errors import UserError
from manyhands.model.attention import BLOCKWISE, plain_attention, register_attention
from manyhands.model.checks import check_batches, check_loss, check_packing, check_padding
from manyhands.model.load import disable_dropout
from manyhands.model.loss import LossModel
from manyhands.model.structure import auto_class, is_multimodal, leave_out_towers

CPU = torch.device("cpu")
SEED = 2718
LAYERS_OF_A_KIND = 2
NUM_LAYERS_OF_ONE_KIND = 4  # where the configuration does not list its layers, they may differ by their index
MAX_LAYERS = 12
NUM_HEADS = 4
SIZES = {"intermediate_size": 128, "moe_intermediate_size": 32, "vocab_size": 512, "vocab_size_per_layer_input": 512}
SHARED = ("num_kv_shared_layers",)  # the last ones, which use keys and values of one before them
WINDOWS = ("sliding_window", "attention_chunk_size")
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


def probe(config: Any, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """The verdict on a transformers configuration: ``{"trains": bool, "packs": bool, "reason": str}``.

    Packing is tried as each attention would carry it out: by positions (``sdpa``), and by cumulative lengths, where the
    blockwise function stands for ``varlen``: both see only what the family's layers hand on. Where the copy cannot be
    built or computed, which may be for its small sizes alone, the loaded model's own checks decide.
    """
    try:
        return _try(config, trust_remote_code)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        reason = f"a shrunken copy could not be tried ({why})"
        return {"trains": True, "packs": False, "reason": reason, "crashed": True}


def _try(config: Any, trust_remote_code: bool) -> dict[str, Any]:
    register_attention()
    ways = ("sdpa", BLOCKWISE) if plain_attention(config) == "sdpa" else (BLOCKWISE,)
    try:
        loss_model = LossModel(_build(config, ways[0], trust_remote_code))
        check_loss(loss_model, loss_model, CPU)
        check_padding(loss_model, loss_model, CPU)
        check_batches(loss_model, loss_model, CPU, packing=False)
    except UserError as error:
        return {"trains": False, "packs": False, "reason": _sentence(error)}
    try:
        for implementation in ways:
            loss_model.model.set_attn_implementation(implementation)
            if loss_model.model.config._attn_implementation != implementation:  # transformers only warns
                raise RuntimeError(f"attention of {type(loss_model.model).__name__} cannot be replaced")
            check_packing(loss_model, loss_model, CPU)
            check_batches(loss_model, loss_model, CPU, packing=True)
    except UserError as error:
        return {"trains": True, "packs": False, "reason": _sentence(error)}
    except RuntimeError as error:  # our attention functions fail closed
        return {"trains": True, "packs": False, "reason": str(error)}
    return {"trains": True, "packs": True, "reason": "a shrunken copy gives the same logits packed and alone"}


def _build(config: Any, implementation: str, trust_remote_code: bool) -> Any:
    """A shrunken model. UserError where transformers has no such attention for it, or a part of it needs a library that
    is not there.
    """
    keys: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": implementation,
        "trust_remote_code": trust_remote_code,
    }
    small = shrink_text(config) if is_multimodal(config) else shrink(config)
    disable_dropout(small)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        try:
            if not is_multimodal(config):
                return auto_class(config).from_config(small, **keys)
            with torch.device("meta"):  # towers are not made small: they never come into memory
                model = auto_class(config).from_config(small, **keys)
        except ImportError as error:
            raise UserError(
                f"transformers cannot build {config.model_type}.", why=str(error).strip().splitlines()[0].split(". ")[0]
            ) from error
        except ValueError as error:
            if "attention implementation" not in str(error):
                raise
            raise UserError(
                f"transformers has no fast attention for {config.model_type}.", why=str(error).split(". ")[0]
            ) from error
    leave_out_towers(model)
    model.to_empty(device=CPU)
    model.tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().zero_()  # what the family's own rule leaves alone
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model.initialize_weights()
    return model


def shrink_text(config: Any) -> Any:
    """A copy of a multimodal configuration with its text shrunken."""
    text, small = config.get_text_config(), copy.deepcopy(config)
    setattr(small, next(key for key in config.sub_configs if getattr(config, key) is text), shrink(config))
    return small


def shrink(config: Any) -> Any:
    """A copy of the text configuration with ``LAYERS_OF_A_KIND`` layers of each kind, narrow, its head_dim as it is.

    A layer's kind is what the configuration's per-layer lists say of it. head_dim stays because rotary tables hang on
    it.
    """
    text = config.get_text_config()
    values = text.to_dict()
    depth, num_heads = text.num_hidden_layers, text.num_attention_heads
    num_kv_heads = values.get("num_key_value_heads") or num_heads
    lists = {key: value for key, value in values.items() if isinstance(value, list | tuple) and len(value) == depth}
    chosen = choose_layers(
        [repr([value[index] for value in lists.values()]) for index in range(depth)], listed=bool(lists)
    )
    values |= {key: [value[index] for index in chosen] for key, value in lists.items()}
    if overrides := {int(index): own for index, own in (values.get("per_layer_config") or {}).items()}:
        values["per_layer_config"] = {str(new): overrides[old] for new, old in enumerate(chosen) if old in overrides}
    head_dim = values.get("head_dim") or text.hidden_size // num_heads
    values |= {"num_hidden_layers": len(chosen), "num_attention_heads": NUM_HEADS, "hidden_size": NUM_HEADS * head_dim}
    if "num_key_value_heads" in values:
        values["num_key_value_heads"] = NUM_HEADS if num_kv_heads == num_heads else min(num_kv_heads, 2)
    values |= {key: min(size, values[key]) for key, size in SIZES.items() if isinstance(values.get(key), int)}
    values |= {
        key: [min(size, each) for each in values[key]]
        for key, size in SIZES.items()
        if isinstance(values.get(key), list)
    }
    values |= {key: min(1, values[key]) for key in SHARED if values.get(key)}
    values |= {key: 8 for key in WINDOWS if values.get(key)}
    values |= {key: 0 for key in SPECIAL_TOKENS if values.get(key) is not None}
    if "initializer_range" in values:
        values["initializer_range"] = 0.08  # wide, so that logits are not flat and caps are felt
    return type(text).from_dict(values)


def choose_layers(kinds: list[str], *, listed: bool) -> list[int]:
    """Indices of the first layers of each kind, in order."""
    most = LAYERS_OF_A_KIND if listed else NUM_LAYERS_OF_ONE_KIND
    chosen = [index for index, kind in enumerate(kinds) if kinds[:index].count(kind) < most]
    return chosen[:MAX_LAYERS]


def _sentence(error: UserError) -> str:
    return " ".join(filter(None, (error.what, error.why)))


def main() -> None:
    from transformers import AutoConfig, logging

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trust-remote-code", action="store_true")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    trust = arguments.trust_remote_code
    config = AutoConfig.from_pretrained(arguments.folder, trust_remote_code=trust)
    print(json.dumps(probe(config, trust_remote_code=trust)))


if __name__ == "__main__":
    main()
