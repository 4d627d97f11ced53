"""A tracker that has no key of its own gets the rows of a run as they come.

    python examples/other_trackers.py run.yaml swanlab  # pip install swanlab
    python examples/other_trackers.py run.yaml comet    # pip install comet_ml

The tracker lives in this process and the ranks in others: one that is slow does not slow the run, and one that raises
ends the run at its next step, with the state saved. Offline: SWANLAB_MODE=offline, COMET_START_ONLINE=0.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import manyhands as mh

Log = Callable[[dict[str, float], int], object]


def open_swanlab(project: str, name: str) -> tuple[Log, Callable[[], object]]:
    import swanlab

    run = swanlab.init(project=project, name=name)
    return lambda values, step: run.log(values, step=step), run.finish


def open_comet(project: str, name: str) -> tuple[Log, Callable[[], object]]:
    import comet_ml

    experiment = comet_ml.start(project_name=project)
    experiment.set_name(name)
    return lambda values, step: experiment.log_metrics(values, step=step), experiment.end


TRACKERS = {"swanlab": open_swanlab, "comet": open_comet}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="run file")
    parser.add_argument("tracker", choices=TRACKERS)
    parser.add_argument("--project", default="manyhands")
    options = parser.parse_args()
    log, finish = TRACKERS[options.tracker](options.project, Path(options.run).stem)

    def send(row: dict[str, Any]) -> None:
        """A row of metrics.jsonl: of a step, or of an evaluation."""
        group = "train" if row["kind"] == "step" else "validation"
        numbers = {key: value for key, value in row.items() if type(value) in (int, float) and math.isfinite(value)}
        log({f"{group}/{key}": value for key, value in numbers.items() if key not in ("step", "time")}, row["step"])

    try:
        run = mh.train(options.run, on_step=send, on_evaluate=send)
    finally:
        finish()
    print(f"loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}; {run.folder}")


if __name__ == "__main__":
    main()
