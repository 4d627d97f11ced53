"""``manyhands eval --tasks``: tasks of lm-eval through its own library, on the model as it answers here."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError
from manyhands.infer.batch import open_placed

BATCH_SIZE = 8


def run_tasks(
    folder: Path,
    tasks: Sequence[str],
    *,
    base: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    include_path: str | None = None,
    apply_chat_template: bool = False,
) -> dict[str, Any]:
    """lm-eval's results for one model in this process, adapters unmerged. UserError without it, or for a task."""
    if find_spec("lm_eval") is None:
        raise UserError(
            "lm-eval is not installed",
            where="--tasks",
            why="this Python has no package lm_eval",
            fix="pip install lm-eval",
        )
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise UserError(
            f"lm-eval knows no task {unknown[0]}",
            where="--tasks",
            fix="lm-eval ls tasks lists them; --include-path FOLDER adds your own",
        )
    answerer = open_placed(folder, base)
    model = HFLM(
        pretrained=answerer.model, tokenizer=answerer.tokenizer, batch_size=batch_size or BATCH_SIZE, backend="causal"
    )
    found = simple_evaluate(
        model=model,
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        apply_chat_template=apply_chat_template,
    )
    return {key: found[key] for key in ("results", "versions", "n-shot", "n-samples") if key in found}


def describe(results: Mapping[str, Any]) -> str:
    """One line a figure, with its standard error where there is one."""
    lines = []
    for task, figures in results["results"].items():
        for name, value in figures.items():
            metric, _, kind = name.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr"):
                continue
            error = figures.get(f"{metric}_stderr,{kind}")
            spread = f" ± {error:.4f}" if isinstance(error, int | float) else ""
            lines.append(f"{task:<30} {name:<34} {value:.4f}{spread}")
    return "\n".join(lines)
