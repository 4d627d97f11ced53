"""Which tensors of a model's files become which of the model: transformers' own renamings and conversions, applied to
headers.

No table of names is kept here. Where a family's files name weights in another way than its model does (prefixes, merged
experts), transformers knows the rules; they are applied to names, and to tensors one group at a time, so that no rank
holds more of the files than it reads at once. Must not know how parameters are sharded, nor what happens to the
tensors.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from manyhands.core.errors import UserError
from manyhands.core.progress import advance
from manyhands.facts.model import STORED_DTYPES
from manyhands.facts.safetensors import DTYPE_BITS, find_weight_files, read_header
from manyhands.facts.stored_mxfp4 import StoredMxfp4, find_stored_mxfp4
from manyhands.facts.stored_nf4 import StoredNf4, find_stored_nf4
from manyhands.model.structure import inside, left_out
from manyhands.model.weights import stacked_layers

OLD_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")  # once saved, now computed


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, by what the header says; ``dtype`` in the format's own names (BF16, F32, ...)."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    quantized: StoredNf4 | StoredMxfp4 | None = None  # in 4 bits; then shape and dtype are those the weight had before

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None for what no model is trained from (integers, 8 bits)."""
        name = STORED_DTYPES.get(self.dtype)
        return None if name is None else getattr(torch, name)

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Conversion:
    """Tensors of the model that transformers makes of others in the files, such as merged experts of one for each."""

    name: str  # what transformers calls the first tensor made
    parts: tuple[StoredTensor, ...]  # in transformers' order
    patterns: tuple[str, ...]  # for each part, the converter's pattern that it fits
    converter: WeightConverter | None  # None: of a model that was read from no file
    shapes: Mapping[str, tuple[int, ...]]  # of the tensors made, by the model's names

    @property
    def pieces(self) -> tuple[StoredTensor, ...]:
        """The parts in the order in which their rows stand one above the other in a stack, such as gate and up of the
        first expert, then those of the next; () where the conversion does more than put them there.
        """
        assert self.converter is not None
        merges, *joins = self.converter.operations
        kinds = [operation for operation in joins if not (isinstance(operation, Concatenate) and operation.dim == 1)]
        if not isinstance(merges, MergeModulelist) or merges.dim != 0 or kinds or len(joins) > 1:
            return ()
        columns = [
            [part for part, own in zip(self.parts, self.patterns, strict=True) if own == pattern]
            for pattern in self.converter.source_patterns
        ]
        return tuple(part for group in zip(*columns, strict=True) for part in group)

    def convert(self, model: Any, read: Callable[[StoredTensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors made, by the model's names, of the parts that ``read`` gives."""
        assert self.converter is not None
        return _convert(model, self.name, self.converter, zip(self.patterns, self.parts, strict=True), read)


@dataclass(frozen=True)
class Checkpoint:
    """A folder's tensors, by what becomes of them in one model."""

    plain: dict[str, StoredTensor]  # by the model's names; of a tied tensor each name that is stored
    conversions: tuple[Conversion, ...]
    untouched: tuple[StoredTensor, ...]  # of parts that are left out, or that transformers ignores too
    unexpected: tuple[str, ...]  # names in the files that the model has no place for

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes that the files give each of the model's tensors."""
        made = {name: shape for conversion in self.conversions for name, shape in conversion.shapes.items()}
        return {name: stored.shape for name, stored in self.plain.items()} | made


def read_checkpoint(model: Any, names: Collection[str], folder: str | Path) -> Checkpoint:
    """Match the headers of ``folder`` with the tensors ``names`` of a transformers model, sharded or adapted or not.

    UserError where a file is missing or broken, or two tensors claim one name.
    """
    wanted = dict.fromkeys(names, True)  # rename_source_key asks for a mapping without None
    rules = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    towers, stacks = left_out(model), stacked_layers(model)
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()] + [
        OLD_BUFFERS
    ]
    plain: dict[str, StoredTensor] = {}
    groups: dict[str, list[tuple[str, StoredTensor]]] = {}
    untouched: list[StoredTensor] = []
    unexpected: list[str] = []
    for stored in sorted(index_files(Path(folder)), key=lambda stored: dot_natural_key(stored.name)):
        name, pattern = rename_source_key(stored.name, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and stored.name in wanted:  # already as the model has it
            name, pattern = stored.name, None
        if name not in wanted:
            if inside(name, towers) or any(rule.search(name) for rule in ignored):
                untouched.append(stored)
            else:
                unexpected.append(stored.name)
        elif pattern is not None and not (name in stacks and len(stored.shape) == 3):  # stacks read any order of axes
            groups.setdefault(name, []).append((pattern, stored))
        elif name in plain:
            raise UserError(
                f"two tensors of the files have the name {name}",
                where=str(folder),
                details=[plain[name].name, stored.name],
            )
        else:
            plain[name] = stored
    return Checkpoint(
        plain=plain,
        conversions=tuple(_group(model, name, by_pattern[parts[0][0]], parts) for name, parts in groups.items()),
        untouched=tuple(untouched),
        unexpected=tuple(unexpected),
    )


def index_files(folder: Path) -> list[StoredTensor]:
    """All tensors of a model folder, from the headers alone; those that hold a weight in 4 bits as that weight."""
    headers = {path: read_header(path) for path in find_weight_files(folder)}
    (in_nf4, pieces), (in_mxfp4, others) = find_stored_nf4(headers), find_stored_mxfp4(headers)
    weights: dict[str, tuple[Path, StoredNf4 | StoredMxfp4]] = {
        **{name: (weight.pieces["weight"][0], weight) for name, weight in in_nf4.items()},
        **{name: (weight.pieces["blocks"][0], weight) for name, weight in in_mxfp4.items()},
    }
    return [
        StoredTensor(name, path, header.shape, header.dtype)
        for path, own in headers.items()
        for name, header in own.items()
        if name not in pieces | others
    ] + [StoredTensor(name, path, weight.shape, weight.dtype, weight) for name, (path, weight) in weights.items()]


def _group(model: Any, name: str, converter: WeightConverter, parts: list[tuple[str, StoredTensor]]) -> Conversion:
    """A conversion, tried on meta tensors for the shapes of what it makes."""
    on_meta = _convert(model, name, converter, parts, lambda stored: torch.empty(stored.shape, device="meta"))
    shapes = {made: tuple(tensor.shape) for made, tensor in on_meta.items()}
    return Conversion(
        name, tuple(stored for _, stored in parts), tuple(pattern for pattern, _ in parts), converter, shapes
    )


def _convert(
    model: Any,
    name: str,
    converter: WeightConverter,
    parts: Iterable[tuple[str, StoredTensor]],
    read: Callable[[StoredTensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    own: Any = copy.deepcopy(converter)  # it collects tensors
    for pattern, stored in parts:
        own.add_tensor(name, stored.name, pattern, read(stored))
    made = own.convert(name, model=model, config=model.config)
    return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


def needs_conversion(model: Any) -> bool:
    """Whether transformers has rules for this family that do more than rename."""
    return any(isinstance(rule, WeightConverter) for rule in get_model_conversion_mapping(model, add_legacy=False))


# ---- reading and writing back ----------------------------------------------------------------------------------------


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """A safetensors file, closed again at the end: its mapped pages would count as this process's memory."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        raise UserError(
            "a weights file cannot be read", where=str(path), why=str(error), fix="download the model again"
        ) from error


@contextmanager
def open_parts(parts: Iterable[StoredTensor]) -> Iterator[dict[Path, Any]]:
    """The files that hold ``parts``."""
    with ExitStack() as stack:
        yield {path: stack.enter_context(open_weights(path)) for path in {part.file for part in parts}}


def read_converted(model: Any, conversion: Conversion) -> dict[str, torch.Tensor]:
    """The whole tensors of one conversion."""
    with open_parts(conversion.parts) as files:

        def read(part: StoredTensor) -> torch.Tensor:
            advance()
            return files[part.file].get_tensor(part.name)

        return conversion.convert(model, read)


def read_stored(stored: StoredTensor) -> torch.Tensor:
    """A whole tensor as it is in its file."""
    with open_weights(stored.file) as file:
        return file.get_tensor(stored.name)


def revert(model: Any, conversion: Conversion, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the files call the tensors that a conversion made: as many, with the same names and shapes. UserError
    otherwise.
    """
    parts = revert_weight_conversion(model, dict(made))
    expected = {part.name: part.shape for part in conversion.parts}
    if {name: tuple(tensor.shape) for name, tensor in parts.items()} != expected:
        raise UserError(
            f"transformers cannot write {conversion.name} as it was stored",
            where="model.name",
            why="its conversion of this family's weights cannot be undone",
            details=sorted(set(parts) ^ set(expected))[:20],
        )
    return parts


def state_by_file_names(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """A loaded transformers model's state under the names of its files; what these do not hold keeps the model's
    name.
    """
    state = model.state_dict(keep_vars=True)
    checkpoint = read_checkpoint(model, state, folder)
    found = {stored.name: state[name].detach() for name, stored in checkpoint.plain.items()}
    for conversion in checkpoint.conversions:
        found |= revert(model, conversion, {name: state[name].detach() for name in conversion.shapes})
    held = {id(state[name]) for name in checkpoint.shapes}  # a tied weight is held under any of its names
    return found | {name: tensor.detach() for name, tensor in state.items() if id(tensor) not in held}
