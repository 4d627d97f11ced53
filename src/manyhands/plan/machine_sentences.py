"""Sentences of the reasons about the machine: GPUs, those that are not here, processes and their variables."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from manyhands.core.units import format_gib
from manyhands.plan.phrases import Values
from manyhands.plan.types import Code

MIB = 2**20


def _hardware(v: Values) -> str:
    nodes = f"{v['num_nodes']} machines with " if v["num_nodes"] > 1 else ""
    (memory, said), (usable, by) = v["memory_mib"], v["usable_mib"]
    text = f"{nodes}{v['num_per_node']} × {v['kind']}, not here: {format_gib(int(memory * MIB))} each ({said})"
    text += f", of which programs get {format_gib(int(usable * MIB))} ({by})"
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
    text = f"{v['cores']} cores and {format_gib(v['host_bytes'])} of host memory a GPU"
    if v["num_nodes"] > 1:
        text += "; links between machines slower than those within one: a copy a machine before shards over all"
    return text + "; disk not known"


def _device(v: Values) -> str:
    if v["asked"]:
        return f"{v['device']}, as asked"
    if not v.get("is_here", True):
        return f"GPUs, {v['num_gpus']} of them"
    return f"{'GPUs' if v['num_gpus'] else 'CPU'}, as {v['num_gpus'] or 'no'} GPUs are visible"


def _processes(v: Values) -> str:
    sources = {"launched": "as launched", "asked": "as asked", "gpus": "one a GPU", "cpu": "as auto takes one on CPU"}
    return f"{v['size']}, {sources[v['source']]}"


def _data_workers(v: Values) -> str:
    workers = f"{v['workers']} process{'es' * (v['workers'] != 1)} a rank" if v["workers"] else "a thread"
    if v["asked"]:
        return f"{workers}, as asked"
    if v["source"] == "cpu":
        return f"{workers}, as processes would take cores from training"
    speed = f"one thread collates about {v['tokens_per_s']:,} tokens/s of samples this long"
    if v["workers"] >= v["wanted"]:
        return f"{workers}; {speed}"
    more = "more " * bool(v["workers"])
    scarce = f"{v['wanted']} processes would be faster, but there are no {more}cores to spare ({v['cores']} in all)"
    return f"{workers}; {speed}: {scarce}"


def _environment(v: Values) -> str:
    return " ".join(f"{name}={value}" for name, value in v.items()) + ", each unless it is set already"


# By code: the topic that stands before the sentence, and the sentence.
MACHINE_SENTENCES: dict[Code, tuple[str, Callable[[Values], str]]] = {
    "hardware": ("hardware", _hardware),
    "figures": ("figures", _figures),
    "assumed": ("assumed", _assumed),
    "untried": (
        "note",
        lambda v: "no machine with AMD's GPUs has run this yet: memory is estimated as on NVIDIA's",
    ),
    "device": ("device", _device),
    "processes": ("processes", _processes),
    "data_workers": ("data workers", _data_workers),
    "environment": ("environment", _environment),
}
