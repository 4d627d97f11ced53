"""Every family: documents packed, and as padded rows, against each document alone by the family's own plain code.

Tiny models with random weights, float32, CPU. The reference is transformers' ``eager`` attention and three lines of
cross-entropy; the two ways to train go through ``LossModel`` as a run does. ``python -m tests.support.families --page``
measures the rows of docs/equality.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from manyhands.core.errors import UserError
from manyhands.families import find, measured_types
from manyhands.model.attention import IMPLEMENTATIONS, plain_attention, register_attention
from manyhands.model.checks import check_loss, check_packing, check_padding, pack_documents
from manyhands.model.loss import IGNORED, LossModel
from tests.support import equality_page
from tests.support.tiny import tiny_model

BOUND = 1e-5  # relative, of the loss and of all gradients as one vector
MEASURED = measured_types()
STATEFUL = tuple(kind for kind in MEASURED if find(kind).mixers)  # states run on from token to token
LENGTHS = (23, 2, 64, 7, 41)  # tokens; some shorter than the windows of 8, some longer


@dataclass(frozen=True)
class Gap:
    """Relative deviation from the documents alone: of the loss, and of the gradients as one vector (2-norm)."""

    loss: float
    gradients: float

    @property
    def within(self) -> bool:
        return self.loss <= BOUND and self.gradients <= BOUND  # nan is not


@dataclass(frozen=True)
class Row:
    """What was found for one family."""

    family: str
    attention: str  # of IMPLEMENTATIONS
    packed: Gap
    padded: Gap
    refusal: str  # of the packing check; empty where it passed


def measure(family: str, attention: str | None = None) -> Row:
    """One family through the path that a CPU run takes, or through ``attention``."""
    register_attention()
    model = tiny_model(family).train()
    if attention is None:
        attention = "sdpa" if plain_attention(model.config) == "sdpa" else "blockwise"
    documents = [_document(length) for length in LENGTHS]
    model.set_attn_implementation("eager")
    expected = _gradients(model, torch.stack([_loss_alone(model, ids, targets) for ids, targets in documents]).sum())
    model.set_attn_implementation(IMPLEMENTATIONS[attention])
    loss_model = LossModel(model)
    packed = pack_documents([ids for ids, _ in documents]) | {
        "labels": torch.cat([targets for _, targets in documents], dim=1)
    }
    gap_packed, gap_padded = (
        _gap(expected, _gradients(model, loss_model(batch)["lm"][0])) for batch in (packed, _pad(documents))
    )
    single, cpu = loss_model, torch.device("cpu")
    check_loss(single, loss_model, cpu)
    check_padding(single, loss_model, cpu)
    try:
        check_packing(single, loss_model, cpu)
        refusal = ""
    except UserError as error:
        refusal = error.what
    return Row(family, attention, gap_packed, gap_padded, refusal)


def measure_all() -> Iterator[dict[str, Any]]:
    """A row of each family. One that packs wrongly stops the measurement."""
    for family in MEASURED:
        row = measure(family)
        if row.refusal or not row.packed.within or not row.padded.within:
            raise AssertionError(f"{family}: {row}")
        gaps = {"packed": row.packed, "padded": row.padded}
        figures = {f"{kind}_{name}": float(f"{x:.1e}") for kind, gap in gaps.items() for name, x in vars(gap).items()}
        yield {"family": family, "attention": row.attention, **figures}


def _document(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and targets (1, t); two of three positions are trained, the last never."""
    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 256, (1, length), generator=draw)
    targets = ids.roll(-1, dims=1)
    targets[:, 2::3] = IGNORED
    targets[:, -1] = IGNORED
    return ids, targets


def _pad(documents: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {"input_ids": torch.zeros(len(documents), max(LENGTHS), dtype=torch.int64)}
    batch["labels"] = torch.full_like(batch["input_ids"], IGNORED)
    for row, (ids, targets) in enumerate(documents):
        batch["input_ids"][row, : ids.shape[1]], batch["labels"][row, : ids.shape[1]] = ids[0], targets[0]
    return batch


def _loss_alone(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(ids, use_cache=False).logits
    return cross_entropy(logits[0], targets[0], ignore_index=IGNORED, reduction="sum")


def _gradients(model: Any, loss: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The loss, and all gradients as one vector."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def _gap(expected: tuple[float, torch.Tensor], found: tuple[float, torch.Tensor]) -> Gap:
    (loss, gradients), (other_loss, other_gradients) = expected, found
    return Gap(abs(other_loss - loss) / loss, float((other_gradients - gradients).norm() / gradients.norm()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="replaces the rows measured before, and writes the page")
    arguments = parser.parse_args()
    rows = []
    for row in measure_all():
        rows.append(row)
        print(json.dumps(row), flush=True)
    if arguments.page:
        equality_page.replace(rows, equality_page.FAMILIES)


if __name__ == "__main__":
    main()
