"""What images add to the estimate of memory: vision tower, projector, pixels and features. Pure arithmetic;
knows no torch and reads nothing.

Notation beside that of ``terms.py``: N patches of a micro-batch, h the tower's hidden size, i the inner size of its
MLP, G placeholders of a micro-batch, which become features, W parameters of tower and projector that are trained.
A frozen part is in compute dtype on every rank and keeps nothing for a backward pass; a trained one has masters,
gradients and states as the rest has them, is sharded with it, and is cast where it is used. Blocks of a trained tower
are computed again as those of the decoder are.
"""

from __future__ import annotations

import math

from manyhands.facts.types import TowerFacts
from manyhands.planner.layout import Checkpointing
from manyhands.planner.memory.input import EstimateInput, ImageInput

Moment = dict[str, int]
GATHERED_BLOCKS = 3  # as terms.py has it for the decoder's
ROUNDING = 1e-9  # of a quotient of whole numbers
BATCHES_AHEAD = 2  # micro-batches whose kept features are on the device before they are used


def with_images(s: EstimateInput, standing: Moment, moments: tuple[Moment, ...]) -> tuple[Moment, tuple[Moment, ...]]:
    """The terms of a text model with what images add: to what stands all the time, to each moment what waits for its
    backward pass, and the moments at which the tower itself is at work.
    """
    if s.images is None:
        return standing, moments
    weights = 0 if s.trains_everything else outer_weights(s)
    standing = standing | {
        "weights": standing["weights"] + weights,
        "gathered": standing["gathered"] + outer_gathered(s),
    }
    kept, own = kept_by_images(s), s.outer_trained * s.gradient_bytes // s.num_shards
    nothing = {"dequantized": 0, "logits": 0, "reduction": 0}
    first, *between, last = moments  # the loss has what earlier micro-batches left, the end all gradients
    before = {name: first[name] for name in ("gradients", "unreduced")}
    after = {name: last[name] for name in ("gradients", "unreduced")}
    # Gradients of tower and projector come when the decoder is through.
    decoder = after | {"gradients": max(before["gradients"], after["gradients"] - own)}
    later = tuple(
        moment | {"activations": moment["activations"] + kept} for moment in (first, *between, last | decoder)
    )
    forward = nothing | before | {"activations": kept + tower_at_work(s, s.images, backward=False)}
    if s.images.vision != "trained":
        return standing, (*later, forward)
    at_work = tower_at_work(s, s.images, backward=True)
    begin = nothing | decoder | {"activations": kept + at_work}
    end = nothing | after | {"activations": kept - kept_by_blocks(s, s.images.tower.num_layers - 1) + at_work}
    return standing, (*later, forward, begin, end)


def outer_weights(s: EstimateInput) -> int:
    """Frozen parts whole in compute dtype, masters of trained ones in shards: ``frozen f + W m / S``."""
    assert s.images is not None
    return s.images.num_frozen * s.frozen_bytes + s.outer_trained * s.master_bytes // s.weight_shards


def outer_gathered(s: EstimateInput) -> int:
    """Casts of trained parts, which autograd keeps, ``W c``, of blocks that are computed again one's; and of shards
    three blocks, or where they are not freed all, as masters: ``min(3 B, W) m``. Where everything is trained, tower and
    projector are counted with the root.
    """
    if s.trains_everything or s.images is None or not s.outer_trained:
        return 0
    tower, cast = s.images.tower, s.outer_trained
    if s.images.vision == "trained" and s.layout.activation_checkpointing != "none":
        cast -= (tower.num_layers - 1) * tower.num_block_parameters
    casts = max(0, cast) * s.compute_bytes if s.compute_bytes != s.master_bytes else 0
    if s.num_shards == 1:
        return casts
    blocks = GATHERED_BLOCKS * tower.num_block_parameters + tower.num_projector_parameters
    gathered = min(blocks, s.outer_trained) if s.layout.reshard_after_forward else s.outer_trained
    return casts + gathered * s.master_bytes


def num_units(s: EstimateInput) -> int:
    """Patches or squares in the fullest micro-batch: ``T u`` for the most units u that a sample has for each of its
    tokens, or as many as its samples have. No layout of samples gives more.
    """
    assert s.images is not None
    if s.layout.micro_tokens is None:
        return (s.layout.micro_samples or 1) * s.images.units_per_sample
    filled = s.layout.full_micro_tokens * s.images.units_per_token
    return max(s.images.units_per_sample, math.ceil(filled - ROUNDING * filled))


