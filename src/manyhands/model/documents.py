"""Which document each token of a batch is of, for what depends on a document's own length or carries a state along it:
rotary frequencies and mixers here, noise on the embeddings in ``convert/neftune.py``.

For ``rope_type`` ``dynamic`` and ``longrope`` transformers takes the frequencies from the largest position of the
batch, ``dynamic`` also from earlier batches (``modeling_rope_utils.dynamic_rope_update``): a document's logits would
depend on what else is in its batch. ``DocumentRope`` takes its place: each token gets the angles of its own document's
length, as if the document were alone, by the family's own forward pass. Nothing is kept between two batches but the
frequencies of a length, and no device is waited for where batches say their lengths.

Linear attention, state space models and short convolutions carry a state along a row, which transformers' own code
does not reset between the documents of a pack. ``RowsOfDocuments`` lets such a mixer compute the documents as rows of a
few batches. Rows are filled up on the right, where nothing reaches earlier positions and no gradient comes from.
Where kernels of other packages are installed that reset the state themselves, the mixer computes the pack as it is and
hands them its documents' bounds, as long as ``model/checks.py`` finds that they do.

Shapes: b rows, t positions, d dimensions of a rotation, e hidden size.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import nn

from manyhands import families
from manyhands.data.batch.batches import to_tensors
from manyhands.data.batch.collate import (
    DISTINCT_LENGTHS,
    DOCUMENT_LENGTHS,
    NOISE_KEY,
    ROW_PLACES,
    ROW_SHAPES,
    ROW_TOKENS,
    SAMPLE_NUMBERS,
    lay_out_rows,
)
from manyhands.data.batch.divide import HALO_BOUNDS, HALO_PLACES
from manyhands.kernels.attention.context import gather_keys
from manyhands.model import delta_net
from manyhands.model.structure import find_blocks, with_class

ROWS = "document_rows"  # by which name the rows of a pack reach the blocks


class Rows(NamedTuple):
    """A pack's documents as rows of batches; see ``lay_out_rows``."""

    shapes: tuple[tuple[int, int], ...]
    tokens: torch.Tensor
    places: torch.Tensor
    halos: torch.Tensor | None = None  # of a part of a pack that ranks divide: see ``_add_halos``

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Rows | None:
        """None where the batch is no pack: its rows are documents. Waits for the device where the batch does not say
        them, as in checks."""
        if "cu_seq_lens" not in batch:
            return None
        if ROW_SHAPES not in batch:
            bounds, ids = batch["cu_seq_lens"], batch["input_ids"]
            lengths = [length for length in bounds.diff().tolist() if length]
            batch = to_tensors(lay_out_rows(lengths, ids.shape[1]), ids.device)
        return cls(batch[ROW_SHAPES], batch[ROW_TOKENS], batch[ROW_PLACES], batch.get(HALO_PLACES))


class Bounds(NamedTuple):
    """A pack's documents as mixers' kernels take them, by the names of the mixers' arguments."""

    seq_idx: torch.Tensor  # (1, t) int32: the number of the document that a token is of
    cu_seq_lens_q: torch.Tensor  # (d + 1) int64: where documents begin and end, no two the same
    halos: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Bounds | None:
        """None where the batch is no pack. Waits for the device, as the kernels themselves do."""
        if "cu_seq_lens" not in batch:
            return None
        ids, halos = batch["input_ids"], batch.get(HALO_PLACES)
        total = ids.shape[1] + (0 if halos is None else len(halos))
        bounds = F.pad(batch.get(HALO_BOUNDS, batch["cu_seq_lens"]).long(), (0, 1), value=total).unique_consecutive()
        places = torch.arange(total, device=ids.device)
        return cls(torch.bucketize(places, bounds[1:], right=True, out_int32=True)[None], bounds, halos)


