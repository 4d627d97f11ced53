"""Is the fast path right for this model? Asked of the loaded model, before the first step, on a few random tokens.

Every rank runs the same probes in the same order, so they work where weights are sharded. Must not know how. What one
rank finds wrong is raised on all: else the others would wait for it in the next probe.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch import nn

from manyhands import families
from manyhands.core.collective_errors import run_on_all_ranks, user_errors_on_all_ranks
from manyhands.core.errors import UserError
from manyhands.core.holding import local
from manyhands.core.terms import LANGUAGE_MODEL
from manyhands.data.batch.batches import collate, to_device
from manyhands.data.batch.collate import DISTINCT_LENGTHS, DOCUMENT_LENGTHS, BatchShape
from manyhands.data.batch.divide import HALO, chunks_of
from manyhands.data.store.streams import DOCUMENTS, MASK, SHARED, TOKENS, join_documents, make_sample, share_prompt
from manyhands.model.attention import AttentionRefused
from manyhands.model.loss import IGNORED, LossModel
from manyhands.model.structure import set_attention

# Relative deviations that rounding alone may cause. The wider ones are for runs of other shapes, whose matrix products
# may sum in another order: 0.04 was seen on random weights of an 8B shape in bfloat16, after 32 blocks.
# (transformers' eager attention, with which they compare, takes its softmax in float32 even in a float64 model.)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
WIDE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 5e-2}
PROBE_LENGTHS = (23, 41)  # tokens of the two documents
PROBE_SEED = 2718
OTHERS, EARLIER = "what else is in its batch", "what was in earlier batches"
MAX_STATE = 2**16  # values of a tensor that may be named as one that changes
NUM_COMPARED = 32  # the last tokens of a long document
# Fields of a config.json that name a length beyond which something may change.
LENGTH_FIELDS = re.compile(
    r"position_embeddings|n_positions|n_ctx|window|chunk_size|seq_?len|max_length|floor_scale|context_len"
)


class Probed(Protocol):
    """What the checks call: the model as it will be trained, under any strategy."""

    def forward(
        self, batch: Mapping[str, Any], *, metrics: bool = False
    ) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]: ...

    def logits(self, batch: Mapping[str, Any], rows: torch.Tensor | None = None) -> torch.Tensor: ...


@contextmanager
def foreign_errors(loss_model: LossModel) -> Iterator[None]:
    """UserError for whatever code of the model's raises within, that is no fault of a device or of another rank."""
    try:
        yield
    except Exception as error:
        foreign = not isinstance(error, UserError | RuntimeError | OSError)
        if not (foreign or isinstance(error, NotImplementedError | AttentionRefused)):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{type(loss_model.model).__name__} cannot be computed as it would be trained",
            where=f"{last.filename}, line {last.lineno}",
            why=f"{type(error).__name__}: {error}",
            fix=f"use a model of another family, such as {families.EXAMPLES}",
        ) from error


@torch.no_grad()
def check_loss(engine: Probed, loss_model: LossModel, device: torch.device) -> float:
    """Compare the chunked loss with cross-entropy of the model's own logits; returns the relative deviation.

    A family that caps, scales or shifts its logits in a way that the head view misses would show here. Raises
    UserError.
    """
    ids = _probe_tokens(loss_model, device)
    batch = {"input_ids": ids, "labels": ids.roll(-1, dims=1)}
    batch["labels"][:, ::3] = IGNORED
    with eager_evaluation(loss_model):
        fast = engine.forward(batch)["lm"][0].double()
        logits = engine.logits(batch)
        with user_errors_on_all_ranks():
            _refuse_values(logits, loss_model)
        _refuse_encoder(engine, loss_model, ids)
    trained = batch["labels"] != IGNORED
    expected = torch.nn.functional.cross_entropy(logits[trained].double(), batch["labels"][trained], reduction="sum")
    deviation = float((fast - expected).abs() / expected.abs())
    tolerance = TOLERANCE[logits.dtype]
    with user_errors_on_all_ranks():
        if not deviation <= tolerance:  # also refuses nan
            raise UserError(
                f"the loss of {type(loss_model.model).__name__} does not follow from its own logits",
                where="model.name",
                why=f"relative deviation {deviation:.1e}, allowed {tolerance:.0e}:"
                f" {float(fast):.6g} against {float(expected):.6g}",
                fix="use a model of another family: this one cannot be trained yet",
            )
    return deviation


