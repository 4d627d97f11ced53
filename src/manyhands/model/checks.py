"""Is the fast path right for this model? Asked of the loaded model, before the first step, on a few random tokens.

Every rank runs the same probes in the same order, so they work where weights are sharded. Must not know how.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from manyhands import families
from manyhands.core.errors import UserError
from manyhands.core.holding import local
from manyhands.model.loss import IGNORED, LossModel
from manyhands.model.structure import set_attention

# Relative deviations that rounding alone may cause. The wider ones are for runs of other shapes, whose matrix products
# may sum in another order: 0.04 was seen on random weights of an 8B shape in bfloat16, after 32 blocks.
# (transformers' eager attention, with which they compare, takes its softmax in float32 even in a float64 model.)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
WIDE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 5e-2}
PROBE_LENGTHS = (23, 41)  # tokens of the two documents
PROBE_SEED = 2718


class Probed(Protocol):
    """What the checks call: the model as it will be trained, under any strategy."""

    def forward(
        self, batch: Mapping[str, Any], *, metrics: bool = False
    ) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]: ...

    def logits(self, batch: Mapping[str, Any]) -> torch.Tensor: ...


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
        _refuse_values(logits, loss_model)
        _refuse_encoder(engine, loss_model, ids)
    trained = batch["labels"] != IGNORED
    expected = torch.nn.functional.cross_entropy(logits[trained].double(), batch["labels"][trained], reduction="sum")
    deviation = float((fast - expected).abs() / expected.abs())
    tolerance = TOLERANCE[logits.dtype]
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
def check_packing(engine: Probed, loss_model: LossModel, device: torch.device) -> float:
    """Pack two documents and compare the logits with those of each alone; returns the relative deviation.

    Alone means transformers' plain ``eager`` attention, so that a kernel which drops a soft-cap or a window shows here
    too. A leak is looked for more sharply: another first document of the same length must leave the second one's logits
    as they are, and as no shape changes, rounding does not either. Deviations are root mean squares. Raises UserError.
    """
    first, second = _probe_tokens(loss_model, device).split(PROBE_LENGTHS, dim=1)
    with eager_evaluation(loss_model):
        packed = engine.logits(pack_documents([first, second]))
        changed = engine.logits(pack_documents([first.flip(1), second]))
        alone = _logits_alone(engine, loss_model, [first, second])
    num_first = PROBE_LENGTHS[0]
    leak = relative_deviation(changed[:, num_first:], packed[:, num_first:])
    deviation = relative_deviation(packed, torch.cat(alone, dim=1))
    if not (leak <= TOLERANCE[packed.dtype] and deviation <= WIDE_TOLERANCE[packed.dtype]):
        _refuse_encoder(engine, loss_model, second, eager=True)
    if not leak <= TOLERANCE[packed.dtype]:
        _refuse_packing(f"packed documents see each other in {type(loss_model.model).__name__}", leak)
    if not deviation <= WIDE_TOLERANCE[packed.dtype]:
        _refuse_packing(
            f"logits of packed documents differ from those alone in {type(loss_model.model).__name__}", deviation
        )
    return deviation


@torch.no_grad()
def check_padding(engine: Probed, loss_model: LossModel, device: torch.device) -> float:
    """The plain path: two documents as rows, the shorter one filled up on the right, against each alone. As
    ``check_packing``.
    """
    documents = list(_probe_tokens(loss_model, device).split(PROBE_LENGTHS, dim=1))
    ids = torch.zeros(2, max(PROBE_LENGTHS), dtype=torch.int64, device=device)
    for row, document in zip(ids, documents, strict=True):
        row[: document.shape[1]] = document[0]
    with eager_evaluation(loss_model):
        rows = engine.logits({"input_ids": ids})
        alone = _logits_alone(engine, loss_model, documents)
    found = torch.cat([row[: document.shape[1]] for row, document in zip(rows, documents, strict=True)])
    deviation = relative_deviation(found, torch.cat(alone, dim=1)[0])
    if not deviation <= WIDE_TOLERANCE[rows.dtype]:
        _refuse_encoder(engine, loss_model, documents[0], eager=True)
        raise UserError(
            f"attention of {type(loss_model.model).__name__} is not what the model's own code computes",
            where="model.name",
            why=f"relative deviation of the logits {deviation:.1e}:"
            " the kernel leaves something out, or padding is seen",
            fix="use a model of another family: this one cannot be trained yet",
        )
    return deviation


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


def _probe_tokens(loss_model: LossModel, device: torch.device) -> torch.Tensor:
    vocab_size = loss_model.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(PROBE_SEED)
    return torch.randint(0, vocab_size, (1, sum(PROBE_LENGTHS)), generator=generator).to(device)


class eager_evaluation:
    """Evaluation mode, and no compilation: the probes' shapes are not those of training."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.was_training = module, module.training
        self.stance = torch.compiler.set_stance("force_eager")

    def __enter__(self) -> None:
        self.stance.__enter__()
        self.module.eval()

    def __exit__(self, *exception: object) -> None:
        self.module.train(self.was_training)
        self.stance.__exit__(*exception)
