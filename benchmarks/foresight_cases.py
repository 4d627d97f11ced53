"""The configurations on which the plan's memory and time are compared with what a run takes. No torch.

Every shape is either fitted to or held out: the constants of ``planner/time/fitted.toml`` and the margins of the memory
estimate are fitted to the first kind alone; ``docs/planner-accuracy.md`` states the plan's accuracy on the second.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from manyhands.bench.rows import BenchRow

# By shape. Families of both kinds, and families that only the second kind has.
FITTED = (
    *("tiny", "smollm135m", "llama1b", "llama8b", "llama70b", "qwen32b", "gemma27b", "phi3mini", "mistral7b"),
    *("qwen2-7b", "olmo2-7b", "qwen06b", "yi34b"),
)
HELD_OUT = (
    *("smollm360m", "llama3b", "qwen4b", "qwen14b", "gemma4b", "gemma12b", "phi4", "mistral24b"),
    *("qwen2-1.5b", "qwen2-72b", "granite8b", "smollm3-3b", "glm9b", "falcon10b"),
)


@dataclass(frozen=True)
class Case:
    """One configuration. ``rows`` is samples of one GPU in one step; ``keys`` are keys of the run, set by hand so that
    the case is the same whatever the plan prefers.
    """

    shape: str
    method: Literal["full", "lora", "qlora"]
    gpus: int
    rows: int
    length: int
    data: Literal["full", "mix", "chats", "long"] = "full"
    keys: dict[str, Any] = field(default_factory=dict)
    steps: int = 8
    cost_s: float = 42.0  # what the process is expected to take, compilation and all
    gib: int = 76  # a GPU needs at least this; more than that one of 80 GB does not begin

    @property
    def name(self) -> str:
        """Unique; says what the case is."""
        values = [f"{key.rpartition('.')[2]}={value}" for key, value in sorted(self.keys.items())]
        return ",".join([self.shape, self.method, f"{self.gpus}x{self.rows}x{self.length}", self.data, *values])

    @property
    def is_held_out(self) -> bool:
        return self.shape in HELD_OUT

    def as_row(self) -> BenchRow:
        return BenchRow(
            self.name,
            "",
            self.shape,
            self.method,
            self.gpus,
            rows=self.rows,
            length=self.length,
            data=self.data,
            keys=dict(self.keys),
        )


@dataclass(frozen=True)
class Workload:
    """One piece of work, and layouts that are measured beside the one that the plan chooses for it
    (``benchmarks.layouts``). ``work`` has no key of a layout: as a case of its own it is measured as the plan has it.
    """

    work: Case
    layouts: tuple[dict[str, Any], ...]

    @property
    def name(self) -> str:
        return self.work.name

    @property
    def cases(self) -> tuple[Case, ...]:
        """The plan's own layout first."""
        return (self.work, *(replace(self.work, keys=self.work.keys | keys) for keys in self.layouts))


NONE = {"parallel.activation_checkpointing": "none"}
SELECTIVE = {"parallel.activation_checkpointing": "selective", "parallel.offload_activations": False}
FULL = {"parallel.activation_checkpointing": "full", "parallel.offload_activations": False}
OFFLOADED = {"parallel.activation_checkpointing": "full", "parallel.offload_activations": True}
EXCEPT_ATTENTION = {"parallel.activation_checkpointing": "except_attention", "parallel.offload_activations": True}
FP8 = {"kernels.linear": "fp8"}
DDP, FSDP = {"parallel.strategy": "ddp"}, {"parallel.strategy": "fsdp"}
KEEP, RESHARD = {"parallel.reshard_after_forward": False}, {"parallel.reshard_after_forward": True}
HSDP = {"parallel.strategy": "hsdp", "parallel.shard_degree": 2}
EAGER = {"parallel.compile": False}
EIGHT_BIT = {"optimizer.name": "adamw_8bit"}


def micro(tokens: int) -> dict[str, Any]:
    return {"batch.micro_tokens": tokens}