@torch.no_grad()
def check_packing(
    engine: Probed, loss_model: LossModel, device: torch.device, *, routes_at_random: bool = False
) -> float:
    """Pack two documents and compare the logits with those of each alone; returns the relative deviation.

    Alone means transformers' plain ``eager`` attention, so that a kernel which drops a soft-cap or a window shows here
    too. A leak is looked for more sharply: another first document of the same length must leave the second one's logits
    as they are, and as no shape changes, rounding does not either. Deviations are root mean squares. Raises UserError.
    ``routes_at_random``: weights are random and choose experts by near ties, which rounding in 16 bits turns over: of
    16 bits then only leaks count. Where kernels of mixers do not keep documents apart, these are rows from then on.
    """
    first, second = _probe_tokens(loss_model, device).split(PROBE_LENGTHS, dim=1)
    states = loss_model.states
    if states and not states.why_rows:
        why = _why_kernels_fail(engine, loss_model, first, second, routes_at_random)
        states.why_rows = next(filter(None, run_on_all_ranks(lambda: why)), "")
    leak, deviation, dtype = _compare_packed(engine, loss_model, first, second)
    bound = _bound(dtype, routes_at_random)
    if _any_rank(not (leak <= TOLERANCE[dtype] and deviation <= bound)):
        _refuse_encoder(engine, loss_model, second, eager=True)
    with user_errors_on_all_ranks():
        if not leak <= TOLERANCE[dtype]:
            _refuse_packing(f"packed documents see each other in {type(loss_model.model).__name__}", leak)
        if not deviation <= bound:
            what = f"logits of packed documents differ from those alone in {type(loss_model.model).__name__}"
            _refuse_packing(what, deviation)
    return deviation


def _any_rank(is_so: bool) -> bool:
    """Whether it is so on any rank, where what follows takes every rank."""
    return any(run_on_all_ranks(lambda: is_so))


def _compare_packed(
    engine: Probed, loss_model: LossModel, first: torch.Tensor, second: torch.Tensor
) -> tuple[float, float, torch.dtype]:
    """How far another first document moves the second one's logits, and packed ones are from those alone."""
    with eager_evaluation(loss_model):
        packed = engine.logits(pack_documents([first, second]))
        changed = engine.logits(pack_documents([first.flip(1), second]))
        alone = _logits_alone(engine, loss_model, [first, second])
    num_first = PROBE_LENGTHS[0]
    leak = relative_deviation(changed[:, num_first:], packed[:, num_first:])
    return leak, relative_deviation(packed, torch.cat(alone, dim=1)), packed.dtype


def _why_kernels_fail(
    engine: Probed, loss_model: LossModel, first: torch.Tensor, second: torch.Tensor, routes_at_random: bool
) -> str:
    """What a mixer's kernels do wrong with a pack; "" where nothing is. A leak counts in any dtype as in float32: a
    convolution with small weights hides what it sees of the document before.
    """
    try:
        leak, deviation, dtype = _compare_packed(engine, loss_model, first, second)
    except Exception as error:  # of any package
        return f"their kernels fail: {type(error).__name__}: {error}".splitlines()[0]
    if leak <= min(TOLERANCE[torch.float32], TOLERANCE[dtype]) and deviation <= _bound(dtype, routes_at_random):
        return ""
    return f"by their kernels logits deviate by {max(leak, deviation):.1e}"


