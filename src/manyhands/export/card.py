"""The model card of a written folder: README.md as the hub reads it. What was trained, on what data and with which
result; none of the samples.

Knows the run's files and values, and no tensors.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from jinja2 import Environment, StrictUndefined

from manyhands.config.schema import MethodSection, ModelSection, RunConfig
from manyhands.config.tasks import TASKS
from manyhands.core.files import read_json, read_rows
from manyhands.core.terms import find_metric
from manyhands.core.text import code_block, code_span, in_markdown
from manyhands.core.units import count_of, describe_ranks
from manyhands.data.images.processor import PROCESSOR_FILES
from manyhands.export.record import CARD
from manyhands.facts.adapter import nf4_options
from manyhands.infer.vllm import RANK_LIMITS
from manyhands.metrics.report import format_value
from manyhands.metrics.summary import describe_data, describe_settings, make_curve, read_evaluations
from manyhands.planner.text import describe_checkpointing
from manyhands.planner.types import Plan, method_of
from manyhands.training.types import Evaluation

CACHED = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/[0-9a-f]+$")
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
LICENSE_LINE = re.compile(r"^(license|license_name|license_link): *[\"']?([\w.:/\-]{1,200})[\"']? *$", re.MULTILINE)
FRONT_MATTER_CHARACTERS = 20_000
CURVE_ROWS = 12
TEMPLATE = Path(__file__).with_name("card.md.jinja")


@dataclass(frozen=True)
class Card:
    """What the card of one folder is made of. ``step``: of the weights. ``data``: from ``describe_data``, or None."""

    kind: Literal["adapter", "model", "merged"]
    config: RunConfig
    plan: Plan
    step: int
    dtype: str  # of the saved weights
    opener: str  # transformers' auto class of the base
    data: Sequence[Mapping[str, Any]] | None = None
    evaluations: Sequence[Evaluation] = ()
    versions: Mapping[str, str] | None = None
    has_tokenizer: bool = True  # whether the folder holds one
    divergence: str = ""  # what was found wrong with the course of the loss, if anything was
    # of an adapter with factors of experts: each expert has its own, or those of all experts are one pair
    by_expert: bool = False
    vllm_misreads: bool = False  # which vLLM would give to other experts
    num_repeated: int = 0  # held-out samples with the very tokens of a trained one
    curve: Sequence[Mapping[str, Any]] = ()  # of the steps up to these weights, as ``make_curve`` has it

    @property
    def base(self) -> str | None:
        """The base's name on the hub; None for a folder that is no copy of one."""
        return name_on_hub(self.config.model.name, self.plan.model_folder)

    def text(self) -> str:
        config, plan, method = self.config, self.plan, method_of(self.plan, self.config)
        versions, source = self.versions or {}, Path(plan.model_folder)
        libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
        tools = f"manyhands {versions.get('manyhands', '')}".strip() + (f" ({libraries})" if libraries else "")
        declared = [metric for term in TASKS[config.task].make_terms(config) for metric in term.metrics]
        shown = {row.step: row for row in self.evaluations if row.step in (0, self.step)}
        is_qlora, folder_name = config.method.name == "qlora", Path(config.model.name).name
        quantized = self.kind == "adapter" and is_qlora and plan.stored_nf4 is None
        options = nf4_options(double_quant=method.double_quant) if quantized else {}
        environment = Environment(
            undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
        )
        environment.filters |= {
            "cell": format_value,
            "code_span": code_span,
            "in_markdown": in_markdown,
            "number": lambda value, form: "-" if value is None else format(value, form),
            "python": _python,
        }
        return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
            c=self,
            config=config,
            plan=plan,
            method=method,
            is_qlora=is_qlora,
            front_matter=yaml.safe_dump(self._front_matter(), sort_keys=False, allow_unicode=True),
            folder_name=folder_name,
            name=self.base or f"path/to/{folder_name}",
            task=TASKS[config.task].description,
            tools=tools,
            versions=versions,
            settings=describe_settings(config, plan),
            ranks=describe_ranks(plan.layout.device, plan.layout.world_size),
            checkpointing=describe_checkpointing(plan.layout),
            count_of=count_of,
            evaluations=shown,
            metrics=[find_metric(name, declared) for name in shown[self.step].figures] if self.step in shown else [],
            held_out=", ".join(source["name"] for source in self.data or () if source["num_validation_samples"]),
            remote=", trust_remote_code=True" if config.model.trust_remote_code else "",
            revision=f", revision={_python(config.model.revision)}" if config.model.revision else "",
            nf4=", ".join(f"{key}={value!r}" for key, value in options.items()).replace("'", '"'),
            # the base has a processor, which prepares its images
            reads_images=self.opener != "AutoModelForCausalLM"
            and any((source / name).is_file() for name in PROCESSOR_FILES),
            code_block=code_block,
            vllm=self._vllm(method),
        )

    def _front_matter(self) -> dict[str, Any]:
        adapter, pretrained = self.kind == "adapter", self.config.model.init == "pretrained"
        fields: dict[str, Any] = {}
        if self.base is not None and pretrained:
            fields |= {"base_model": self.base, "base_model_relation": "adapter" if adapter else "finetune"}
        fields["library_name"] = "peft" if adapter else "transformers"
        fields |= find_license(Path(self.plan.model_folder)) if pretrained else {}
        if self.opener == "AutoModelForCausalLM":
            fields["pipeline_tag"] = "text-generation"
        datasets = [source["name"] for source in self.data or () if source["hub"]]
        fields |= {"datasets": datasets} if datasets else {}
        return fields | {"tags": ["manyhands", self.config.task, self.config.method.name]}

    def _vllm(self, method: MethodSection) -> str:
        """The command that serves it; empty for adapters that vLLM refuses or misreads."""
        if self.kind != "adapter":
            return "vllm serve path/to/this/folder"
        limit = next((limit for limit in RANK_LIMITS if limit >= method.rank), None)
        refused = method.name != "lora" or method.dora or method.modules_to_save or self.plan.new_tokens is not None
        if refused or limit is None or self.vllm_misreads:
            return ""
        model = self.config.model
        at = f" --revision {shlex.quote(model.revision)}" if model.revision else ""
        folder = shlex.quote(f"{self.config.name}=path/to/this/folder")
        base = shlex.quote(self.base or f"path/to/{Path(model.name).name}")
        return f"vllm serve {base}{at} --enable-lora --max-lora-rank {limit} --lora-modules {folder}"