# The most telling first.
ONE_GPU = (
    Case("smollm135m", "full", 1, 32, 512, keys=NONE),
    Case("qwen06b", "lora", 1, 8, 512, keys=NONE),
    Case("qwen4b", "full", 1, 8, 2048, keys=FULL | micro(8192), gib=110),
    Case("llama1b", "full", 1, 8, 4096, keys=NONE | micro(16384)),
    Case("qwen4b", "lora", 1, 16, 4096, "mix", keys=NONE, cost_s=80),
    Case("qwen06b", "lora", 1, 16, 4096, "mix", keys=NONE, cost_s=80),
    Case("llama3b", "full", 1, 2, 4096, keys=NONE),
    Case("phi3mini", "lora", 1, 4, 2048, keys=NONE),
    Case("gemma12b", "lora", 1, 1, 4096, keys=NONE),
    Case("olmo2-7b", "lora", 1, 2, 4096, keys=NONE),
    Case("glm9b", "lora", 1, 2, 4096, keys=NONE),
    Case("llama8b", "lora", 1, 2, 4096, keys=NONE),
    Case("granite8b", "lora", 1, 2, 4096, keys=FULL),
    Case("llama1b", "lora", 1, 1, 131072, keys=OFFLOADED, steps=4, cost_s=95),
    Case("mistral24b", "qlora", 1, 1, 4096, keys=SELECTIVE),
    Case("qwen2-1.5b", "full", 1, 64, 1024, "chats", keys=NONE, cost_s=80),
    Case("llama8b", "lora", 1, 2, 4096, keys=NONE | FP8),
    Case("smollm3-3b", "lora", 1, 2, 16384, "long", keys=FULL, cost_s=80),
    Case("qwen14b", "lora", 1, 2, 4096, keys=SELECTIVE | FP8, gib=110),
    Case("gemma4b", "full", 1, 2, 4096, keys=NONE, gib=110),
    Case("smollm360m", "full", 1, 16, 2048, keys=NONE),
    Case("llama8b", "qlora", 1, 2, 16384, "long", keys=FULL, cost_s=80),
    Case("qwen2-7b", "qlora", 1, 16, 4096, "mix", keys=SELECTIVE, cost_s=80),
    Case("phi4", "lora", 1, 2, 4096, keys=SELECTIVE),
    Case("smollm135m", "lora", 1, 8, 512, keys=NONE),
    Case("qwen14b", "lora", 1, 2, 4096, keys=NONE, gib=110),
    Case("llama8b", "lora", 1, 16, 4096, "mix", keys=NONE, gib=110, cost_s=80),
    Case("yi34b", "qlora", 1, 1, 6144, keys=NONE, gib=110, cost_s=80),
    Case("granite8b", "lora", 1, 16, 4096, "mix", keys=NONE, steps=30, gib=110, cost_s=110),
    Case("falcon10b", "lora", 1, 16, 4096, "mix", keys=SELECTIVE, steps=30, cost_s=120),
    Case("llama8b", "lora", 1, 24, 4096, "mix", keys=SELECTIVE, steps=30, cost_s=120),
    Case("llama1b", "full", 1, 4, 4096, keys=NONE),
    Case("mistral7b", "qlora", 1, 4, 4096, keys=NONE, gib=110),
    Case("llama8b", "lora", 1, 2, 4096, keys=FULL),
    Case("gemma27b", "qlora", 1, 1, 4096, keys=FULL),
    Case("llama3b", "qlora", 1, 1, 65536, keys=FULL, steps=4, cost_s=80),
    Case("llama1b", "full", 1, 4, 4096, keys=NONE | EIGHT_BIT),
    Case("llama1b", "full", 1, 4, 4096, keys=SELECTIVE),
    Case("qwen2-1.5b", "lora", 1, 4, 4096, keys=NONE | EAGER),
    Case("phi3mini", "full", 1, 4, 4096, keys=NONE, cost_s=50, gib=110),
    Case("smollm3-3b", "full", 1, 4, 2048, keys=SELECTIVE | {"data.packing": False}),
    Case("qwen32b", "qlora", 1, 1, 4096, keys=FULL, cost_s=50),
    Case("gemma12b", "qlora", 1, 8, 4096, "mix", keys=SELECTIVE, cost_s=80),
    Case("llama70b", "qlora", 1, 1, 4096, keys=FULL, cost_s=80),
    Case("qwen2-72b", "qlora", 1, 1, 4096, keys=FULL, cost_s=80),
)
TWO_GPUS = (
    Case("llama8b", "full", 2, 1, 8192, keys=FSDP | KEEP | NONE, cost_s=45),
    Case("qwen4b", "full", 2, 2, 4096, keys=FSDP | KEEP | NONE, cost_s=45),
    Case("llama8b", "lora", 2, 2, 4096, keys=DDP | NONE, cost_s=42),
    Case("granite8b", "full", 2, 1, 4096, keys=FSDP | RESHARD | SELECTIVE, cost_s=45),
    Case("llama8b", "lora", 2, 2, 4096, keys=FSDP | RESHARD | NONE, cost_s=42),
    Case("qwen14b", "lora", 2, 16, 4096, "mix", keys=FSDP | KEEP | SELECTIVE, cost_s=120),
    Case("llama1b", "full", 2, 4, 4096, keys=DDP | NONE, cost_s=42),
    Case("llama3b", "full", 2, 16, 4096, "mix", keys=DDP | NONE, cost_s=90),
    Case("llama70b", "lora", 2, 1, 4096, keys=FSDP | RESHARD | FULL, cost_s=90),
    Case("qwen2-72b", "qlora", 2, 1, 4096, keys=FSDP | RESHARD | FULL, cost_s=90),
    Case("mistral7b", "full", 2, 2, 4096, keys=FSDP | RESHARD | FULL | micro(4096), cost_s=45),
    Case("gemma12b", "full", 2, 1, 4096, keys=FSDP | RESHARD | FULL, cost_s=60),
    Case("gemma27b", "qlora", 2, 1, 4096, keys=DDP | NONE, cost_s=55),
    Case("phi4", "lora", 2, 1, 4096, keys=FSDP | RESHARD | SELECTIVE, cost_s=55),
    Case("smollm135m", "full", 2, 16, 1024, "chats", keys=DDP | NONE),
    Case("smollm360m", "full", 2, 8, 2048, keys=FSDP | KEEP | NONE),
    Case("llama8b", "full", 2, 1, 4096, keys=FSDP | KEEP | SELECTIVE | FP8, cost_s=55),
    Case("qwen4b", "full", 2, 1, 4096, keys=FSDP | KEEP | SELECTIVE | FP8, cost_s=55),
    Case("qwen4b", "full", 2, 1, 32768, keys=FSDP | RESHARD | FULL, steps=5, cost_s=55),
    Case("llama1b", "full", 2, 4, 4096, keys={"parallel.strategy": "zero2"} | NONE, cost_s=60),
    Case("qwen4b", "full", 2, 2, 4096, keys={"parallel.strategy": "zero3"} | FULL, cost_s=60),
)
FOUR_GPUS = (
    Case("llama8b", "full", 4, 1, 8192, keys=FSDP | KEEP | NONE, cost_s=75),
    Case("llama8b", "full", 4, 1, 8192, keys=FP8 | FSDP | KEEP | SELECTIVE, cost_s=80),
    Case("qwen14b", "full", 4, 1, 4096, keys=FSDP | RESHARD | FULL, cost_s=90),
    Case("llama8b", "full", 4, 2, 4096, keys=HSDP | KEEP | SELECTIVE, cost_s=80),
    Case("qwen4b", "full", 4, 2, 4096, keys=HSDP | KEEP | NONE, cost_s=75),
    Case("llama70b", "lora", 4, 1, 4096, keys=FSDP | RESHARD | SELECTIVE, cost_s=110),
    Case("mistral24b", "full", 4, 1, 4096, keys=FSDP | RESHARD | FULL, cost_s=110),
    Case("qwen32b", "qlora", 4, 1, 4096, keys=DDP | FULL, cost_s=90),
    Case("llama3b", "full", 4, 16, 4096, "mix", keys=DDP | NONE, cost_s=70),
    Case("phi4", "full", 4, 1, 4096, keys=FSDP | RESHARD | FULL, cost_s=90),
    Case("glm9b", "full", 4, 4, 4096, keys=FSDP | KEEP | SELECTIVE | micro(8192), cost_s=90),
)
TRIALS = (  # of the command itself, on a CPU
    Case("tiny", "lora", 1, 2, 128, keys={"parallel.activation_checkpointing": "none"}, steps=4, cost_s=5),
    Case("tiny", "full", 2, 4, 128, "chats", keys={"parallel.strategy": "ddp"}, steps=4, cost_s=5),
)
CASES = ONE_GPU + TWO_GPUS + FOUR_GPUS