@torch.no_grad()
def check_prompts(
    engine: Probed, loss_model: LossModel, device: torch.device, *, routes_at_random: bool = False
) -> None:
    """A pair whose prompt is computed once against each answer behind a prompt of its own, as ``check_packing``:
    another first answer must leave the logits of the second one as they are. Raises UserError.
    """
    prompt, first, second = _probe_tokens(loss_model, device, 3 * PROBE_LENGTHS[0]).split(PROBE_LENGTHS[0], dim=1)
    with eager_evaluation(loss_model):
        packed, changed = (engine.logits(_share_prompt(prompt, answer, second)) for answer in (first, first.flip(1)))
        whole = [torch.cat([prompt, answer], dim=1) for answer in (first, second)]
        alone = _logits_alone(engine, loss_model, whole)
    own = 1 + PROBE_LENGTHS[0]  # of the second answer: the prompt's last token and its own
    leak = relative_deviation(changed[:, -own:], packed[:, -own:])
    deviation = relative_deviation(packed, torch.cat([alone[0], alone[1][:, -own:]], dim=1))
    bounds = TOLERANCE[packed.dtype], _bound(packed.dtype, routes_at_random)
    with user_errors_on_all_ranks():
        for what, found, bound in (
            ("answers to one prompt see each other", leak, bounds[0]),
            ("logits of answers that share a prompt differ from those alone", deviation, bounds[1]),
        ):
            if not found <= bound:
                raise UserError(
                    f"{what} in {type(loss_model.model).__name__}",
                    where="preference.share_prompts",
                    why=f"relative deviation of the logits: {found:.1e}",
                    fix="set preference.share_prompts=false",
                )


def _share_prompt(prompt: torch.Tensor, *answers: torch.Tensor) -> dict[str, Any]:
    """The batch of a pair that has its prompt once."""
    documents = [torch.cat([prompt, answer], dim=1)[0].cpu().numpy() for answer in answers]
    masks = [np.arange(len(ids)) >= prompt.shape[1] for ids in documents]
    samples = [make_sample(ids.astype(np.int32), mask) for ids, mask in zip(documents, masks, strict=True)]
    sample = {**join_documents(samples), **share_prompt(samples)}
    held = SimpleNamespace(streams=(TOKENS, MASK, DOCUMENTS, SHARED), sample=lambda _: sample)
    batch = collate(held, np.arange(1), BatchShape(True, shares_prompts=True))
    return {name: value for name, value in to_device(batch, prompt.device).items() if name != "labels"}


@torch.no_grad()
def check_context(engine: Probed, loss_model: LossModel, device: torch.device, rank: int, degree: int) -> float:
    """The part of a pack of two documents that ``rank`` of ``degree`` computes with the keys of the others, against the
    pack computed whole; returns the relative deviation. Raises UserError.
    """
    documents = _probe_tokens(loss_model, device)[0].cpu().numpy().astype(np.int32)
    samples = [make_sample(ids, np.ones(len(ids), bool)) for ids in np.split(documents, PROBE_LENGTHS[:1])]
    held = SimpleNamespace(streams=(TOKENS, MASK), sample=samples.__getitem__)
    shape = BatchShape(True, tile=2 * HALO * degree, tells_documents=loss_model.needs_documents)
    batches = [collate(held, np.arange(2), each) for each in (shape, replace(shape, context=degree, context_rank=rank))]
    with eager_evaluation(loss_model):
        whole, part = (engine.logits(to_device(batch, device)) for batch in batches)
    own = torch.cat([whole[:, chunk] for chunk in chunks_of(whole.shape[1], rank, degree)], dim=1)
    deviation = relative_deviation(part, own)
    with user_errors_on_all_ranks():
        if not deviation <= WIDE_TOLERANCE[part.dtype]:
            raise UserError(
                f"logits of a divided pack differ from those of the whole one in {type(loss_model.model).__name__}",
                where="parallel.context_degree",
                why=f"relative deviation of the logits: {deviation:.1e}",
                fix="set parallel.context_degree: 1",
            )
    return deviation


