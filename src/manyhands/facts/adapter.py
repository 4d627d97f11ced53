"""The adapter whose training a run continues: where it is and how it was trained. Reads JSON and the header of its
weights only.

``method.adapter`` names a PEFT folder, or the folder of a finished run, whose ``adapter/`` is meant. What LoRA A and B
mean (rank, alpha, rslora, dora, target_modules, modules_to_save) is fixed by the adapter: a key of the run file may
repeat it, or be left at its default; another value is an error that names both. Dropout is the run's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from manyhands.config.schema import MethodSection, RunConfig
from manyhands.core.errors import UserError
from manyhands.core.files import parse_json, refuse_outside_links
from manyhands.facts.safetensors import read_headers, read_metadata
from manyhands.facts.types import AdapterFacts

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX, LORA_A = "base_model.model.", ".lora_A.weight"
# Fields of PEFT's LoraConfig that change what LoRA A and B compute, and that are not computed here.
UNSUPPORTED = (
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "alora_invocation_tokens",
)
OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
EXPERTS_SINCE = "0.19.0"  # PEFT's layout of factors of experts; one that is older, or silent, has another or may have
# Values of init_lora_weights for which PEFT takes the first A and B out of the base's weights, each time it opens the
# adapter: beside the weights as they are, A and B mean another model. One that is converted as it is saved says true.
TAKEN_FROM_BASE = ("pissa", "corda", "olora", "loftq")
# In the header of such an adapter's weights, as PEFT has no field for it. One that began at NF4's quantization error
# has BESIDE_NF4 too: it does not fit a base in 16 bits. By method.double_quant.
QUANTIZED_BASE = {True: {"base_quantization": "nf4, double quantization"}, False: {"base_quantization": "nf4"}}
BESIDE_NF4 = {"base": "nf4"}
BASE_FILES = "base_files"  # in the same header: SHA-256 of the base's files by their names, as JSON
SETTLED = ("rank", "alpha", "rslora", "dora", "target_modules", "modules_to_save")


def find_adapter(config: RunConfig, report: Callable[[str], Any] = print) -> AdapterFacts | None:
    """The adapter of ``method.adapter``, None without one. UserError if it is none or contradicts the run file."""
    if config.method.adapter is None:
        return None
    folder = locate_adapter(Path(config.method.adapter).expanduser())
    fields = read_adapter_config(folder)
    trained_tokens = fields.get("trainable_token_indices")
    if trained_tokens and not config.model.new_tokens:
        raise UserError(
            "the adapter has rows of tokens of its own, but model.new_tokens is empty",
            where=str(folder / CONFIG),
            why=f"trainable_token_indices: {trained_tokens}",
            fix="set model.new_tokens to the tokens it was trained with",
        )
    base = fields.get("base_model_name_or_path")
    if base and base not in (config.model.name, str(Path(config.model.name).expanduser().resolve())):
        report(f"note: the adapter was made for {base}, and model.name is {config.model.name}")
    return AdapterFacts(
        folder=str(folder.resolve()),
        method=merge_adapter_method(config.method, describe_method(folder, fields), folder),
    )


def locate_adapter(folder: Path) -> Path:
    """The folder with adapter_config.json: ``folder`` itself, or ``adapter/`` of a run's folder."""
    for candidate in (folder, folder / "adapter"):
        if (candidate / CONFIG).is_file():
            if not (candidate / WEIGHTS).is_file():
                pickled = (candidate / "adapter_model.bin").is_file()
                why = (
                    "its weights are pickled (adapter_model.bin), which is never opened"
                    if pickled
                    else f"there is no {WEIGHTS}"
                )
                raise UserError(
                    "the adapter has no weights", where=str(candidate), why=why, fix="save it as safetensors"
                )
            refuse_outside_links(candidate)
            return candidate
    if (folder / "model" / "config.json").is_file():
        raise UserError(
            "the run has trained a full model, not an adapter",
            where=str(folder),
            fix=f"continue training it with model.name={folder}/model",
        )
    unfinished = "the run has written no adapter yet" if (folder / "run.json").is_file() else ""
    raise UserError(
        "method.adapter is no adapter",
        where=str(folder),
        why=unfinished or f"there is no {CONFIG} in it, nor in its folder adapter/",
        fix="name a PEFT adapter's folder, or the folder of a finished run",
    )


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The fields of adapter_config.json. UserError for another kind than LoRA, or what our layers do not compute."""
    path = folder / CONFIG
    try:
        fields = parse_json(path.read_bytes())
        if not isinstance(fields, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        raise UserError("the adapter's configuration cannot be read", where=str(path), why=str(error)) from error
    beyond = [key for key in UNSUPPORTED if fields.get(key)]
    if fields.get("target_parameters") and _version(fields.get("peft_version")) < _version(EXPERTS_SINCE):
        raise UserError(
            "the layout of this adapter's experts is not known",
            where=str(path),
            why=f"PEFT before {EXPERTS_SINCE} wrote another one under the same names, and peft_version is "
            f"{fields.get('peft_version') or 'not there'}",
            fix="open it with the PEFT that wrote it, and save it merged (merge_and_unload)",
        )
    beyond += ["bias"] if fields.get("bias", "none") != "none" else []
    if fields.get("peft_type") != "LORA" or beyond:
        raise UserError(
            "this adapter cannot be used here",
            where=str(path),
            why=f"it sets {', '.join(beyond)}" if beyond else f"peft_type is {fields.get('peft_type')}, not LORA",
            fix="open it with PEFT",
        )
    if str(init := fields.get("init_lora_weights", True)).lower().startswith(TAKEN_FROM_BASE):
        raise UserError(
            "this adapter cannot be used here",
            where=str(path),
            why=f"init_lora_weights is {init}: PEFT changes the base's weights as it opens the adapter",
            fix="open it with PEFT, merge it (merge_and_unload), and use the model that is saved then",
        )
    return fields


def _version(text: Any) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", str(text or ""))[:2]))


def describe_method(folder: Path, fields: Mapping[str, Any]) -> MethodSection:
    """How an adapter was trained, in our keys.

    A list of target modules means the same here as in PEFT, and a string is a regular expression. Where PEFT chose by
    other fields too (layers, exclusions), the layers are those that the weights name.
    """
    if single := next(filter(OF_ONE_EXPERT.search, read_headers([folder / WEIGHTS])), None):
        raise UserError(
            "the adapter has factors of single experts",
            where=str(folder),
            why=f"{single}: here the experts of a block are adapted as stacks",
            fix="use the adapter that was split (RUN/adapter), or save it merged with PEFT (merge_and_unload)",
        )
    targets = fields.get("target_modules")
    if not isinstance(targets, str | list | None):
        targets = [str(targets)]
    parameters = fields.get("target_parameters") or []
    if parameters and isinstance(targets, list | None) and isinstance(parameters, list):
        targets = [*(targets or ()), *(str(name).removesuffix(".weight") for name in parameters)]
    elif any(fields.get(key) for key in ("layers_to_transform", "exclude_modules")) or not targets:
        targets = read_targets(folder)
    elif isinstance(targets, str):
        targets = targets if targets == "all-linear" else (f"re:{targets}",)
    values = {
        "name": "lora",
        "rank": fields.get("r"),
        "alpha": fields.get("lora_alpha"),
        "target_modules": targets if isinstance(targets, str) else tuple(sorted(targets, key=str)),
        "rslora": bool(fields.get("use_rslora")),
        "dora": bool(fields.get("use_dora")),
        "modules_to_save": fields.get("modules_to_save") or (),
        "init": "loftq" if belongs_to_nf4(folder) else "zero",
        "double_quant": not QUANTIZED_BASE[False].items() <= read_metadata(folder / WEIGHTS).items(),
    }
    try:
        return MethodSection.model_validate(values)
    except ValidationError as error:
        found = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:20]]
        raise UserError(
            "the adapter's configuration has values of the wrong kind", where=str(folder / CONFIG), details=found
        ) from None


def nf4_options(*, double_quant: bool) -> dict[str, Any]:
    """What weights in 4 bits are beside which adapters are trained, in BitsAndBytesConfig's words."""
    return {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double_quant}


