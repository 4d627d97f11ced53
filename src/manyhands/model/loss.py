"""Loss terms as sums and weights. Nobody here divides: one place in ``training`` does, by the global batch.

``LossModel`` wraps a Hugging Face causal model. Its base gives hidden states; only positions with a label pass through
the head, a chunk at a time, so that logits of all positions are never held at once. The head is the family's own
forward pass with the base replaced by the identity, so soft-caps and scales need no table. Knows nothing of ranks,
packing or the loop.

Shapes: b samples or 1 pack, t positions, n = b t, m trained positions, e hidden size, v vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

from manyhands import families
from manyhands.core.errors import UserError
from manyhands.core.holding import is_full
from manyhands.core.limits import MAX_CHUNK_LOGITS, MIN_CHUNK_TOKENS
from manyhands.core.terms import IS_FOR_VALUE, LANGUAGE_MODEL, LossTerm
from manyhands.data.batch.collate import NOISE_KEY, TEXT_ENTRIES
from manyhands.data.store.streams import REFERENCE
from manyhands.kernels.loss import choose_backend
from manyhands.kernels.loss.head import Head, agrees, read_head
from manyhands.kernels.matmul import sum_dtype
from manyhands.model.attention import attention_kwargs, count_positions, document_mask
from manyhands.model.documents import ROWS, Documents, follow_documents, separate_states
from manyhands.model.multimodal import BY_OWN_FORWARD, Images
from manyhands.model.structure import base_path, find_decoder
from manyhands.training.types import StepFigures

IGNORED = -100  # labels with this value are not trained
PROBE_ROWS = 16

Terms = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Answers(NamedTuple):
    """Of each document: the log-probability of its loss tokens together, (d) float64, and their number, (d) int64."""

    log_probabilities: torch.Tensor
    num_tokens: torch.Tensor


class OptionalParts(Protocol):
    """Parts of a model that only some micro-batches reach, such as a vision tower and its projector."""

    unused: set[str]  # names of parameters that no loss depends on

    def are_idle(self, batch: Mapping[str, Any]) -> bool:
        """Whether no micro-batch of the step that ``batch`` belongs to reaches the parts, on any rank."""
        ...

    def trained(self, model: nn.Module) -> list[nn.Parameter]:
        """The trained parameters of the parts, as they are held at present."""
        ...

    def divide_for_sharding(self, model: nn.Module) -> tuple[list[nn.Module], set[nn.Parameter]]:
        """(blocks that are sharded one by one, parameters that every rank holds in full). Once blocks are sharded,
        every rank runs the parts in every forward pass.
        """
        ...


class LossModel(nn.Module):
    """A causal model that returns (sum, weight) of each of its ``terms`` for a micro-batch; by default of
    cross-entropy: ``{"lm": (loss_sum, weight)}``.

    ``batch`` holds ``input_ids`` and ``labels`` (b, t) int64, ``labels`` already shifted and -100 where nothing is
    trained; if packed also ``position_ids`` (1, t), ``cu_seq_lens`` (documents + 1) int32 and ``max_length``. It may
    hold ``label_positions`` (m) int64, the flat positions that have a label: on a GPU this spares a wait for the
    device. It may hold ``loss_weights`` (b, t) float32, aligned with ``labels``: then the loss is ``sum_i w_i ce_i``
    and its weight ``sum_i w_i``; without them every label weighs 1, and the weight is their exact number. Any entry
    that a batch of text does not have (``TEXT_ENTRIES``) goes to the model under its own name, but for images
    (``model/multimodal.py``), which reach its decoder in place of their tokens.
    """

    model: Any  # a transformers causal model
    images: Images | None = None  # set where tower and projector are in memory
    terms: Sequence[LossTerm]  # converters may add theirs (``on_loss``)
    without_adapters: Callable[[], AbstractContextManager[None]] | None = None  # set where there are some
    is_reference = False  # while the model before training computes, and not the trained one
    _head: Head | None

    def __init__(self, model: Any, *, fuse: bool = False, terms: Sequence[LossTerm] = (LANGUAGE_MODEL,)) -> None:
        """``fuse``: cross-entropy fused with the head, if the head is one that can be; ``how_loss`` says what runs."""
        super().__init__()
        base, config = base_path(model), model.config
        unfit = not base or getattr(config, "is_encoder_decoder", False)
        # OPT's head asks its base for more than hidden states
        if unfit or hasattr(model.get_submodule(base), "decoder"):
            raise UserError(
                f"{type(model).__name__} is not a decoder with a base model and a head",
                where="model.name",
                fix="use a causal language model",
            )
        if getattr(config, "output_router_logits", False):
            raise UserError(
                f"{type(model).__name__} adds a router loss of its own, which would be dropped",
                where="config.json: output_router_logits",
                fix="set output_router_logits to false in the model's config.json",
            )
        if getattr(config.get_text_config(), "use_bidirectional_attention", None) in (True, "all"):
            raise UserError(
                f"{type(model).__name__} reads its prompt in both directions, which causal training would break",
                where="config.json: use_bidirectional_attention",
                why="it is on in the configuration of its text, by default or by config.json",
                fix="use a causal language model",
            )
        self.model, self.terms = model, terms
        self.figures: list[StepFigures] = []  # of a step of training, beside its loss
        self.documents = Documents()  # of the batch, for what hangs on their lengths
        ropes = follow_documents(model)
        for rope in ropes:
            rope.documents = self.documents
        self.documents.wants_lengths = bool(ropes)
        self.states = separate_states(model)
        self.needs_documents = bool(ropes or self.states)  # whether batches have to say how long documents are
        object.__setattr__(self, "_head", None)
        self._head_agrees = False
        self._computes: tuple[torch.device, torch.dtype] | None = None  # where and in what hidden states came
        self.why_chunked = "not fused by the plan"
        if fuse:
            self.fuse_head()

    def fuse_head(self) -> None:
        """Fuse cross-entropy with the head from now on, if the head is one that can be; else ``why_chunked`` is set."""
        head = read_head(self.model)
        # not a child: its weight is the model's. It is compared with the model's own logits at the first micro-batch.
        object.__setattr__(self, "_head", None if isinstance(head, str) else head)
        self.why_chunked = head if isinstance(head, str) else ""

    @property
    def optional_parts(self) -> OptionalParts | None:
        """Parts of the model that only some micro-batches reach; None where there are none."""
        return self.images

    @property
    def how_loss(self) -> str:
        """Which path computes the loss, and why not a faster one; known after the first micro-batch."""
        if self._head is None:
            return f"in chunks, recomputed in the backward pass ({self.why_chunked})"
        weight = self._head.module.weight  # may lie in host memory between two steps
        backend = choose_backend(*(self._computes or (weight.device, weight.dtype)))
        return f"fused with the head, {backend.name}" + (f" ({backend.reason})" if backend.reason else "")

    def forward(self, batch: Mapping[str, Any], metrics: bool = False) -> Terms:
        """Loss terms of one micro-batch, 0-d tensors. ``metrics=True`` adds what their metrics are the means of."""
        inputs = batch
        if REFERENCE.name not in batch and any(term.needs_reference for term in self.terms):
            # before the model's own pass, as each may hold what a backward pass takes
            batch = {**batch, REFERENCE.name: self.reference_answers(batch).log_probabilities}
        hidden = self._hidden_states(inputs)  # (n, e)
        if batch.get(IS_FOR_VALUE):
            values = (term.value for term in self.terms if term.value is not None)
            return {value.name: value.compute(self, batch, hidden) for value in values}
        found: Terms = {}
        for term in self.terms:
            found |= (term.compute or LossModel.cross_entropy)(self, batch, hidden, metrics)
        return found

    def cross_entropy(self, batch: Mapping[str, Any], hidden: torch.Tensor, metrics: bool) -> Terms:
        """The term "lm" from hidden states (n, e): its sum in float32 (float64 for a float64 model).

        The weight is int64 without ``loss_weights``, else float64. ``metrics=True`` adds ``"correct"``: the number of
        labels that are the arg max of their logits, and of labels, whatever they weigh. A micro-batch without labels
        gives a zero that depends on every parameter, so that no rank leaves a collective out.
        """
        labels, rows = _labels_of(batch)
        num_loss_tokens = torch.tensor(rows.numel(), device=hidden.device)
        weights = batch["loss_weights"].flatten().index_select(0, rows) if "loss_weights" in batch else None  # (m)
        weight = num_loss_tokens if weights is None else weights.sum(dtype=torch.float64)
        if rows.numel() == 0:
            logits = self.logits_of(hidden[:1])
            zero = logits.sum(dtype=sum_dtype(logits.dtype)) * 0
            return {"lm": (zero, weight)} | ({"correct": (num_loss_tokens.clone(), num_loss_tokens)} if metrics else {})
        hidden, labels = hidden.index_select(0, rows), labels.index_select(0, rows)
        head = self._checked_head(hidden)
        if head is not None:
            loss_sum, num_correct = head.loss(hidden, labels, weights, metrics)
        else:
            loss_sum, num_correct = self._chunked_loss(hidden, labels, weights, metrics)
        return {"lm": (loss_sum, weight)} | ({"correct": (num_correct, num_loss_tokens)} if metrics else {})

    def answers(self, batch: Mapping[str, Any], hidden: torch.Tensor) -> Answers:
        """The log-probabilities of each document's loss tokens from hidden states (n, e).

        ``batch`` has ``documents`` (d), the lengths of all documents, end to end in a pack or one a row. Where the head
        is trained, chunks of logits are recomputed in the backward pass: what each row will weigh is not known before.
        """
        labels, rows = _labels_of(batch)
        num_documents = batch["documents"].numel()
        if rows.numel() == 0:
            zero = self.logits_of(hidden[:1]).sum(dtype=torch.float64) * 0
            return Answers(zero.expand(num_documents), rows.new_zeros(num_documents))
        ends = batch["cu_seq_lens"][1 : num_documents + 1].long() if "cu_seq_lens" in batch else None
        row_length = batch["input_ids"].shape[1]
        numbers = rows // row_length if ends is None else torch.bucketize(rows, ends, right=True)
        hidden, labels = hidden.index_select(0, rows), labels.index_select(0, rows)
        head = self._checked_head(hidden)
        if head is not None and not (torch.is_grad_enabled() and head.module.weight.requires_grad):
            losses, _ = head.loss(hidden, labels, by_row=True)
        else:
            losses = self._chunked_losses(hidden, labels)
        counts = torch.bincount(numbers, minlength=num_documents)
        sums = torch.segment_reduce(-losses.double(), "sum", lengths=counts, unsafe=True)  # each in its order
        return Answers(sums, counts)

    def reference_answers(self, batch: Mapping[str, Any]) -> Answers:
        """The same of the model before training, its adapters switched off, without gradients.

        Compiled code for passes with gradients rounds otherwise than code for passes without. So in training, where
        weights are whole and on the device, the pass is one with gradients, which are not computed: an adapter that has
        not moved gives the same bits as none.
        """
        if self.without_adapters is None:
            raise UserError(
                "the model before training is not at hand",
                where="method.name",
                why="a preference loss compares with it, and only adapters can be switched off",
                fix="set preference.reference: stored, or a preference.loss that needs no reference",
            )
        batch = {name: value for name, value in batch.items() if name != NOISE_KEY}
        device = batch["input_ids"].device
        is_whole = all(is_full(weight) and weight.device == device for weight in self.model.parameters())
        self.is_reference = True
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and is_whole), self.without_adapters():
                hidden = self._hidden_states(batch).detach()
        finally:
            self.is_reference = False
        with torch.no_grad():
            return self.answers(batch, hidden)

    def logits(self, batch: Mapping[str, Any], rows: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (b, t, v) from the model's own forward pass, all positions at once: for checks on small batches. Of a
        long batch only those of ``rows`` (m), flat positions: (m, v).
        """
        if rows is not None:
            return self.logits_of(self._hidden_states(batch).index_select(0, rows))
        if self.images is not None and self.images.has_images(batch):
            if not batch.get(BY_OWN_FORWARD):
                hidden = self._hidden_states(batch)
                return self.logits_of(hidden).unflatten(0, batch["input_ids"].shape)
            kwargs = self.images.own_inputs(self.model, batch)
        else:
            kwargs = self._model_inputs(batch)
        with self.documents.of(batch):
            return self.model(input_ids=batch["input_ids"], use_cache=False, **kwargs).logits

    def next_token_logits(self, input_ids: torch.Tensor, entries: Mapping[str, Any] | None = None) -> torch.Tensor:
        """Logits (b, v) of the token after each of the rows (b, t), which have no padding. ``entries``: those of a
        batch beside the ids, such as the rows' images and ``position_ids``."""
        hidden = self._hidden_states({"input_ids": input_ids, **(entries or {})}).unflatten(0, input_ids.shape)
        return self.logits_of(hidden[:, -1])

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (m, v) of hidden states (m, e), through whatever the family does between its last norm and its
        logits.
        """
        return _head_view(self.model)(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def _hidden_states(self, batch: Mapping[str, Any]) -> torch.Tensor:
        # use_cache=False is not for speed: with a cache transformers skips the detection of packed documents
        kwargs = self._model_inputs(batch)
        with self.documents.of(batch):
            if self.images is not None and self.images.has_images(batch):
                kwargs |= self.images.decoder_inputs(self.model, batch)
                return find_decoder(self.model)(use_cache=False, **kwargs)[0].flatten(0, 1)
            base = self.model.get_submodule(base_path(self.model))
            return base(input_ids=batch["input_ids"], use_cache=False, **kwargs)[0].flatten(0, 1)

    def _model_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        config = self.model.config
        dtype = sum_dtype(self.model.dtype)
        kwargs = attention_kwargs(batch, config._attn_implementation, count_positions(config), dtype)
        if self.states and (documents := self.states.describe(batch)) is not None:
            kwargs[ROWS] = documents
            if config._attn_implementation == "sdpa" and not families.find(config.model_type).masks_by_position:
                kwargs["attention_mask"] = document_mask(batch["position_ids"])
        values = {term.value.name for term in self.terms if term.value is not None} | {IS_FOR_VALUE}
        taken = TEXT_ENTRIES.union(values, *(term.entries for term in self.terms))
        taken |= set(self.images.entries) if self.images else set()
        return kwargs | {name: value for name, value in batch.items() if name not in taken}

    def _checked_head(self, hidden: torch.Tensor) -> Head | None:
        """The head to fuse with; once, on a few rows, its logits are compared with the model's own (waits for the
        device).
        """
        self._computes = hidden.device, hidden.dtype
        if self._head is not None and not self._head_agrees:
            few = hidden[:PROBE_ROWS].detach()
            with torch.no_grad():
                self._head_agrees = agrees(self._head, few, self.logits_of(few))
            if not self._head_agrees:
                object.__setattr__(self, "_head", None)
                self.why_chunked = "logits do not follow from the head's weight, scale and cap"
        return self._head

    def _chunked_loss(
        self, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None, metrics: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of (weighted) cross-entropies over (m, e), (m,) and (m,), and the number of arg max hits."""
        sums = self._by_chunks(partial(self._loss, metrics=metrics), hidden, labels, weights)
        losses, hits = zip(*sums, strict=True)
        return torch.stack(losses).sum(), torch.stack(hits).sum()

    def _chunked_losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The cross-entropy of each row, (m)."""

        def compute_chunk(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.logits_of(hidden)
            return F.cross_entropy(logits.to(sum_dtype(logits.dtype)), labels, reduction="none")

        return torch.cat(self._by_chunks(compute_chunk, hidden, labels))

    def _by_chunks(self, compute: Callable[..., Any], hidden: torch.Tensor, *others: torch.Tensor | None) -> list[Any]:
        """What ``compute`` makes of each chunk of rows, recomputed in the backward pass; of one chunk the logits are
        held in any case.
        """
        num_rows = chunk_rows(self.model.config.get_text_config().vocab_size)
        chunks = hidden.split(num_rows)
        columns = [(None,) * len(chunks) if other is None else other.split(num_rows) for other in others]
        if torch.is_grad_enabled() and len(chunks) > 1:
            compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
        return [compute(*arguments) for arguments in zip(chunks, *columns, strict=True)]

    def _loss(
        self, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None, metrics: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.logits_of(hidden)
        hits = (logits.detach().argmax(-1) == labels).sum() if metrics else labels.new_zeros(())
        logits = logits.to(sum_dtype(logits.dtype))
        if weights is None:
            return F.cross_entropy(logits, labels, reduction="sum"), hits
        losses = F.cross_entropy(logits, labels, reduction="none")  # (m,)
        return (losses * weights.to(losses.dtype)).sum(), hits


def _labels_of(batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(labels (n), flat positions of those that count (m))."""
    labels = batch["labels"].flatten()
    rows = batch.get("label_positions")
    return labels, (labels != IGNORED).nonzero().squeeze(1) if rows is None else rows


def chunk_rows(vocab_size: int) -> int:
    """Rows of one chunk: at most 2**27 logits (0.5 GiB in float32), but never under 256 rows, where the head would
    starve.
    """
    return max(MIN_CHUNK_TOKENS, MAX_CHUNK_LOGITS // vocab_size)


class _HeadInput(BaseModelOutputWithPast):
    """What the head reads from the base: the hidden states, and None for anything else a family may ask (router logits,
    ...).
    """

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Identity(nn.Module):
    """In the base's place: hands its ``inputs_embeds`` on as the last hidden state. Attributes are the base's, which
    some heads read (a multiplier, a configuration); its parameters are not the view's."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)

    def forward(self, *_: Any, inputs_embeds: torch.Tensor | None = None, **__: Any) -> _HeadInput:
        return _HeadInput(last_hidden_state=inputs_embeds)


def _head_view(model: Any) -> Any:
    """The model without its base. Shares the head's module, has no state of its own, and is created for each use."""
    return _replace_base(model, base_path(model))


def _replace_base(module: Any, path: str) -> Any:
    if not path:
        return _Identity(module)
    view, (name, _, rest) = copy.copy(module), path.partition(".")
    view._modules = module._modules | {name: _replace_base(module._modules[name], rest)}
    return view