@torch.no_grad()
def check_padding(
    engine: Probed, loss_model: LossModel, device: torch.device, *, routes_at_random: bool = False
) -> float:
    """The plain path: two documents as rows, the shorter one filled up on the right, against each alone. As
    ``check_packing``.
    """
    documents = list(_probe_tokens(loss_model, device).split(PROBE_LENGTHS, dim=1))
    with eager_evaluation(loss_model):
        rows = engine.logits(pad_documents(documents))
        alone = _logits_alone(engine, loss_model, documents)
    found = torch.cat([row[: document.shape[1]] for row, document in zip(rows, documents, strict=True)])
    deviation = relative_deviation(found, torch.cat(alone, dim=1)[0])
    is_wrong = not deviation <= _bound(rows.dtype, routes_at_random)
    if _any_rank(is_wrong):
        _refuse_encoder(engine, loss_model, documents[0], eager=True)
    with user_errors_on_all_ranks():
        if is_wrong:
            raise UserError(
                f"attention of {type(loss_model.model).__name__} is not what the model's own code computes",
                where="model.name",
                why=f"relative deviation of the logits {deviation:.1e}:"
                " the kernel leaves something out, or padding is seen",
                fix="use a model of another family: this one cannot be trained yet",
            )
    return deviation


def _bound(dtype: torch.dtype, routes_at_random: bool) -> float:
    return math.inf if routes_at_random and dtype.itemsize == 2 else WIDE_TOLERANCE[dtype]


@torch.no_grad()
def check_batches(
    engine: Probed, loss_model: LossModel, device: torch.device, *, packing: bool, longest: int = 0
) -> None:
    """Do a document's logits depend on what else is in its batch, or on earlier batches? UserError where they do.

    In training mode, where statistics of a batch are taken and kept, and on both sides of every length that the
    configuration names and a sample of the run, of which ``longest`` is the length of the longest, exceeds. Compared
    are batches of one shape, but for documents alone, so that rounding hides nothing.
    """
    lay_out = pack_documents if packing else pad_documents
    first, second = _probe_tokens(loss_model, device).split(PROBE_LENGTHS, dim=1)
    one, other = lay_out([first, second]), lay_out([first.flip(1), second])
    rows = _last_rows([first, second], packing, PROBE_LENGTHS[1])[1].to(device)
    refuse = _Refusal(loss_model)
    with eager_evaluation(loss_model):
        before = engine.logits(one, rows)
        with _training_without_dropout(loss_model):
            found = [_draw_alike(engine, batch, rows) for batch in (one, other)]
        after = engine.logits(one, rows)
    with user_errors_on_all_ranks():
        refuse(after, before, TOLERANCE, EARLIER)
        refuse(found[1], found[0], TOLERANCE, OTHERS)
    for bound, name in sorted(length_bounds(loss_model.model.config.get_text_config().to_dict()).items()):
        if PROBE_LENGTHS[0] < bound < longest:
            _check_bound(engine, loss_model, device, packing, bound, name)