def belongs_to_nf4(folder: Path) -> bool:
    """Whether the adapter's weights say so."""
    return BESIDE_NF4.items() <= read_metadata(folder / WEIGHTS).items()


def needed_tokens(folder: Path, rows_by_token: Collection[str]) -> int:
    """Rows that the base's embeddings must have for the adapter: for the tokens that it trains, and for embedding and
    head where it holds them whole (``rows_by_token``: names of their parameters in the base); 0 where it has neither.
    """
    trained = read_adapter_config(folder).get("trainable_token_indices") or {}
    tokens = [token for ids in (trained.values() if isinstance(trained, dict) else [trained]) for token in ids]
    stored = read_headers([folder / WEIGHTS]).items()
    whole = [tensor.shape[0] for name, tensor in stored if name.removeprefix(PEFT_PREFIX) in rows_by_token]
    return max((*(1 + token for token in tokens), *whole), default=0)


def read_base_files(folder: Path) -> dict[str, str]:
    """SHA-256 of the files of the base that the adapter was trained on, by their names; empty where it does not say."""
    try:
        found = json.loads(read_metadata(folder / WEIGHTS).get(BASE_FILES, "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) and all(isinstance(sha, str) for sha in found.values()) else {}


def read_targets(folder: Path) -> list[str]:
    """Full names of the adapted layers, from the header of the weights."""
    tensors = read_headers([folder / WEIGHTS])
    return sorted({name.removeprefix(PEFT_PREFIX).removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)})


def merge_adapter_method(asked: MethodSection, adapter: MethodSection, folder: Path) -> MethodSection:
    """``asked`` with what the adapter decides. UserError for a value that was asked for and is not the adapter's.

    Target modules and modules to save may be written in another way here than there: those asked for are kept, and the
    names of what is trained are compared when the weights are read.
    """
    defaults = MethodSection.model_fields
    if adapter.init == "loftq" and asked.name != "qlora":
        raise UserError(
            "the adapter belongs to a model in 4 bits",
            where=str(folder),
            why="it began at NF4's quantization error (method.init: loftq),"
            f" which is not missing where method.name is {asked.name}",
            fix="set method.name: qlora",
        )
    taken: dict[str, Any] = {"init": adapter.init}
    wrong: list[str] = []
    for key in (*SETTLED, "double_quant") if adapter.init == "loftq" else SETTLED:
        mine, its = getattr(asked, key), getattr(adapter, key)
        if mine == defaults[key].default:
            taken[key] = its
        elif mine != its and key not in ("target_modules", "modules_to_save"):
            wrong.append(f"method.{key} is {mine}, and the adapter's is {its}")
    if wrong:
        raise UserError(
            "the run file and the adapter contradict each other",
            where=str(folder / CONFIG),
            fix="leave these keys out of the run file: the adapter's values are taken",
            details=wrong,
        )
    return asked.model_copy(update=taken)