# Several layouts of each fit on an H200. Listed are those that the plan expects to be nearly as fast as its choice, and
# kinds that it expects to be far behind: a plan that is wrong about either chooses badly.
WORKLOADS = (
    Workload(Case("llama8b", "lora", 1, 2, 4096, cost_s=30), (NONE | micro(4096), SELECTIVE, FULL)),
    Workload(Case("qwen14b", "lora", 1, 2, 4096, cost_s=34), (NONE | micro(8192), SELECTIVE | micro(8192))),
    Workload(Case("llama8b", "qlora", 1, 4, 4096, cost_s=34), (NONE | micro(8192), SELECTIVE, FULL)),
    Workload(Case("llama1b", "full", 1, 4, 4096, cost_s=22), (NONE | micro(4096), SELECTIVE, FULL)),
    Workload(Case("llama8b", "lora", 1, 2, 4096, keys=FP8, cost_s=32), (NONE | micro(4096), SELECTIVE)),
    Workload(
        Case("qwen4b", "full", 1, 4, 4096, cost_s=34),
        (NONE | micro(16384), NONE | micro(4096), SELECTIVE | micro(16384)),
    ),
    Workload(Case("mistral24b", "qlora", 1, 2, 4096, cost_s=36), (NONE | micro(4096), SELECTIVE | micro(8192))),
    Workload(Case("smollm360m", "full", 1, 16, 2048, cost_s=22), (NONE | micro(8192), SELECTIVE)),
    Workload(Case("gemma4b", "full", 1, 2, 4096, cost_s=34), (NONE | micro(4096), SELECTIVE)),
    Workload(Case("llama3b", "qlora", 1, 4, 8192, cost_s=34), (NONE | micro(8192), SELECTIVE)),
    Workload(Case("qwen2-1.5b", "full", 1, 64, 1024, "chats", cost_s=44), (NONE | micro(8192), SELECTIVE)),
    Workload(Case("llama8b", "lora", 1, 1, 32768, steps=5, cost_s=60), (SELECTIVE, EXCEPT_ATTENTION)),
    Workload(Case("phi3mini", "full", 1, 4, 4096, cost_s=26), (NONE | micro(8192), SELECTIVE)),
    Workload(Case("llama8b", "full", 1, 1, 8192, steps=6, cost_s=45), (EXCEPT_ATTENTION, FULL)),
    # Steps of several micro-batches: whether larger ones than the plan takes are faster
    Workload(Case("llama1b", "full", 1, 16, 4096, cost_s=28), (NONE | micro(16384), NONE | micro(32768))),
    Workload(Case("smollm360m", "full", 1, 64, 2048, cost_s=28), (NONE | micro(16384), NONE | micro(32768))),
    Workload(
        Case("llama1b", "full", 2, 4, 4096, cost_s=45),
        (FSDP | KEEP | NONE, FSDP | RESHARD | NONE, FSDP | KEEP | SELECTIVE, DDP | NONE),
    ),
    Workload(
        Case("qwen4b", "full", 2, 2, 4096, cost_s=47),
        (FSDP | KEEP | NONE, FSDP | RESHARD | NONE, FSDP | KEEP | SELECTIVE, DDP | NONE),
    ),
    Workload(
        Case("llama8b", "lora", 2, 2, 4096, cost_s=42),
        (DDP | NONE, DDP | NONE | micro(4096), FSDP | KEEP | NONE, FSDP | RESHARD | NONE),
    ),
    Workload(
        Case("llama8b", "full", 2, 1, 8192, cost_s=47),
        (FSDP | KEEP | NONE, FSDP | RESHARD | NONE, FSDP | KEEP | SELECTIVE),
    ),
    Workload(
        Case("llama8b", "full", 2, 1, 4096, keys=FP8, cost_s=58),
        (FSDP | KEEP | NONE, FSDP | RESHARD | NONE, FSDP | KEEP | SELECTIVE),
    ),
    Workload(
        Case("llama8b", "full", 4, 1, 8192, cost_s=75),
        (FSDP | KEEP | NONE, FSDP | RESHARD | NONE, FSDP | KEEP | SELECTIVE, HSDP | KEEP | SELECTIVE),
    ),
)
TRIED = (  # of ``benchmarks.layouts`` itself, on a CPU
    Workload(Case("tiny", "lora", 1, 4, 128, steps=4, cost_s=5), (NONE | micro(128), FULL)),
    Workload(Case("tiny", "full", 2, 4, 128, steps=4, cost_s=5), (DDP, FSDP | RESHARD)),
)
OF_WORKLOADS = tuple(case for workload in (*WORKLOADS, *TRIED) for case in workload.cases)
BY_NAME = {case.name: case for case in (*OF_WORKLOADS, *CASES, *TRIALS)}
