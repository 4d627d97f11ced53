"""Whether the workers would refuse what a run asks of its model's modules and weights: asked of a process that builds
the model on meta, before a GPU is held. Imports no torch.

Building takes seconds. ``may_match_nothing`` looks at the names in the files first: where each pattern fits one of them
the workers will find it too.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence

from manyhands.config.patterns import expand, matches, reaches
from manyhands.config.schema import MethodSection, RunConfig
from manyhands.core.errors import UserError
from manyhands.facts.model import BLOCK_TENSOR, EMBEDDINGS, HEAD
from manyhands.facts.types import ModelFacts
from manyhands.optim.registry import OPTIMIZERS
from manyhands.planner.types import Plan, method_of

TIMEOUT_S = 600.0  # most of it is importing torch from a cold disk
Names = tuple[str, ...]  # of one weight: two where embeddings are the head too


def rehearse(config: RunConfig, plan: Plan) -> None:
    """Raises the UserError that the run would end with before its weights are read."""
    asked = json.dumps({"config": config.model_dump(mode="json"), "plan": plan.model_dump(mode="json")})
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "manyhands.convert.rehearse"]
    try:
        done = subprocess.run(
            command, input=asked, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
        said = done.stderr.strip().splitlines()
        if done.returncode == 0:
            answer = json.loads(done.stdout.strip().splitlines()[-1])
            if answer is None:
                return
            raise UserError(answer.pop("what"), **answer)
        why = said[-1] if said else f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        said, why = [], f"no answer within {TIMEOUT_S:.0f} s"
    raise UserError(
        "the model cannot be built as the run would build it",
        where=plan.model_folder,
        why=why,
        fix="the last lines of the process that built it are above",
        details=said[-10:],
    )


def refuse_unmatched(config: RunConfig, plan: Plan, model: ModelFacts) -> None:
    """Raises the workers' UserError for unmatched patterns, optimizers without matrices, and users' converters."""
    if config.model.converters or may_match_nothing(config, plan, model):
        rehearse(config, plan)


def may_match_nothing(config: RunConfig, plan: Plan, model: ModelFacts) -> bool:
    """Whether a pattern of the run fits no name that the model's files have, or has nothing left to choose."""
    method, rates = method_of(plan, config), config.optimizer.learning_rates
    weights = [
        (name, HEAD) if model.tied_embeddings and name.endswith(EMBEDDINGS) else (name,)
        for name in model.parameter_shapes
    ]
    if method.trains_adapters:
        trained = _adapted(method, model, weights)
    else:
        trained = _chosen(method, weights)
    if trained is None or not trained:
        return True
    free = trained
    for pattern in rates:
        left = [names for names in free if not _reached(names, [pattern])]
        if len(left) == len(free):
            return True
        free = left
    if not OPTIMIZERS[config.optimizer.name].needs_block_matrices or method.trains_adapters:
        return False
    shapes = model.parameter_shapes
    return model.is_multimodal or not any(BLOCK_TENSOR.search(one[0]) and len(shapes[one[0]]) == 2 for one in trained)


def _chosen(method: MethodSection, weights: Sequence[Names]) -> list[Names] | None:
    """What ``method.train`` and ``method.freeze`` choose; None where a pattern of theirs fits nothing."""
    names = [name for own in weights for name in own]
    parts = {pattern: expand(pattern, names) for pattern in (*method.train, *method.freeze)}
    if not all(any(_reached(own, parts[pattern]) for own in weights) for pattern in parts):
        return None
    train, freeze = ([part for pattern in ps for part in parts[pattern]] for ps in (method.train, method.freeze))
    return [own for own in weights if (not train or _reached(own, train)) and not _reached(own, freeze)]


def _adapted(method: MethodSection, model: ModelFacts, weights: Sequence[Names]) -> list[Names] | None:
    """Weights of adapters, and what is trained beside them; None where a pattern fits nothing or complete blocks."""
    modules = {name.rpartition(".")[0] for own in weights for name in own}
    modules |= {
        ".".join(parts[:end]) for name in modules for parts in [name.split(".")] for end in range(1, len(parts))
    }
    saved = {pattern: [name for name in modules if matches(name, pattern)] for pattern in method.modules_to_save}
    block = f"{model.decoder}.layers.0."
    if any(not hits or any(block.startswith(f"{name}.") for name in hits) for hits in saved.values()):
        return None
    blocks = [f"{model.decoder}.layers.{index}" for index in range(model.num_layers)]
    linears = [f"{block}.{name}" for block in blocks for name in model.block_linear_shapes]
    linears = [name for name in linears if not _reached((name,), method.modules_to_save)]
    targets: Iterable[str] = ("*",) if isinstance(method.target_modules, str) else method.target_modules
    hits = [[name for name in linears if matches(name, pattern)] for pattern in targets]
    if not all(hits):
        return None
    factors = ("lora_A.weight", "lora_B.weight", *["lora_magnitude_vector"] * method.dora)
    adapted = dict.fromkeys(name for found in hits for name in found)
    return [own for own in weights if _reached(own, method.modules_to_save)] + [
        (f"{name}.{factor}",) for name in adapted for factor in factors
    ]


def _reached(names: Names, patterns: Iterable[str]) -> bool:
    return any(reaches(name, pattern) for pattern in patterns for name in names)
