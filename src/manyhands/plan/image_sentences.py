"""Sentences of the reasons about images: parts of the model, what they take, and features that are kept."""

from __future__ import annotations

from collections.abc import Callable

from manyhands.core.units import format_duration, format_gib, format_size
from manyhands.plan.phrases import Values
from manyhands.plan.types import Code


def _images(v: Values) -> str:
    units = f" ({v['patches'] // v['squares']:,} squares of {v['squares']:,})" if v["squares"] > 1 else ""
    terms = (
        f"{part} {', '.join(f'{name} {format_gib(size)}' for name, size in sizes.items())}"
        for part, sizes in v["parts"].items()
    )
    return f"up to {v['patches']:,} patches{units} per micro-batch; {'; '.join(terms)}"


def _features(v: Values) -> str:
    size = f"{format_size(v['bytes'])} of {v['images']:,} images"
    obstacles = {
        "configured": "computed in every epoch, as configured",
        "trained": "computed in every epoch, as the vision tower is trained",
        "unknown": "computed in every epoch, as where they leave the tower of this model is not described",
        "one_pass": "computed once, as there is one epoch; they are not kept for later runs",
        "bound": f"computed in every epoch, as {size} do not fit into data.feature_cache_gb ({v['bound_gb']:g} GB)",
        "disk": f"computed in every epoch, as {size} do not fit on the disk of data.cache",
        "slower": f"computed in every epoch, as reading {size} would take longer",
    }
    if v["obstacle"]:
        return obstacles[v["obstacle"]]
    saved = f", which saves about {format_duration(v['saved_s'])} on each rank" if v["saved_s"] else ""
    read = "read by later epochs" if v["passes"] > 1 else "read by later runs"
    asked = ", as configured" if v["asked"] else ""
    return f"computed once and kept in data.cache, {size}, {read}{saved}{asked}; the vision tower stays in memory"


IMAGE_SENTENCES: dict[Code, tuple[str, Callable[[Values], str]]] = {
    "images": ("images", _images),
    "features": ("features", _features),
    "towers": ("towers", lambda v: f"{v['parameters']:,} parameters are not loaded, as training is on text only"),
    "parts": ("parts", lambda v: ", ".join(f"{part} {state}" for part, state in v["parts"].items())),
}
