"""Sentences of the reasons that follow from what a run finds: local GPUs, GPUs planned for, processes and their
variables; of images, the parts of the model, what they take, and features that are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from manyhands.core.units import count_of, describe_ranks, format_duration, format_gib, format_size
from manyhands.planner.phrases import Values
from manyhands.planner.types import Code

MIB = 2**20


def _hardware(v: Values) -> str:
    nodes = f"{v['num_nodes']} machines with " if v["num_nodes"] > 1 else ""
    each = " each" * (v["num_nodes"] * v["num_per_node"] > 1)
    (memory, said), (usable, by) = v["memory_mib"], v["usable_mib"]
    text = f"{nodes}{v['num_per_node']} × {v['kind']} (not on this machine): "
    text += f"{format_gib(int(memory * MIB))}{each} ({said}), usable {format_gib(int(usable * MIB))} ({by})"
    return text + (f"; a GPU is {v['note']}" if v["note"] else "")


def _figures(v: Values) -> str:
    named = {
        "bf16_tflops": "TFLOP/s in bfloat16",
        "fp8_tflops": "in fp8",
        "memory_gb_s": "GB/s of memory",
        "link_gb_s": "GB/s to other GPUs of the machine",
    }
    parts = [(f"{v[name][0]:,.0f} {unit}", v[name][1]) for name, unit in named.items() if name in v]
    grouped = itertools.groupby(parts, key=lambda part: part[1])
    return f"{v['kind']}: " + ", ".join(f"{', '.join(text for text, _ in group)} ({who})" for who, group in grouped)


def _assumed(v: Values) -> str:
    text = f"{v['cores']} cores and {format_gib(v['host_bytes'])} of host memory per GPU"
    if v["num_nodes"] > 1:
        text += "; links between machines are slower than within one: prefers one copy per machine"
    return text + "; disk unknown"


def _device(v: Values) -> str:
    if v["asked"]:
        return f"{v['device']}, as configured"
    if not v.get("is_here", True):
        return describe_ranks("cuda", v["num_gpus"])
    if not v["num_gpus"]:
        return "CPU, as no GPU is visible"
    return f"GPU, as {describe_ranks('cuda', v['num_gpus'])} {'is' if v['num_gpus'] == 1 else 'are'} visible"


def _processes(v: Values) -> str:
    sources = {
        "launched": "as launched",
        "asked": "as configured",
        "gpus": "one per GPU",
        "cpu": "auto uses one on a CPU",
        "fewer": f"of {v.get('asked')} asked for: launch.min_gpus allows as few",
        "left": "those that are left after a fault",
    }
    return f"{v['size']}, {sources[v['source']]}"


def _nodes(v: Values) -> str:
    def describe(node: dict[str, Any]) -> str:
        gpus = "/".join(node["gpus"])
        return f"{node['name']} ({node['ranks']}{f' × {gpus}' if gpus else ''})"

    text = f"{len(v['nodes'])}: {', '.join(map(describe, v['nodes']))}"
    return text + (f"; planned for the smallest GPU, {format_gib(v['least_bytes'])}" if v["mixed"] else "")


def _node_links(v: Values) -> str:
    ways = [
        f"{format_gib(way['bytes'])} in {way['seconds']:.2g} s by {name}"
        for name, way in sorted(v["ways"].items(), key=lambda item: float(item[1]["seconds"]))
    ]
    source = v["source"] or "assumed: InfiniBand of 400 Gbit/s per rank"
    return f"{v['gb_s']:.3g} GB/s ({source}); a step sends {', '.join(ways)}"


def _data_workers(v: Values) -> str:
    workers = f"{v['workers']} process{'es' * (v['workers'] != 1)} per rank" if v["workers"] else "a thread"
    if v["asked"]:
        return f"{workers}, as configured"
    if v["source"] == "cpu":
        return f"{workers}, as processes would take cores from training"
    if v["source"] == "images":
        return f"{workers} prepare the images of about {v['samples_per_s']:,} samples/s, at a megapixel each"
    speed = f"one thread collates about {v['tokens_per_s']:,} tokens/s of samples this long"
    if v["workers"] >= v["wanted"]:
        return f"{workers}; {speed}"
    more = "more " * bool(v["workers"])
    scarce = f"{v['wanted']} processes would be faster, but no {more}cores are free ({v['cores']} in total)"
    return f"{workers}; {speed}: {scarce}"


def _environment(v: Values) -> str:
    return " ".join(f"{name}={value}" for name, value in v.items()) + ", unless already set"


# By code: the topic, which precedes the sentence, and the sentence.
MACHINE_SENTENCES: dict[Code, tuple[str, Callable[[Values], str]]] = {
    "hardware": ("hardware", _hardware),
    "figures": ("figures", _figures),
    "assumed": ("assumed", _assumed),
    "untried": (
        "note",
        lambda v: "untested on AMD GPUs: memory is estimated as on NVIDIA GPUs",
    ),
    "device": ("device", _device),
    "processes": ("processes", _processes),
    "nodes": ("nodes", _nodes),
    "node_links": ("between nodes", _node_links),
    "data_workers": ("data workers", _data_workers),
    "environment": ("environment", _environment),
}


def _images(v: Values) -> str:
    units = f" ({v['patches'] // v['squares']:,} squares of {v['squares']:,})" if v["squares"] > 1 else ""
    terms = (
        f"{part} {', '.join(f'{name} {format_gib(size)}' for name, size in sizes.items())}"
        for part, sizes in v["parts"].items()
    )
    return f"up to {v['patches']:,} patches{units} per micro-batch; {'; '.join(terms)}"


def _features(v: Values) -> str:
    size = f"{format_size(v['bytes'])} of {count_of(v['images'], 'image')}"
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