def make_card(
    kind: Literal["adapter", "model", "merged"],
    config: RunConfig,
    plan: Plan,
    run: Path,
    *,
    step: int,
    dtype: str,
    versions: Mapping[str, str] | None,
    divergence: str = "",
    by_expert: bool = False,
    vllm_misreads: bool = False,
) -> str:
    """The card of the run in the folder ``run``. Leaves out what is gone (the token cache, say)."""
    from manyhands.model.structure import auto_class_of

    meta = read_json(Path(plan.data_folder) / "meta.json")
    meta = meta if isinstance(meta, dict) and meta.get("digest") == plan.data_digest else None
    model = config.model
    return Card(
        kind=kind,
        config=config,
        plan=plan,
        step=step,
        dtype=dtype,
        opener=auto_class_of(plan.model_folder, trust_remote_code=model.trust_remote_code).__name__,
        data=describe_data(meta) if meta is not None else None,
        num_repeated=meta.get("num_repeated", 0) if meta is not None else 0,
        evaluations=read_evaluations(run / "metrics.jsonl"),
        curve=read_curve(run / "metrics.jsonl", step),
        versions=versions,
        divergence=divergence,
        by_expert=by_expert,
        vllm_misreads=vllm_misreads and not by_expert,
        has_tokenizer=kind != "adapter" or changes_tokenizer(model),
    ).text()


def read_curve(metrics: Path, step: int) -> list[dict[str, Any]]:
    """Of the steps up to ``step``; of one that several launches made, the last."""
    rows = {row["step"]: row for row in read_rows(metrics, "step") if row["step"] <= step}
    return make_curve([row for _, row in sorted(rows.items())], CURVE_ROWS)


def _python(text: str) -> str:
    """A literal of Python, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def changes_tokenizer(asked: ModelSection) -> bool:
    """Whether a run's tokenizer is another than its base's, so that an adapter's folder holds it too."""
    return bool(asked.chat_template or asked.new_tokens or asked.special_tokens)


def name_on_hub(name: str, model_folder: str) -> str | None:
    """OWNER/NAME of a hub model or of a folder of the hub's cache, else None. ``model_folder``: from the plan."""
    cached = CACHED.search(str(Path(model_folder).resolve()))
    if cached and HUB_NAME.fullmatch(named := f"{cached[1]}/{cached[2]}"):
        return named
    parts = Path(name).parts
    folders = (Path(model_folder), Path(model_folder).parent)  # itself, or the result in a run's folder
    is_folder = HUB_NAME.fullmatch(name) is None or any(folder.parts[-len(parts) :] == parts for folder in folders)
    return None if is_folder else name


def find_license(source: Path) -> dict[str, str]:
    """The base's license as its own card's front matter states it; nothing where it has none, or is not at hand."""
    path = source / CARD
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(FRONT_MATTER_CHARACTERS)
    head = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    return dict(LICENSE_LINE.findall(head[1])) if head else {}
