"""How many weights patterns train, and bytes of optimizer states. Pure arithmetic for ``memory.py``; knows no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from manyhands.config.patterns import reaches
from manyhands.config.schema import MethodSection
from manyhands.core.limits import BLOCK_VALUES_8BIT
from manyhands.facts.model import BLOCK_TENSOR
from manyhands.facts.types import ModelFacts

HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
BLOCK_SCALE_BYTES = 4 / BLOCK_VALUES_8BIT  # a value


@dataclass(frozen=True)
class TrainedWeights:
    """Parameters of the model itself that are trained where others are frozen."""

    num_in_blocks: int
    num_in_largest_block: int
    num_in_root: int

    @property
    def total(self) -> int:
        return self.num_in_blocks + self.num_in_root


def count_trained(method: MethodSection, model: ModelFacts) -> TrainedWeights | None:
    """What ``method: patterns`` trains, as convert/trainable.py chooses it; None where that is everything, or another
    method.

    Random models have no files whose headers give every name: of these, norms are counted by what is usual. A pattern
    that no known name fits is taken to mean everything, which is the safe side; the model itself refuses it before
    training.
    """
    if method.name != "patterns":
        return None
    blocks: dict[str, int] = {}
    root = frozen = 0
    for name, shape in model.parameter_shapes.items():
        names = (name, HEAD) if model.tied_embeddings and name.endswith(EMBEDDINGS) else (name,)
        if (method.train and not _any(names, method.train)) or _any(names, method.freeze):
            frozen += prod(shape)
        elif block := BLOCK_TENSOR.search(name):
            blocks[block[1]] = blocks.get(block[1], 0) + prod(shape)
        else:
            root += prod(shape)
    trained = TrainedWeights(sum(blocks.values()), max(blocks.values(), default=0), root)
    return trained if frozen and trained.total else None


def _any(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(reaches(name, pattern) for pattern in patterns for name in names)


def count_state_bytes(
    name: str, num_trained: int, *, num_root: int, num_embedding: int, num_sides: int, master_bytes: int
) -> int:
    """Bytes of an optimizer's states, over all shards, on the device.

    Of the ``num_trained`` parameters ``num_root`` are in no block, of which ``num_embedding`` are embeddings;
    ``num_sides`` is the sum of rows and columns of all matrices. Vectors are not told apart.

    ============  ==================================================================================================
    adamw         two moments in the masters' dtype: ``2 trained m``
    adamw_8bit    two bytes, and two scales a block of 256; embeddings keep float32: ``(2 + 8/256) rest + 8 embedding``
    paged_*       nothing: the driver moves them to the host when activations need the room
    adafactor     a number for each row and column of a matrix: ``m sides``
    muon          one momentum in the blocks, AdamW's two for the root: ``m (trained + root)``
    ============  ==================================================================================================
    """
    match name:
        case "paged_adamw" | "paged_adamw_8bit":
            return 0
        case "adamw_8bit":
            return int((2 + 2 * BLOCK_SCALE_BYTES) * (num_trained - num_embedding)) + 8 * num_embedding
        case "adafactor":
            return num_sides * master_bytes
        case "muon":
            return (num_trained + num_root) * master_bytes
    return 2 * num_trained * master_bytes
