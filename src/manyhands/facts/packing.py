"""Can samples of this model be packed without one seeing another? Known before the plan, which decides on it.

Families that were measured to pack (``Family.packs``, docs/equality.md) are taken at their word, as long as
transformers is the version they were measured with. For any other a process of its own tries a shrunken copy of the
configuration (``manyhands.model.probe``); its verdict is kept beside the token cache. This module starts that process
and imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyhands import families
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.files import read_json, write_json
from manyhands.facts.model_config import CONFIG_FILE
from manyhands.facts.types import ModelFacts

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
PROBE_VERSION = "2"  # another one asks again
TIMEOUT_S = 300.0  # most of it for importing torch from a cold disk


def judge_packing(config: RunConfig, model: ModelFacts, report: Callable[[str], Any]) -> ModelFacts:
    """``model`` with ``packs`` and ``packing_reason`` filled in. Nothing is asked where packing is off.

    Raises UserError where the probe finds that the family cannot be trained at all, or the reason why.
    """
    if config.data.packing is False:
        return model
    raw = Path(model.folder, CONFIG_FILE).read_bytes()
    fields = json.loads(raw)
    family = families.find(model.model_type)
    if _is_known(family, fields, config.model.trust_remote_code):
        reason = f"{model.model_type} was measured packed and alone"
        return model.model_copy(update={"packs": True, "packing_reason": reason})
    kept = Path(config.data.cache).expanduser() / "packing" / f"{_digest(raw)}.json"
    verdict = read_json(kept)
    if not isinstance(verdict, dict):
        report(f"packing: {model.model_type} was not measured to pack; trying a shrunken copy")
        verdict = _probe(model.folder, config.model.trust_remote_code)
        if "crashed" not in verdict:
            try:
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_json(kept, verdict)
            except OSError as error:
                report(f"note: the verdict could not be saved; the next run tries again: {error}")
    if not verdict["trains"]:
        raise UserError(
            f"{model.model_type} cannot be trained here",
            where=str(Path(model.folder, CONFIG_FILE)),
            why=verdict["reason"],
            fix="use another model; these families were measured: " + ", ".join(families.measured_types()),
        )
    leaks = families.was_measured(family) and not family.packs and not verdict["packs"]
    reason = family.packing_reason if leaks else verdict["reason"]
    return model.model_copy(update={"packs": verdict["packs"], "packing_reason": reason})


def _is_known(family: families.Family, fields: dict[str, Any], trust_remote_code: bool) -> bool:
    """Whether this config.json is of a family that was measured to pack, with no code and no layers of its own.

    Of one measured not to pack no run has shown here that it trains: the probe does.
    """
    if not (families.was_measured(family) and family.packs) or (trust_remote_code and "auto_map" in fields):
        return False
    if "text_config" in fields and not families.find(fields).packs:
        return False
    return not set(fields.get("layer_types") or ()) - ATTENTION_LAYERS


def _probe(folder: str, trust_remote_code: bool) -> dict[str, Any]:
    """The verdict of a fresh process. If it crashes, nothing is packed; the loaded model is checked in any case."""
    command = [sys.executable, "-m", "manyhands.model.probe", folder]
    command += ["--trust-remote-code"] if trust_remote_code else []
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        if done.returncode == 0:
            return json.loads(done.stdout.strip().splitlines()[-1])
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        why = f"no answer within {TIMEOUT_S:.0f} s"
    except (ValueError, IndexError) as error:
        why = f"its answer cannot be read: {error}"
    return {"trains": True, "packs": False, "reason": f"a shrunken copy could not be tried ({why})", "crashed": True}


def _digest(raw_config: bytes) -> str:
    installed = (families.installed_version(package) for package in ("manyhands", "transformers", "torch"))
    return hashlib.sha256("|".join((PROBE_VERSION, *installed)).encode() + raw_config).hexdigest()[:16]
