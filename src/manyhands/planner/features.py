"""Whether features of images are computed once and kept, and what they take: ``data.cache_features``. Pure.

What a frozen tower gives is the same in every epoch. It is kept as it goes into a projector that is trained, else as it
comes out of it. The first pass computes and writes it, so that the tower stays in memory; later ones read it. Either
all features of the run are kept or none: of a part, few micro-batches would have all of their images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.units import format_size
from manyhands.data.images.cache import KEPT_SHARE
from manyhands.facts.types import Facts, TowerFacts
from manyhands.planner.memory.input import EstimateInput
from manyhands.planner.time.clock import Clock
from manyhands.planner.types import DiskEstimate, Reason, reason

NO_TOWER = "no_tower"
FILE_BYTES = 1024  # of an image's file beside its features, about


@dataclass(frozen=True)
class Features:
    """``unit_bytes`` of a unit of an image, and of all; ``passes`` over the images. ``obstacle``: why they are not
    kept, "" where they are.
    """

    unit_bytes: float
    num_bytes: int
    num_images: int
    passes: float
    obstacle: str = ""
    asked: bool = False  # by the key

    @property
    def kept(self) -> bool:
        return not self.obstacle


def choose_features(
    config: RunConfig, facts: Facts, parts: Mapping[str, str], compute_bytes: int, passes: float, obstacle: str = ""
) -> Features:
    """``obstacle``: what is known to stand against it. UserError where they shall be kept and cannot."""
    data, tower, asked = facts.data, facts.model.tower, config.data.cache_features
    if tower is None or parts.get("vision", "left_out") == "left_out":
        if asked is True:
            raise _refuse(NO_TOWER)
        return Features(0.0, 0, 0, 1.0, NO_TOWER)
    unit_bytes = compute_bytes * values_of_unit(tower, parts, facts.model.hidden_size)
    units = data.mean_image_units * data.num_samples
    num_images = data.num_images + data.num_validation_images
    num_bytes = int(unit_bytes * units * num_images / max(1, data.num_images)) + FILE_BYTES * num_images
    found = Features(unit_bytes, num_bytes, num_images, max(1.0, passes), asked=asked is True)
    bound, free = int(KEPT_SHARE * config.data.feature_cache_gb * 1e9), facts.free_cache_bytes
    obstacles = {
        "configured": asked is False,
        "trained": parts["vision"] == "trained",
        "unknown": parts["projector"] == "trained" and not tower.projector_values,
        "bound": num_bytes > bound,
        "disk": free is not None and num_bytes > free,
        "one_pass": passes <= 1 and asked == "auto",
        obstacle: bool(obstacle),
    }
    found = replace(found, obstacle=next((name for name, stands in obstacles.items() if stands), ""))
    if found.obstacle and asked is True:
        raise _refuse(found.obstacle, num_bytes, bound, free or 0)
    return found


def with_features(found: Features, base: EstimateInput) -> EstimateInput:
    """What all candidates share, with features that are kept."""
    if not found.kept or base.images is None:
        return base
    return replace(base, images=replace(base.images, kept_bytes=found.unit_bytes, passes=found.passes))


def why_not_kept(found: Features, asked: EstimateInput, clock: Clock | None, disk: DiskEstimate) -> str:
    """What stands against keeping them once the layout is chosen, "" where nothing does: there is no room for them
    beside checkpoints, or the tower is faster than the disk. What was asked for is kept nevertheless.
    """
    if not found.kept or found.asked:
        return ""
    if disk.feature_bytes and not disk.fits:
        return "disk"
    if clock is None:
        return ""
    kept_s, computed_s = (sum(clock.terms(setup).values()) for setup in (asked, _without(asked)))
    return "slower" if kept_s >= computed_s else ""


def _without(asked: EstimateInput) -> EstimateInput:
    assert asked.images is not None
    return replace(asked, images=replace(asked.images, kept_bytes=0.0))


def values_of_unit(tower: TowerFacts, parts: Mapping[str, str], hidden_size: int) -> float:
    """Numbers that are kept of a unit: what goes into a projector that is trained, else what comes out of it."""
    if parts["projector"] == "trained":
        return tower.projector_values
    return tower.tokens_per_unit * hidden_size * (1 + tower.num_further)


def explain_features(
    found: Features, config: RunConfig, asked: EstimateInput, clock: Clock | None, num_steps: int
) -> list[Reason]:
    """What was decided; seconds that each rank saves, where the GPU's rates are known."""
    if found.obstacle == NO_TOWER:
        return []
    saved = None
    if found.kept and clock is not None and clock.kind is not None:
        saved = num_steps * sum(
            clock.terms(setup)["towers"] * sign for setup, sign in ((_without(asked), 1), (asked, -1))
        )
    values: dict[str, Any] = {
        "obstacle": found.obstacle,
        "asked": found.asked,
        "bytes": found.num_bytes,
        "images": found.num_images,
        "passes": found.passes,
        "bound_gb": config.data.feature_cache_gb,
        "saved_s": saved,
    }
    return [reason("features", **values)]


def _refuse(obstacle: str, num_bytes: int = 0, bound: int = 0, free: int = 0) -> UserError:
    size = f"they take about {format_size(num_bytes)}"
    why, fix = {
        NO_TOWER: ("no image passes through a vision tower in this run", "use data with images"),
        "trained": ("the vision tower is trained, so that they change", "set method.parts.vision: frozen"),
        "unknown": ("where they leave the tower of this model is not described", "freeze the projector too"),
        "bound": (f"{size}, {format_size(bound)} are {KEPT_SHARE:.0%} of the bound", "raise data.feature_cache_gb"),
        "disk": (f"{size}, and {format_size(free)} are free", "choose a data.cache on a larger disk"),
    }[obstacle]
    return UserError(
        "data.cache_features is true, and features of images cannot be kept",
        where="data.cache_features",
        why=why,
        fix=f"{fix}, or set data.cache_features: auto",
    )