class Documents:
    """The documents of the batch that passes through the model at present."""

    def __init__(self) -> None:
        self.lengths: torch.Tensor | None = None  # (b, t) int64: tokens of the document that a token is of
        self.distinct: tuple[int, ...] = ()  # all of these lengths, as the host knows them
        self.samples: torch.Tensor | None = None  # (b, t) int64: which sample of the store a token is of
        self.positions: torch.Tensor | None = None  # (b, t) int64: a token's place in its document
        self.noise_key: int | None = None
        self.wants_lengths = False  # of batches that do not say them too, for which the device is waited for

    @contextmanager
    def of(self, batch: Mapping[str, Any]) -> Iterator[None]:
        """Within it they are those of ``batch``; afterwards each row is taken for one document again."""
        try:
            self.lengths, self.distinct = batch.get(DOCUMENT_LENGTHS), batch.get(DISTINCT_LENGTHS, ())
            self.samples, self.positions = batch.get(SAMPLE_NUMBERS), batch.get("position_ids")
            self.noise_key = batch.get(NOISE_KEY)
            if self.wants_lengths and self.lengths is None and "cu_seq_lens" in batch:  # a few tokens, for a check
                lengths = batch["cu_seq_lens"].diff().long()
                self.lengths = lengths.repeat_interleave(lengths)[None]
                self.distinct = tuple(lengths.tolist())
            yield
        finally:
            self.lengths, self.distinct, self.samples, self.positions, self.noise_key = None, (), None, None, None


