"""What the workers would refuse of a run, found before they start. Starts a process that imports torch; imports none
itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.plan.types import Plan

TIMEOUT_S = 600.0  # importing torch from a cold disk takes the most of it


def rehearse(config: RunConfig, plan: Plan) -> None:
    """Raises the UserError that the run would end with before its weights are read."""
    asked = json.dumps({"config": config.model_dump(mode="json"), "plan": plan.model_dump(mode="json")})
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "manyhands.model.rehearse"]
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
        fix="the last lines of the process that tried it stand above",
        details=said[-10:],
    )