def kept_by_images(s: EstimateInput) -> int:
    """Pixels, ``4 units values`` and once more in compute dtype; features, ``G c H``; where a part is trained also what
    its backward pass needs: of a trained projector its input ``N c h`` and two results a placeholder, ``2 G c H``, of a
    trained tower ``N`` times ``kept_bytes_per_patch`` of each block. Features that are read from the disk are there two
    micro-batches ahead.
    """
    images, c = s.images, s.compute_bytes
    assert images is not None
    units = num_units(s)
    patches, features = units * images.tower.patches_per_unit, units * images.tower.tokens_per_unit
    kept = units * images.tower.unit_values * (4 + (c if c != 4 else 0)) + int(features * c * s.model.hidden_size)
    if s.outer_trained or s.trains_everything:
        kept += patches * c * images.tower.hidden_size + int(2 * features * c * s.model.hidden_size)
    kept += int(BATCHES_AHEAD * units * images.kept_bytes)
    if images.vision == "trained":
        kept += kept_by_blocks(s, images.tower.num_layers)
    return kept


def kept_by_blocks(s: EstimateInput, num_blocks: int) -> int:
    """So many blocks of a trained tower."""
    assert s.images is not None
    tower = s.images.tower
    patches = num_units(s) * tower.patches_per_unit
    return num_blocks * patches * kept_bytes_per_patch(s, tower, s.layout.activation_checkpointing)


def kept_bytes_per_patch(s: EstimateInput, tower: TowerFacts, mode: Checkpointing) -> int:
    """Bytes a patch that one block of a trained tower keeps: ``c (8 h + 2 i)``, the inputs of two norms, of q, k, v and
    the MLP, q, k and v, and the result of attention; the MLP's inner values before and after the activation, ``4 i``
    where it has a gate. Under activation checkpointing its input, and what the mode keeps beside that.
    """
    c, h = s.compute_bytes, tower.hidden_size
    inner, matrices = mlp_of(tower)
    if mode == "full":
        return c * h
    if mode == "except_attention":
        return 2 * c * h + 4 * tower.num_heads
    if mode == "selective":
        return c * (2 * h + sum(shape.out for shape in tower.block_linear_shapes.values())) + 4 * tower.num_heads
    return c * (8 * h + (4 if matrices > 2 else 2) * inner) + 4 * tower.num_heads


def tower_at_work(s: EstimateInput, images: ImageInput, *, backward: bool) -> int:
    """One block of the tower: forward ``N c max(6 h, 2 h + 2 i)``, q, k, v beside the residual stream, or the inner
    values of the MLP; backward what is computed again and as much in gradients.
    """
    patches, tower = num_units(s) * images.tower.patches_per_unit, images.tower
    inner, matrices = mlp_of(tower)
    at_work = s.compute_bytes * max(6 * tower.hidden_size, 2 * tower.hidden_size + max(2, matrices) * inner)
    if backward:
        mode = s.layout.activation_checkpointing
        at_work += kept_bytes_per_patch(s, tower, "none") - kept_bytes_per_patch(s, tower, mode)
    return patches * at_work


def mlp_of(tower: TowerFacts) -> tuple[int, int]:
    """Inner size of the MLP, and its matrices: three have a gate."""
    named = [shape for name, shape in tower.block_linear_shapes.items() if "mlp" in name or "feed_forward" in name]
    return max((max(shape) for shape in named), default=4 * tower.hidden_size), len(named)


def memory_by_part(s: EstimateInput) -> dict[str, dict[str, int]]:
    """Of a rank's bytes those of vision tower and projector, by term; ``images``: pixels, features and what the tower's
    blocks keep. What is left is the language model's.
    """
    if s.images is None:
        return {}
    images, sums = s.images, {"vision": s.images.tower.num_parameters, "projector": s.images.projector_parameters}
    parts: dict[str, dict[str, int]] = {}
    for part, state in {"vision": images.vision, "projector": images.projector}.items():
        size = sums[part]
        if state == "trained":
            masters = size * s.held_bytes // s.weight_shards
            states = {"weights": masters, "gradients": size * s.gradient_bytes // s.num_shards}
            parts[part] = states | {"optimizer": 2 * size * s.master_bytes // s.num_shards}
        else:
            parts[part] = {"weights": size * s.frozen_bytes}
    parts["images"] = {"activations": kept_by_images(s), "tower at work": tower_at_work(s, images, backward=False)}
    return parts