class DocumentRope(nn.Module):
    """A family's rotary embedding, called as the family calls it, with frequencies by each document's length.

    Where nothing is known of documents (generation), each row of positions is one, and its largest position says its
    length. Attributes are those of the module within.
    """

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary
        self.documents = Documents()
        self._rotate = inspect.unwrap(type(rotary).forward)  # without transformers' own update of its frequencies
        self._frequencies: dict[tuple[str | None, int], torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("rotary"), name)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        """Angles of positions (b, t), in the family's own form: cosine and sine (b, t, d), or complex (b, t, d / 2)."""
        lengths, distinct = self.documents.lengths, self.documents.distinct
        if lengths is None:
            rows = position_ids.amax(-1) + 1
            lengths, distinct = rows[:, None], tuple(rows.tolist())
        thresholds = sorted({self._threshold(length, layer_type) for length in distinct})
        angles = self._angles(thresholds[0], x, position_ids, layer_type)
        for threshold in thresholds[1:]:  # longer and longer documents
            longer = (lengths >= threshold)[..., None]
            others = self._angles(threshold, x, position_ids, layer_type)
            if isinstance(angles, tuple):
                angles = tuple(torch.where(longer, new, old) for new, old in zip(others, angles, strict=True))
            else:
                angles = torch.where(longer, others, angles)
        return angles

    def _threshold(self, length: int, layer_type: str | None) -> int:
        """The least length of those that have the frequencies of ``length``; 0: those that the module begins with."""
        kind, bound = length_bound(self.rotary, layer_type)
        if bound is None or length <= bound:
            return 0
        return bound + 1 if kind == "longrope" else length

    def _angles(self, threshold: int, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None) -> Any:
        arguments = (x, position_ids) if layer_type is None else (x, position_ids, layer_type)
        if not threshold:
            return self._rotate(self.rotary, *arguments)
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        buffers, own = self.rotary._buffers, self.rotary._buffers[name]
        buffers[name] = self._frequencies_of(threshold, layer_type, own)
        try:
            return self._rotate(self.rotary, *arguments)
        finally:
            buffers[name] = own

    def _frequencies_of(self, length: int, layer_type: str | None, like: torch.Tensor) -> torch.Tensor:
        """Computed on the host as transformers computes them, once for each length."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        found = self._frequencies.get((layer_type, length))
        if found is None or found.device != like.device:
            kind, _ = length_bound(self.rotary, layer_type)
            cpu = torch.device("cpu")
            more = {} if layer_type is None else {"layer_type": layer_type}
            found, _ = ROPE_INIT_FUNCTIONS[kind](self.rotary.config, cpu, seq_len=torch.tensor(length), **more)
            found = self._frequencies[layer_type, length] = found.to(like.device, like.dtype)
        return found


@dataclass
class MixerStates:
    """How mixers keep the documents of a pack apart, and those of the pack that a block computes at present."""

    why_rows: str = ""  # why documents are rows; "": kernels are handed their bounds
    documents: Rows | Bounds | None = None

    def describe(self, batch: Mapping[str, Any]) -> Rows | Bounds | None:
        """What blocks are told of a batch; None where it is no pack."""
        return Rows.of(batch) if self.why_rows else Bounds.of(batch)

    def __str__(self) -> str:
        return f"documents of a pack as rows ({self.why_rows})" if self.why_rows else "packs, by their kernels' bounds"


class RowsOfDocuments(nn.Module):
    """Put before the class of a mixer: of a pack it computes each document from a state of its own."""

    current: MixerStates
    kernels: delta_net.Kernels | None  # that compute a pack without the mixer's own forward pass

    def train(self, mode: bool = True) -> Self:
        """Keeps the mixer itself from training mode, in which Mamba-2 hands the weight of its last layer to a kernel:
        what was put in that layer's place (an adapter, another storage) would be passed over.
        """
        super().train(mode)
        self.training = False
        return self

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """(b, t, e) -> (b, t, e)"""
        documents = self.current.documents
        if documents is None:
            return super().forward(hidden_states, *args, **kwargs)
        compute: Any = self._compute_pack if isinstance(documents, Bounds) else self._compute_rows
        if documents.halos is None:
            return compute(hidden_states, documents)
        out = compute(_add_halos(hidden_states, documents.halos), documents)
        return out.unflatten(1, (2, -1))[:, :, len(documents.halos) // 2 :].flatten(1, 2)

    @torch.compiler.disable
    def _compute_pack(self, hidden_states: torch.Tensor, documents: Bounds) -> torch.Tensor:
        if self.kernels is not None:
            return delta_net.compute_pack(self.kernels, self, hidden_states, documents.cu_seq_lens_q)
        names = {kernel.argument for kernel in families.mixer_kernels(type(self).__name__)}
        out: torch.Tensor = super().forward(hidden_states, **{name: getattr(documents, name) for name in names})
        return out

    @torch.compiler.disable  # each pack has other rows
    def _compute_rows(self, hidden_states: torch.Tensor, rows: Rows) -> Any:
        forward: Any = super().forward
        compute = partial(forward, **_unused_arguments(forward.__func__))
        sizes = [num_rows * length for num_rows, length in rows.shapes]
        parts = hidden_states.flatten(0, 1).index_select(0, rows.tokens).split(sizes)
        made = [compute(x.unflatten(0, shape)) for x, shape in zip(parts, rows.shapes, strict=True)]
        out = torch.cat([(x[0] if isinstance(x, tuple) else x).flatten(0, 1) for x in made])
        out = out.index_select(0, rows.places).view_as(hidden_states)
        return (out, None) if isinstance(made[0], tuple) else out


def _add_halos(hidden_states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(1, t, e) of a rank's two chunks of a pack -> (1, t + 2 n, e): in front of each the n tokens before it, which are
    ``places`` (2 n) of the last n of all ranks' chunks. Collective.
    """
    chunks, num = hidden_states[0].unflatten(0, (2, -1)), len(places) // 2
    before = gather_keys(chunks[:, -num:].flatten(0, 1)[:, None], places)[:, 0]
    return torch.cat([before.unflatten(0, (2, num)), chunks], dim=1).flatten(0, 1)[None]


@cache
def _unused_arguments(forward: Callable[..., Any]) -> dict[str, None]:
    """Required arguments of a mixer's forward pass that it does not use (positions, a mask), as None."""
    parameters = list(inspect.signature(forward).parameters.values())[2:]
    return {p.name: None for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}


