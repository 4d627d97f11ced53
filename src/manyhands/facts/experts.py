"""Experts in the headers of a model's files: as stacks, under the names that they have in the model that is trained.

Files hold one tensor for each projection of each expert, or those of all experts as one of three dimensions. Imports no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from manyhands.facts.safetensors import TensorHeader
from manyhands.families.family import VLLM_READS_STACKS

ONE = re.compile(r"^(?P<parent>.+)\.experts\.(?P<number>\d+)\.(?P<name>\w+)\.weight$")
PROJECTIONS = {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
    "w1": "gate_up_proj",
    "w3": "gate_up_proj",
    "w2": "down_proj",
}
ALL = re.compile(
    r"^(?P<parent>.+)\.(?:experts\.(?P<name>gate_up_proj|up_proj|down_proj)|(?P<linear>input_linear|output_linear)\.weight)$"
)
OF_LINEAR = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}
OLD_PARENT = "block_sparse_moe"  # of files whose experts have w1, w2 and w3: ``mlp`` in transformers' models


def stack_experts(
    tensors: Mapping[str, TensorHeader], hidden_size: int, *, transposed: bool = False
) -> tuple[dict[str, TensorHeader], dict[str, int]]:
    """The tensors with those of experts as stacks (g o, i), and the number of groups of each stack by its name.
    Tensors of three dimensions are (g, o, i), or (g, i, o) where ``transposed`` or only that fits ``hidden_size``.
    """
    found: dict[str, TensorHeader] = {}
    stacks: dict[str, list[tuple[int, TensorHeader]]] = {}
    old = any((match := ONE.match(name)) and match["name"] in ("w1", "w2", "w3") for name in tensors)
    for stored_name, tensor in tensors.items():
        name = stored_name.replace(f".{OLD_PARENT}.", ".mlp.") if old else stored_name
        if (one := ONE.match(name)) and one["name"] in PROJECTIONS:
            gated = one["name"] != "up_proj" or stored_name.replace(".up_proj.", ".gate_proj.") in tensors
            stack = f"{one['parent']}.experts.{PROJECTIONS[one['name']] if gated else 'up_proj'}.weight"
            stacks.setdefault(stack, []).append((int(one["number"]), tensor))
        elif len(tensor.shape) == 3 and (match := ALL.match(name)):
            hidden_axis = 1 if match["name"] == "down_proj" or match["linear"] == "output_linear" else 2
            swapped = transposed or (tensor.shape[hidden_axis] != hidden_size == tensor.shape[3 - hidden_axis])
            groups, size, inner = (tensor.shape[axis] for axis in ((0, 2, 1) if swapped else (0, 1, 2)))
            stack = f"{match['parent']}.experts.{match['name'] or OF_LINEAR[match['linear']]}.weight"
            stacks[stack] = [(group, TensorHeader(tensor.dtype, (size, inner))) for group in range(groups)]
        else:
            found[name] = tensor
    for stack, parts in stacks.items():
        first = parts[0][1]
        found[stack] = TensorHeader(first.dtype, (sum(part.shape[0] for _, part in parts), first.shape[1]))
    return found, {stack: len({number for number, _ in parts}) for stack, parts in stacks.items()}


def vllm_reads(model_type: str, target_parameters: Iterable[str]) -> bool:
    """Whether vLLM assigns an adapter's factors of experts to the right experts, in PEFT's layout of stacks."""
    stacks = {name.rpartition(".")[2] for name in target_parameters if ".experts." in f".{name}"}
    return not stacks or (model_type in VLLM_READS_STACKS and stacks == {"gate_up_proj", "down_proj"})
