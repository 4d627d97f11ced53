"""Every optimizer of ``optimizer.name``: one entry each, and no other file of the product names one.

Imports no torch: configuration and plan read it. ``factory`` is imported where a model is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.limits import BLOCK_VALUES_8BIT


@dataclass(frozen=True)
class TrainedCounts:
    """Trained parameters of all shards: ``num_root`` of them are in no block, of which ``num_embedding`` are
    embeddings; ``num_sides`` is the sum of rows and columns of all matrices. Vectors are not counted separately.
    """

    num_trained: int
    num_root: int
    num_embedding: int
    num_sides: int


@dataclass(frozen=True)
class OptimizerSpec:
    """What plan, checks and importers know of an optimizer.

    ``factory``: ``module:function``, called with ``(groups, options, **arguments)`` (``optim/options.py``).
    ``state_bytes(counts, m)``: bytes of its states as a checkpoint holds them, with masters of m bytes.
    ``moved_bytes``: what an update reads and writes for each trained parameter, in float32.
    ``kernel_s``: seconds a trained parameter takes on a GPU whatever the memory's rate.
    ``matrix_flops``: operations of an update for each side pair (rows, columns) of the blocks' matrices.
    ``names``: by tool, its names for this optimizer and, if it is not quite the same there, what differs.
    """

    factory: str
    summary: str
    state_bytes: Callable[[TrainedCounts, int], float]
    moved_bytes: float
    arguments: Mapping[str, Any] = field(default_factory=dict)
    kernel_s: float = 0.0
    matrix_flops: Callable[[int, int], float] | None = None
    library: str = ""  # whose kernels it needs: for GPUs only, and for weights of at most 32 bits
    unused_keys: tuple[str, ...] = ()  # of the section ``optimizer``
    is_paged: bool = False  # the driver moves its states to the host when activations need the room
    needs_block_matrices: bool = False  # refused where no matrix of the blocks is trained
    is_fused: bool = False  # has a kernel that clips, updates, casts, and rounds bfloat16 masters stochastically
    streams_states: bool = False  # its states may be in host memory (``parallel.offload``)
    takes_partitions: bool = False  # updates DeepSpeed's flat partitions, which have no rows
    takes_divided_experts: bool = False  # tested where ranks divide experts (``parallel.expert_degree``)
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def _two_moments(counts: TrainedCounts, master_bytes: int) -> float:
    return 2 * counts.num_trained * master_bytes


def _two_moments_in_8_bits(counts: TrainedCounts, _: int) -> float:
    """Two bytes, and two float32 scales a block of 256; embeddings keep float32."""
    rest = counts.num_trained - counts.num_embedding
    return (2 + 8 / BLOCK_VALUES_8BIT) * rest + 8 * counts.num_embedding


_MOMENTS = ("beta1", "beta2", "eps")
_BLOCKWISE = "manyhands.optim.adamw_8bit:make_blockwise"
_8BIT_S = 3.0e-11  # of a parameter in bitsandbytes' update of 8-bit states (H200)

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": OptimizerSpec(
        factory="manyhands.optim.options:make_adamw",
        summary="AdamW",
        state_bytes=_two_moments,
        moved_bytes=28,  # reads gradient, weight and two moments, writes the last three
        is_fused=True,
        streams_states=True,
        takes_partitions=True,
        takes_divided_experts=True,
        names={
            "transformers": dict.fromkeys(
                ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw"), ""
            ),
            "deepspeed": {"adamw": "", "adam": ""},
            "others": {"adam": "", "adamw_bnb_32bit": ""},
        },
    ),
    "adamw_8bit": OptimizerSpec(
        factory=_BLOCKWISE,
        summary="its states in 8 bits (bitsandbytes)",
        arguments={"bits": 8},
        state_bytes=_two_moments_in_8_bits,
        moved_bytes=14,
        kernel_s=_8BIT_S,
        library="bitsandbytes",
        takes_divided_experts=True,
        names={
            "transformers": {
                "adamw_bnb_8bit": "",
                "adamw_8bit": "",
                "adamw_torch_8bit": "8-bit states are bitsandbytes' here, torchao's there",
                "adamw_torch_4bit": "there are no 4-bit optimizer states: 8-bit ones",
            },
            "axolotl": {
                "ao_adamw_8bit": "8-bit states are bitsandbytes' here, torchao's there",
                "ao_adamw_4bit": "there are no 4-bit optimizer states: 8-bit ones",
            },
            "others": {"adamw_8bits": ""},
        },
    ),
    "paged_adamw": OptimizerSpec(
        factory=_BLOCKWISE,
        summary="states that may move to host memory (bitsandbytes)",
        arguments={"bits": 32, "paged": True},
        state_bytes=_two_moments,
        moved_bytes=28,
        library="bitsandbytes",
        takes_divided_experts=True,
        is_paged=True,
        names={"transformers": {"paged_adamw_32bit": "", "paged_adamw": ""}},
    ),
    "paged_adamw_8bit": OptimizerSpec(
        factory=_BLOCKWISE,
        summary="both",
        arguments={"bits": 8, "paged": True},
        state_bytes=_two_moments_in_8_bits,
        moved_bytes=14,
        kernel_s=_8BIT_S,
        library="bitsandbytes",
        takes_divided_experts=True,
        is_paged=True,
        names={"transformers": {"paged_adamw_8bit": ""}},
    ),
    "adafactor": OptimizerSpec(
        factory="manyhands.optim.adafactor:make_adafactor",
        summary="a row and a column of second moments for each matrix",
        state_bytes=lambda counts, master_bytes: counts.num_sides * master_bytes,
        moved_bytes=16,
        unused_keys=_MOMENTS,
        names={"transformers": {"adafactor": ""}},
    ),
    "muon": OptimizerSpec(
        factory="manyhands.optim.muon:make_muon",
        summary="orthogonalized momentum for matrices of the blocks, adamw for the rest",
        # one momentum in the blocks, AdamW's two for the root
        state_bytes=lambda counts, master_bytes: (counts.num_trained + counts.num_root) * master_bytes,
        moved_bytes=28,
        # five iterations of three products, of squares of the narrower side
        matrix_flops=lambda rows, columns: 30.0 * min(rows, columns) ** 2 * max(rows, columns),
        needs_block_matrices=True,
        names={"transformers": {"muon": ""}, "deepspeed": {"muon": ""}},
    ),
}


def load_factory(spec: OptimizerSpec) -> Callable[..., Any]:
    """UserError where the library with its kernels is missing."""
    module, _, function = spec.factory.partition(":")
    try:
        if spec.library:
            import_module(spec.library)
    except ImportError as error:
        raise UserError(
            f"this optimizer needs {spec.library}",
            where="optimizer.name",
            why=str(error),
            fix=f"pip install 'manyhands[qlora]', or use optimizer.name={name_those(lambda s: not s.library)}",
        ) from error
    factory: Callable[..., Any] = getattr(import_module(module), function)
    return factory


def name_those(are: Callable[[OptimizerSpec], object]) -> str:
    """The optimizers for which ``are`` is true, as a sentence lists them: ``adamw, adafactor or muon``."""
    *first, last = [name for name, spec in OPTIMIZERS.items() if are(spec)]
    return f"{', '.join(first)} or {last}" if first else last


def names_in(*tools: str) -> dict[str, tuple[str, str]]:
    """Our name for each name that ``tools`` have for an optimizer, and what differs, or ""."""
    return {
        theirs: (ours, note)
        for tool in tools
        for ours, spec in OPTIMIZERS.items()
        for theirs, note in spec.names.get(tool, {}).items()
    }
