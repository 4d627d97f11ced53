"""An adapter with one pair of factors an expert, under the names that the base's files have: for servers that know no
stacks of experts.

It is made of a verified adapter (``export/adapter.py``), whose factors of experts are those of a stack: A (g r, i), B
(o, r g) with the expert as its fastest index. Gate and up get the same A.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from manyhands.convert.adapter import PEFT_PREFIX
from manyhands.core.errors import UserError
from manyhands.core.files import write_json
from manyhands.export.files import begin_folder, commit_folder, write_tensors
from manyhands.facts.adapter import CONFIG, WEIGHTS
from manyhands.facts.experts import OLD_PARENT, ONE, PROJECTIONS
from manyhands.facts.safetensors import find_weight_files, read_headers, read_metadata

HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
OLD_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class Stack(NamedTuple):
    """``path``: of the experts, in the model; ``key``: before ``lora_A`` in the adapter."""

    path: str
    name: str
    key: str
    num_experts: int
    in_files: str  # the experts' path in the base's files
    projections: tuple[str, ...]  # one expert's in the base's files, in the order of the stack's rows


def split_experts(adapter: Path, output: Path, base: Path) -> str:
    """Writes and compares the split ``adapter``; returns a line. UserError where nothing is to be split."""
    config = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
    tensors, metadata = load_file(adapter / WEIGHTS), read_metadata(adapter / WEIGHTS)
    targets = config.get("target_parameters") or []
    stacks = list(_find_stacks(tensors, targets, base))
    if not stacks:
        raise UserError(
            "this adapter has no factors of experts",
            where=str(adapter),
            fix="leave --by-expert out: it is as servers read it",
        )
    split = dict(tensors)
    for stack in stacks:
        a, b = (split.pop(f"{PEFT_PREFIX}{stack.key}.lora_{side}.weight") for side in "AB")
        split |= _split(stack, a, b)
    partial = begin_folder(output, replace=False)
    shutil.copytree(adapter, partial, dirs_exist_ok=True)
    write_tensors(partial / WEIGHTS, split, {key: value for key, value in metadata.items() if key != "format"})
    plain = [name.removesuffix(".weight").rpartition(".")[2] for name in targets if name.endswith(".weight")]
    names = {projection for stack in stacks for projection in stack.projections}
    modules = sorted({*config["target_modules"], *plain, *names})
    write_json(partial / CONFIG, config | {"target_modules": modules, "target_parameters": None})
    commit_folder(partial, output)
    furthest = _compare(stacks, tensors, load_file(output / WEIGHTS))
    matrices = sum(stack.num_experts for stack in stacks)
    return (
        f"verified: {output}: updates of {matrices:,} matrices of experts read back, largest deviation {furthest:.1e}"
    )


def find_single_experts(base: Path) -> dict[str, dict[str, Any]]:
    """By the experts' path in the model: their numbers, path and projections in the base's files. UserError where these
    hold none.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in read_headers(find_weight_files(base)):
        if (one := ONE.match(name)) and one["name"] in PROJECTIONS:
            old = one["name"] in OLD_NAMES.values()
            parent = one["parent"].replace(f".{OLD_PARENT}", ".mlp") if old else one["parent"]
            entry = found.setdefault(f"{parent}.experts", {"numbers": set(), "names": set()})
            entry["in_files"] = f"{one['parent']}.experts"
            entry["numbers"].add(int(one["number"]))
            entry["names"].add(one["name"])
    if not found:
        raise UserError(
            "the base's files hold no experts as separate tensors",
            where=str(base),
            why="the model has no experts, or all of a block are one tensor: no library reads adapters of single ones",
            fix="leave --by-expert out, or use --merge",
        )
    return found


def _find_stacks(tensors: Iterable[str], targets: Iterable[str], base: Path) -> Iterable[Stack]:
    found = find_single_experts(base)
    keys = {name.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight") for name in tensors}
    for key in sorted(key for key in keys if key.removesuffix(".base_layer").endswith(".experts")):
        path = key.removesuffix(".base_layer")
        names = [name for name in HALVES if any(f".{path}.{name}".endswith(f".{target}") for target in targets)]
        name = names[0] if key != path or len(names) == 1 else "down_proj"
        if path not in found:
            renamed = next((one for one in found if one.partition(".")[2] == path.partition(".")[2]), "not")
            raise UserError(
                "the base's files name its experts differently from the model",
                where=str(base),
                why=f"{path} is {renamed} there, and no known program reads adapters under either name",
                fix="leave --by-expert out, or use --merge",
            )
        old = OLD_NAMES["down_proj"] in found[path]["names"]
        halves = tuple(OLD_NAMES[half] if old else half for half in HALVES[name])
        yield Stack(path, name, key, len(found[path]["numbers"]), found[path]["in_files"], halves)


def _split(stack: Stack, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    num = stack.num_experts
    of_b = b.unflatten(1, (-1, num)).permute(2, 0, 1)  # (g, o, r)
    split: dict[str, torch.Tensor] = {}
    for number, (one_a, one_b) in enumerate(zip(a.unflatten(0, (num, -1)), of_b, strict=True)):
        for projection, rows in zip(stack.projections, one_b.chunk(len(stack.projections)), strict=True):
            key = f"{PEFT_PREFIX}{stack.in_files}.{number}.{projection}"
            split |= {f"{key}.lora_A.weight": one_a.clone(), f"{key}.lora_B.weight": rows.clone()}
    return split


def _compare(stacks: Iterable[Stack], before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of an expert's ``B A`` between the two, by the largest value; UserError above rounding."""
    furthest = 0.0
    for stack in stacks:
        a, b = (before[f"{PEFT_PREFIX}{stack.key}.lora_{side}.weight"].double() for side in "AB")
        rank = len(a) // stack.num_experts
        for number in range(stack.num_experts):
            expected = b[:, number :: stack.num_experts] @ a[number * rank : (number + 1) * rank]
            keys = [f"{PEFT_PREFIX}{stack.in_files}.{number}.{one}" for one in stack.projections]
            found = [after[f"{key}.lora_B.weight"].double() @ after[f"{key}.lora_A.weight"].double() for key in keys]
            scale = expected.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
            furthest = max(furthest, float((torch.cat(found) - expected).abs().max() / scale))
    if furthest > 1e-12:
        raise UserError("the adapter of single experts differs from the one of stacks", why=f"by {furthest:.1e}")
    return furthest