@cache
def _by_rows(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (RowsOfDocuments, kind), {"__module__": kind.__module__})


def why_no_kernels(mixer: nn.Module) -> str:
    """Why no kernels keep documents of a pack apart in a mixer of this class; "" where each of them is installed and
    takes what says so.
    """
    kind = type(mixer).__name__
    if not families.mixer_kernels(kind):
        return f"no kernel of {kind} takes them"
    for kernel in families.mixer_kernels(kind):
        module, _, name = kernel.place.partition(":")
        try:  # of any package, which may fail in any way
            function = getattr(importlib.import_module(module), name)
        except Exception:
            return f"{module.partition('.')[0]} is not installed"
        if kernel.parameter not in inspect.signature(function).parameters:
            return f"{name} of {module.partition('.')[0]} takes no {kernel.parameter}"
    return ""


def separate_states(model: Any) -> MixerStates | None:
    """Let each mixer of ``model`` that carries a state along a row start from zero at each document of a pack, in
    place; None where there is none. Names of modules and parameters do not change.

    The documents of a pack are an argument of each block (``ROWS``), so that a block that is recomputed has those of
    its own batch; a hook takes it out again.
    """
    for module in model.modules():
        if isinstance(module, RowsOfDocuments):
            return module.current
    kinds, current = families.stateful_mixers(), MixerStates()
    mixers = {name: module for name, module in model.named_modules() if type(module).__name__ in kinds}
    for name, module in mixers.items():
        mixer: Any = with_class(module, _by_rows(type(module)))  # type: ignore[arg-type]
        mixer.current, mixer.kernels, mixer.training = current, delta_net.find_kernels(module), False
        if mixer.kernels is None:
            current.why_rows = current.why_rows or why_no_kernels(module)
        model.set_submodule(name, mixer)

    def take_rows(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        current.documents = kwargs.pop(ROWS, None)
        return args, kwargs

    for block in _blocks(model) if mixers else ():
        block.register_forward_pre_hook(take_rows, with_kwargs=True)
    return current if mixers else None


def length_bound(rotary: Any, layer_type: str | None = None) -> tuple[str, int | None]:
    """The ``rope_type`` of a rotary module, and above which length its frequencies hang on the length; None: never."""
    kind = rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]
    parameters = rotary.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    if kind == "longrope":
        return kind, int(parameters["original_max_position_embeddings"])
    return kind, int(rotary.config.max_position_embeddings) if "dynamic" in kind else None


def follow_documents(model: Any) -> list[DocumentRope]:
    """Replace each rotary embedding of ``model`` whose frequencies hang on the batch by a ``DocumentRope``, in place;
    returns all that there are. Names of parameters and of what is saved do not change.

    Left alone where a block has one of its own, whose recomputation comes when the batch's documents are gone, where
    positions have several axes, and where it is not transformers' own code: ``model/checks.py`` finds these.
    """
    inside = {module for block in _blocks(model) for module in block.modules()}
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(parent, DocumentRope) or module in inside or not _depends_on_batch(module):
                continue
            setattr(parent, name, DocumentRope(module))
    return [module for module in model.modules() if isinstance(module, DocumentRope)]


def _blocks(model: Any) -> list[nn.Module]:
    from manyhands.core.errors import UserError

    try:
        return list(find_blocks(model).values())
    except UserError:
        return []


def _depends_on_batch(module: Any) -> bool:
    from transformers.modeling_rope_utils import dynamic_rope_update

    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    if not any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
        return False
    updating, wrapped = dynamic_rope_update(lambda: None).__code__, type(module).forward
    while wrapped.__code__ is not updating:
        if not hasattr(wrapped, "__wrapped__"):
            return False
        wrapped = wrapped.__wrapped__
    return "mrope_section" not in module.config.rope_parameters
