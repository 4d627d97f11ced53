"""Can rows of this model be packed, without one seeing another? Known before the plan, because the plan decides on it.

Families that were measured (docs/equality.md) are taken at their word, as long as transformers is the version they were
measured with. For any other a short process of its own tries a shrunken copy of the configuration
(``manyhands.model.probe``); its verdict is kept beside the token cache. This module starts that process and imports no
torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.files import read_json, write_json
from manyhands.facts.types import ModelFacts

# Model types that gave the same loss and gradients packed and alone: testing/families.py measures them, its tests keep
# it so.
MEASURED = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "smollm3",
    "granite",
    "cohere",
    "starcoder2",
    "olmo2",
    "glm4",
)
# Models of images and text whose text is one of these; tests/model/test_multimodal.py measures them.
MEASURED_AROUND = ("gemma3", "mistral3", "llava", "llava_next", "llava_onevision", "internvl", "idefics3", "smolvlm")
MEASURED_WITH = "5.17."  # transformers
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
PROBE_VERSION = "2"  # another one asks again
TIMEOUT_S = 300.0  # importing torch from a cold disk takes the most of it


def judge_packing(config: RunConfig, model: ModelFacts, report: Callable[[str], Any]) -> ModelFacts:
    """``model`` with ``packs`` and ``packing_reason`` filled in. Nothing is asked where packing is off.

    Raises UserError where the probe finds that the family cannot be trained at all, or the reason why.
    """
    if config.data.packing is False:
        return model
    raw = Path(model.folder, "config.json").read_bytes()
    fields = json.loads(raw)
    foreign = config.model.trust_remote_code and "auto_map" in fields
    other_layers = set(fields.get("layer_types") or ()) - ATTENTION_LAYERS
    around = "text_config" in fields and fields.get("model_type") not in MEASURED_AROUND
    if was_measured(model.model_type) and not (foreign or other_layers or around):
        return model.model_copy(
            update={"packs": True, "packing_reason": f"{model.model_type} was measured packed and alone"}
        )
    kept = Path(config.data.cache).expanduser() / "packing" / f"{_digest(raw)}.json"
    verdict = read_json(kept)
    if not isinstance(verdict, dict):
        report(f"packing: {model.model_type} was not measured; trying a shrunken copy")
        verdict = _probe(model.folder, config.model.trust_remote_code)
        if "crashed" not in verdict:
            try:
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_json(kept, verdict)
            except OSError as error:
                report(f"note: the verdict is not kept, and is asked for again next time: {error}")
    if not verdict["trains"]:
        raise UserError(
            f"{model.model_type} cannot be trained here",
            where=str(Path(model.folder, "config.json")),
            why=verdict["reason"],
            fix="use another model; these families were measured: " + ", ".join(sorted(MEASURED)),
        )
    return model.model_copy(update={"packs": verdict["packs"], "packing_reason": verdict["reason"]})


def was_measured(model_type: str) -> bool:
    """Whether the family was trained packed and alone with the transformers that is installed."""
    return model_type in MEASURED and _installed("transformers").startswith(MEASURED_WITH)


def _probe(folder: str, trust_remote_code: bool) -> dict[str, Any]:
    """The verdict of a fresh process. A crash is one too: rows are not packed, and the loaded model is checked in any
    case.
    """
    command = [sys.executable, "-m", "manyhands.model.probe", folder] + (
        ["--trust-remote-code"] if trust_remote_code else []
    )
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
    versions = "|".join((PROBE_VERSION, _installed("manyhands"), _installed("transformers"), _installed("torch")))
    return hashlib.sha256(versions.encode() + raw_config).hexdigest()[:16]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