def _check_bound(
    engine: Probed, loss_model: LossModel, device: torch.device, packing: bool, bound: int, name: str
) -> None:
    """A document of ``bound + 1`` tokens and a short one: together, after each other, and alone."""
    size = bound + 1
    lay_out = pack_documents if packing else pad_documents
    short, long = _probe_tokens(loss_model, device, PROBE_LENGTHS[0] + size).split((PROBE_LENGTHS[0], size), dim=1)
    # in a pack the short one is compared with itself behind documents none of which is longer than the bound
    calm = [*long.split(-(-size // 2), dim=1), short] if packing else [short]
    calm_rows = _last_rows(calm, packing, NUM_COMPARED)[-1].to(device)
    long_rows, short_rows = _last_rows([long, short], packing, NUM_COMPARED)
    alone_rows = _last_rows([long], packing, NUM_COMPARED)[0].to(device)
    refuse = _Refusal(loss_model, bound, name)
    with eager_evaluation(loss_model):
        before = engine.logits(lay_out(calm), calm_rows)
        mixed = engine.logits(lay_out([long, short]), torch.cat([short_rows, long_rows]).to(device))
        alone = engine.logits(lay_out([long]), alone_rows)
        after = engine.logits(lay_out(calm), calm_rows)
    beside, own = mixed.split([len(short_rows), len(long_rows)])
    with user_errors_on_all_ranks():
        refuse(after, before, TOLERANCE, EARLIER)
        refuse(beside, before, TOLERANCE if packing else WIDE_TOLERANCE, OTHERS)
        refuse(own, alone, WIDE_TOLERANCE, OTHERS)


def _last_rows(documents: list[torch.Tensor], packed: bool, count: int) -> list[torch.Tensor]:
    """Flat positions of the last ``count`` tokens of each document, packed or padded."""
    lengths = [document.shape[1] for document in documents]
    starts = [sum(lengths[:i]) if packed else i * max(lengths) for i in range(len(lengths))]
    return [torch.arange(start + max(0, n - count), start + n) for start, n in zip(starts, lengths, strict=True)]


def length_bounds(fields: Mapping[str, Any]) -> dict[int, str]:
    """The lengths that a configuration names at any depth, with the names of their fields."""
    found: dict[int, str] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            found |= length_bounds({str(name): each for name, each in value.items()})
        elif type(value) is int and LENGTH_FIELDS.search(key):
            found[value] = key
    return found


class _Refusal:
    """UserError where logits that must be equal differ; it names what has changed in the model since this was made."""

    def __init__(self, loss_model: LossModel, bound: int = 0, name: str = "") -> None:
        self.loss_model, self.bound, self.name = loss_model, bound, name
        self.states = _read_states(loss_model.model)

    def __call__(
        self, found: torch.Tensor, expected: torch.Tensor, tolerance: Mapping[torch.dtype, float], on_what: str
    ) -> None:
        deviation, bound = relative_deviation(found, expected), self.bound
        if deviation <= tolerance[found.dtype]:
            return
        states = _read_states(self.loss_model.model)
        where = f" with and without a document of {bound + 1:,} tokens" if bound else ""
        raise UserError(
            f"a document's logits depend on {on_what} in {type(self.loss_model.model).__name__}",
            where=f"config.json: {self.name}" if bound else "model.name",
            why=f"they deviate by {deviation:.1e}{where}: packing, micro-batches, ranks and resuming would change"
            " what is trained",
            fix=f"set data.max_length={bound}, so that no document is longer than {self.name}"
            if bound
            else f"use a model of another family, such as {families.EXAMPLES}",
            details=[f"changes: {key}" for key, value in states.items() if self.states.get(key, value) != value][:20],
        )


def _read_states(model: nn.Module) -> dict[str, float]:
    """Numbers that modules hold beside parameters, by name; of each small buffer the sum."""
    held = (
        (f"{name}.{key}", value)
        for name, module in model.named_modules()
        for key, value in (*vars(module).items(), *module._buffers.items())
    )
    return {
        name: float(value.sum(dtype=torch.float64) if isinstance(value, torch.Tensor) else value)
        for name, value in held
        if type(value) in (int, float) or (type(value) is torch.Tensor and value.numel() <= MAX_STATE)
    }


def _refuse_values(logits: torch.Tensor, loss_model: LossModel) -> None:
    """UserError where logits are no numbers, naming the weights of this rank that are none. Every rank finds the same
    logits.
    """
    if torch.isfinite(logits).all():
        return
    named = ((name, local(parameter)) for name, parameter in loss_model.model.named_parameters())
    wrong = [
        name
        for name, own in named
        if own.is_floating_point() and own.element_size() > 1 and not torch.isfinite(own).all()
    ]
    why = (
        f"{len(wrong)} of its weights hold nan or inf"
        if wrong
        else "the weights of this rank are numbers: they overflow in its dtype"
    )
    raise UserError(
        "the model's weights give no numbers: its logits are nan or inf",
        where="model.name",
        why=why,
        fix="use another checkpoint of the model" + ("" if wrong else ", or another model.dtype"),
        details=wrong[:20],
    )


def _refuse_encoder(engine: Probed, loss_model: LossModel, ids: torch.Tensor, *, eager: bool = False) -> None:
    """UserError where another last token changes the logits before it; with ``eager``, by the attention of the model's
    own code.
    """
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % loss_model.model.config.get_text_config().vocab_size
    if eager:
        first, second = _logits_alone(engine, loss_model, [ids, changed])
    else:
        first, second = (engine.logits({"input_ids": each}) for each in (ids, changed))
    deviation = relative_deviation(second[:, :-1], first[:, :-1])
    with user_errors_on_all_ranks():
        if not deviation <= WIDE_TOLERANCE[first.dtype]:
            raise UserError(
                f"{type(loss_model.model).__name__} is an encoder: its tokens attend to those after them",
                where="model.name",
                why=f"another last token changes the logits before it (relative deviation {deviation:.1e}):"
                " there is no next one to learn",
                fix=f"use a model that generates text, such as {families.EXAMPLES}",
            )


def _logits_alone(engine: Probed, loss_model: LossModel, documents: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits (1, t, v) of each document by itself, with the attention that transformers writes out in full."""
    model = loss_model.model
    implementation = model.config._attn_implementation
    set_attention(model, "eager")
    try:
        return [engine.logits({"input_ids": document}) for document in documents]
    finally:
        set_attention(model, implementation)


def relative_deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over the spread of ``expected``."""
    return float((found.double() - expected.double()).square().mean().sqrt() / expected.double().std())


def _refuse_packing(what: str, deviation: float) -> NoReturn:
    raise UserError(
        what,
        where="data.packing",
        why=f"relative deviation of the logits: {deviation:.1e}",
        fix="set data.packing=false",
    )


def pack_documents(documents: list[torch.Tensor]) -> dict[str, Any]:
    """Documents (1, t) side by side, with what attention needs to keep them apart; no labels."""
    lengths = torch.tensor([document.shape[1] for document in documents])
    device = documents[0].device
    return {
        "input_ids": torch.cat(documents, dim=1),
        "position_ids": torch.cat([torch.arange(int(n)) for n in lengths])[None].to(device),
        "cu_seq_lens": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().to(device),
        "max_length": int(lengths.max()),
    }


def pad_documents(documents: list[torch.Tensor]) -> dict[str, Any]:
    """Documents (1, t) as rows filled up on the right, and how long each is; no labels."""
    lengths = torch.tensor([document.shape[1] for document in documents])
    longest = int(lengths.max())
    ids = torch.cat([torch.nn.functional.pad(document, (0, longest - document.shape[1])) for document in documents])
    told = lengths[:, None].expand(-1, longest).to(ids.device)
    return {"input_ids": ids, DOCUMENT_LENGTHS: told, DISTINCT_LENGTHS: tuple(lengths.tolist())}


def _probe_tokens(loss_model: LossModel, device: torch.device, count: int = sum(PROBE_LENGTHS)) -> torch.Tensor:
    vocab_size = loss_model.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(PROBE_SEED)
    return torch.randint(0, vocab_size, (1, count), generator=generator).to(device)


def _draw_alike(engine: Probed, batch: Mapping[str, Any], rows: torch.Tensor) -> torch.Tensor:
    """Logits of ``rows``; whatever is drawn at random is the same in each call."""
    with torch.random.fork_rng(devices=[rows.device] if rows.is_cuda else []):
        torch.manual_seed(PROBE_SEED)
        return engine.logits(batch, rows)


@contextmanager
def _training_without_dropout(loss_model: LossModel) -> Iterator[None]:
    """Training mode, but for modules that drop out."""
    loss_model.train()
    for module in loss_model.modules():
        probability = getattr(module, "dropout", None)
        if isinstance(module, nn.modules.dropout._DropoutNd) or (isinstance(probability, float) and probability > 0):
            module.training = False
    try:
        yield
    finally:
        loss_model.eval()


@contextmanager
def eager_evaluation(loss_model: LossModel) -> Iterator[None]:
    """Evaluation mode, no compilation, as the probes' shapes are not those of training, and cross-entropy alone: the
    probes lack what further terms read.
    """
    was_training, terms = loss_model.training, loss_model.terms
    with torch.compiler.set_stance("force_eager"):
        loss_model.eval()
        loss_model.terms = (LANGUAGE_MODEL,)
        try:
            yield
        finally:
            loss_model.terms = terms
            loss_model.train(was_training)
