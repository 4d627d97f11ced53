"""Axolotl's ``rl``: DPO, IPO, KTO, ORPO and SimPO by TRL's trainers, and the types of their data sets
(``prompt_strategies/dpo``, ``kto`` and ``orpo`` of July 2026).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from manyhands.config.text import show
from manyhands.importers import preferences
from manyhands.importers.translation import Translator

HERE = ("dpo", "ipo", "kto", "orpo", "simpo")
# Columns by the style of a type, such as ``chatml.intel``; the part before the dot is the chat template.
_PAIRS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "default": {},
        "prompt_pairs": {},
        "ultra": {},
        "argilla_chat": {},
        "intel": {"question": "question"},
        "icr": {"prompt": "input"},
        "argilla": {"instruction": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
    }
)
_JUDGED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "default": {},
        "prompt_pairs": {},
        "ultra": {},
        "argilla": {"prompt": "instruction"},
        "intel": {"prompt": "question"},
        "argilla_chat": {"messages": "completion"},
    }
)
_TEMPLATES = {"chatml": "chatml", "llama3": "llama3"}


def asked(t: Translator) -> str:
    """The kind of training; empty for supervised fine-tuning."""
    return str(t.get("rl")).lower() if t.get("rl") not in (None, False) else ""


def read_type(rl: str, kind: Any) -> Mapping[str, Any] | None:
    """``type`` as in ``data.TYPES``, or None; without ``template`` for those of the run's own chat template."""
    name, _, style = str(kind).partition(".")
    format, styles = ("label", _JUDGED) if rl == "kto" else ("preference", _PAIRS)
    if name == "chat_template" and rl != "kto":
        own = ("", "argilla") if rl == "orpo" else ("default", "argilla_chat")
        return {"format": format, "style": style} if style in own else None
    if rl == "orpo" or name not in _TEMPLATES or style not in styles:
        return None
    names = {ours: theirs for ours, theirs in styles[style].items() if ours != theirs}
    return {"format": format, "template": _TEMPLATES[name], **({"fields": names} if names else {})}


def map_loss(t: Translator) -> None:
    """The loss and its settings, by the defaults of TRL's configurations."""
    rl = asked(t)
    t.map("rl", "task", "kto" if rl == "kto" else "preference", why=preferences.MEAN)
    t.only("sample_packing", (False, None), "Axolotl packs no preferences: set it to false")
    given = t.get("trl") or {}
    if isinstance(given, dict) and given.get("beta") is not None:
        t.map("trl", "preference.beta", given["beta"])
    if isinstance(given, dict) and (others := [key for key, value in given.items() if key != "beta" and value]):
        t.refuse("trl", f"{others[0]}: of trl only beta is read with `rl: {rl}`")
    for key in ("orpo_alpha",) * (rl == "orpo") + ("rl_beta",):
        t.map(key, "preference.beta", t.number(key))
    if t.has("dpo_beta") and not t.has("rl_beta"):
        t.substitute("dpo_beta", {"preference.beta": t.number("dpo_beta")}, "read as `rl_beta`, its name today")
    if rl == "dpo":
        preferences.map_dpo_losses(t, "dpo_loss_type", "dpo_loss_weights", "dpo_label_smoothing")
    elif rl == "ipo":
        t.map("rl", "preference.loss", "ipo")
    elif rl == "orpo":
        t.substitute("rl", {"preference.loss": "orpo"}, preferences.ANSWER_ALONE)
    elif rl == "simpo":
        t.map("rl", "preference.loss", "simpo")
        t.map("simpo_gamma", "preference.margin", t.number("simpo_gamma"))
        preferences.map_sft_weight(t, "cpo_alpha", 1.0, "a mean over each micro-batch")
    else:
        why = "its KL takes the answers of the whole step, TRL's those of a GPU's micro-batch"
        t.substitute("rl", {"task": "kto"}, why)
        t.map("kto_desirable_weight", "preference.desirable_weight", t.number("kto_desirable_weight"))
        t.map("kto_undesirable_weight", "preference.undesirable_weight", t.number("kto_undesirable_weight"))
    if t.has("rpo_alpha"):
        t.refuse("rpo_alpha", "Axolotl itself refuses it: write dpo_loss_type: [sigmoid, sft] and dpo_loss_weights")
    for key in ("dpo_use_weighting", "dpo_norm_loss"):
        t.only(key, (None, False), "not available: remove it")
    if t.flag("precompute_ref_log_probs") and rl in ("dpo", "ipo"):
        t.map("precompute_ref_log_probs", "preference.reference", "stored")
    t.no_op("max_prompt_len", "prompt and answer are bounded together")
    preferences.leave_dropout_out(t)


def map_entry(entry: Any, rl: str) -> None:
    """The ``type`` of one data set, with its columns; ``entry``: of ``data.py``."""
    kind = entry.get("type")
    ours = read_type(rl, kind)
    if ours is None:
        which = "kto: chatml or llama3" if rl == "kto" else f"{rl}: chat_template, chatml or llama3"
        entry.refuse("type", f"{show(kind)} is not available with `rl: {which}`, each with its styles (chatml.intel)")
        return
    fields = dict(ours.get("fields", {}))
    if ours.get("style") == "default":
        fields |= {"messages": str(entry.get("field_messages") or "messages")}
        fields |= {name: str(entry.get(f"field_{name}") or name) for name in ("chosen", "rejected")}
        fields |= {name: told for name, told in entry._property_names().items() if name in ("role", "content")}
        entry._map_roles()
        for name in ("field_messages", "field_chosen", "field_rejected"):
            entry.t.no_op(entry.key(name), "a column of the source")
    fields = {name: told for name, told in fields.items() if name != told}
    entry.set("type", format=ours["format"], **({"fields": fields} if fields else {}))
