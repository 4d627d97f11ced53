"""What files of other tools say of experts: adapters on their stacks, and how strong a router's loss is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from manyhands.importers.translation import Translator

PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")  # in config.json
STACKS = {"gate_up_proj", "down_proj"}


def map_router_loss(t: Translator, key: str, strength: float | Literal["model"] | None) -> None:
    """``strength`` of transformers' router loss, or "model": that of config.json. Of an even router it is as large as a
    token has experts, ours is 1. ``model.name`` is mapped before.
    """
    if not strength:
        t.no_op(key)
        return
    look, name = t.context.model_config, t.mapping.get("model", {}).get("name")
    config = look(name) if look is not None and isinstance(name, str) else None
    text = (config or {}).get("text_config")
    text = text if isinstance(text, Mapping) else config or {}
    per_token = next((text[one] for one in PER_TOKEN if isinstance(text.get(one), int)), None)
    if strength == "model":
        strength = text.get("router_aux_loss_coef")
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
