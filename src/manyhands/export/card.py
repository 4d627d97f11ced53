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

from manyhands.config.schema import ModelSection, RunConfig
from manyhands.core.files import read_json, read_rows
from manyhands.core.text import code_block, code_span, in_markdown
from manyhands.core.units import count_of, describe_ranks
from manyhands.data.image_processor import PROCESSOR_FILES
from manyhands.export.record import CARD
from manyhands.facts.adapter import nf4_options
from manyhands.infer.vllm import RANK_LIMITS
from manyhands.metrics.report import format_value
from manyhands.metrics.summary import describe_data, describe_settings, make_curve, read_evaluations
from manyhands.planner.types import Plan, describe_checkpointing, method_of
from manyhands.training.types import Evaluation

TASKS = {
    "sft": "supervised fine-tuning on conversations",
    "cpt": "continued pre-training on text",
    "mixed": "supervised fine-tuning and continued pre-training on text",
}
CACHED = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/[0-9a-f]+$")
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
LICENSE_LINE = re.compile(r"^(license|license_name|license_link): *[\"']?([\w.:/\-]{1,200})[\"']? *$", re.MULTILINE)
FRONT_MATTER_CHARACTERS = 20_000
CURVE_ROWS = 12
CURVE_COLUMNS = (("loss", ".4f"), ("grad_norm", ".3g"), ("learning_rate", ".3g"))


@dataclass(frozen=True)
class Card:
    """What the card of one folder is made of. ``step`` is that of the weights; ``data`` as ``describe_data`` has it,
    None if not known.
    """

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
    num_repeated: int = 0  # held-out samples with the very tokens of a trained one
    curve: Sequence[Mapping[str, Any]] = ()  # of the steps up to these weights, as ``make_curve`` has it

    def text(self) -> str:
        parts = [self._head(), *self._data(), *self._settings(), *self._plan(), *self._course()]
        parts += [*self._results(), *self._loading()]
        return (
            "---\n"
            + yaml.safe_dump(self._front_matter(), sort_keys=False, allow_unicode=True)
            + "---\n\n"
            + "\n".join(parts)
            + "\n"
        )

    @property
    def base(self) -> str | None:
        """The base's name on the hub; None for a folder that is no copy of one."""
        return name_on_hub(self.config.model.name, self.plan.model_folder)

    def _front_matter(self) -> dict[str, Any]:
        adapter = self.kind == "adapter"
        fields: dict[str, Any] = {}
        if self.base is not None and self.config.model.init == "pretrained":
            fields |= {"base_model": self.base, "base_model_relation": "adapter" if adapter else "finetune"}
        fields["library_name"] = "peft" if adapter else "transformers"
        fields |= find_license(Path(self.plan.model_folder)) if self.config.model.init == "pretrained" else {}
        if self.opener == "AutoModelForCausalLM":
            fields["pipeline_tag"] = "text-generation"
        datasets = [source["name"] for source in self.data or () if source["hub"]]
        fields |= {"datasets": datasets} if datasets else {}
        return fields | {"tags": ["manyhands", self.config.task, self.config.method.name]}

    def _head(self) -> str:
        method = self.config.method.name
        shown = (
            f"[{self.base}](https://huggingface.co/{self.base})"
            if self.base
            else code_span(Path(self.config.model.name).name)
        )
        extent = "all" if method == "full" and not self.plan.keeps_base else "some"
        what = {
            "adapter": f"A LoRA adapter for {shown}, trained",
            "merged": f"{shown} with a LoRA adapter merged into its weights, trained",
            "model": f"{shown}, {extent} of its weights trained",
        }[self.kind]
        if self.kind == "merged" and method == "qlora":
            what = what.replace("merged into its weights", "merged into its weights, which were rounded to NF4 before")
        if self.config.model.init == "random":
            what = f"A model of the architecture of {shown}, trained from random weights"
        versions = self.versions or {}
        tools = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
        ours = " ".join(("manyhands", versions.get("manyhands", ""))).strip()
        tools = f" ({tools})" if tools else ""
        warning = f"\n**Training diverged: {in_markdown(self.divergence)}.**\n" if self.divergence else ""
        by = f"by {TASKS[self.config.task]} with {ours}{tools}"
        return f"# {in_markdown(self.config.name)}\n\n{what} {by}. Saved in {self.dtype}.\n{warning}"

    def _data(self) -> list[str]:
        if self.data is None:
            return []
        lines = ["## Training data", "", "| source | samples | tokens | times an epoch |", "|---|---|---|---|"]
        for source in self.data:
            if source["num_samples"]:
                cells = (
                    source["name"],
                    f"{source['num_samples']:,}",
                    f"{source['num_tokens']:,}",
                    f"{source['weight']:g}",
                )
                lines.append(f"| {' | '.join(format_value(cell) for cell in cells)} |")
        return [*lines, "", f"Digest of the prepared samples: `{self.plan.data_digest}`.", ""]

    def _settings(self) -> list[str]:
        lines = ["## Settings", "", f"{self.step:,} optimizer steps.", "", "| key | value |", "|---|---|"]
        lines += [
            f"| {key} | {format_value(value)} |" for key, value in describe_settings(self.config, self.plan).items()
        ]
        return [*lines, ""]

    def _plan(self) -> list[str]:
        """How it was computed: what another run needs to be the same."""
        layout = self.plan.layout
        sizes = f"{count_of(self.plan.num_steps, 'step')}, digest of the plan `{self.plan.digest}`"
        where = f"{layout.strategy} on {describe_ranks(layout.device, layout.world_size)}"
        rows = {
            "layout": f"{where}, activation checkpointing {describe_checkpointing(layout)}",
            "planned": sizes,
            "attention": self.plan.attention,
        }
        rows |= {"versions": ", ".join(f"{k} {v}" for k, v in self.versions.items())} if self.versions else {}
        return [
            "## Plan",
            "",
            "| | |",
            "|---|---|",
            *(f"| {key} | {value} |" for key, value in rows.items()),
            "",
        ]

    def _course(self) -> list[str]:
        """The training loss over the steps up to these weights; a point is a mean of several."""
        if not self.curve:
            return []
        lines = [
            "## Course of the training",
            "",
            "| step | loss | gradient norm | learning rate |",
            "|---|---|---|---|",
        ]
        for point in self.curve:
            cells = (_number(point[key], form) for key, form in CURVE_COLUMNS)
            lines.append(f"| {point['step']:,} | {' | '.join(cells)} |")
        return [*lines, ""]

    def _results(self) -> list[str]:
        lines = ["## Held-out results", ""]
        shown = {row.step: row for row in self.evaluations if row.step in (0, self.step)}
        if self.step not in shown:
            return [*lines, "These weights were not evaluated on held-out samples.", ""]
        lines += ["| | loss | perplexity | token accuracy |", "|---|---|---|---|"]
        for step, row in sorted(shown.items()):
            name = "before training" if step == 0 and self.step else f"after step {step}"
            lines.append(f"| {name} | {row.loss:.4f} | {row.perplexity:.4g} | {row.accuracy:.2%} |")
        row = shown[self.step]
        names = [source["name"] for source in self.data or () if source["num_validation_samples"]]
        of = f" of {in_markdown(', '.join(names))}" if names else ""
        measured = f"{row.num_samples:,} held-out samples{of} ({row.num_loss_tokens:,} loss tokens)"
        count = f"Measured during training on {measured}"
        repeated = (
            f" {self.num_repeated:,} of all held-out samples have the tokens of a trained one."
            if self.num_repeated
            else ""
        )
        return [*lines, "", f"{count}.{repeated} Nothing else was evaluated.", ""]

    def _loading(self) -> list[str]:
        return ["## Loading", "", *self._nf4(), *code_block("\n".join(self._code()), "python"), *self._vllm()]

    def _vllm(self) -> list[str]:
        """The command that serves it; nothing for adapters of kinds that vLLM refuses."""
        if self.kind != "adapter":
            return ["", *code_block("vllm serve path/to/this/folder", "bash")]
        method = method_of(self.plan, self.config)
        if method.name != "lora" or method.dora or method.modules_to_save or self.plan.new_tokens is not None:
            return []
        limit = next((limit for limit in RANK_LIMITS if limit >= method.rank), None)
        if limit is None:
            return []
        base = self.base or f"path/to/{Path(self.config.model.name).name}"
        revision = self.config.model.revision
        at = f" --revision {shlex.quote(revision)}" if revision else ""
        folder = shlex.quote(f"{self.config.name}=path/to/this/folder")
        command = f"vllm serve {shlex.quote(base)}{at} --enable-lora --max-lora-rank {limit} --lora-modules {folder}"
        return ["", *code_block(command, "bash")]

    def _nf4(self) -> list[str]:
        if self.kind != "adapter" or self.config.method.name != "qlora":
            return []
        method = method_of(self.plan, self.config)
        text = "It was trained beside weights in 4 bits, NF4 "
        if self.plan.stored_nf4 is not None:
            text += "as the base's files hold them."
        elif method.double_quant:
            text += "**with double quantization**,"
            text += " which is not bitsandbytes' default: open the base as it is done here."
        else:
            text += "without double quantization."
        if method.init == "loftq":
            text += " Its initial values are the quantization error of these 4 bits (LoftQ),"
            text += " so it is wrong beside weights in 16 bits."
        return [text, ""]

    def _code(self) -> list[str]:
        reads = self._reads_images
        load = f"from transformers import {self.opener}, {'AutoProcessor, ' * reads}AutoTokenizer"
        remote = ", trust_remote_code=True" if self.config.model.trust_remote_code else ""
        if self.kind != "adapter":
            return [
                *["from PIL import Image"] * reads,
                load,
                "",
                'folder = "path/to/this/folder"  # or its name on the hub',
                f'model = {self.opener}.from_pretrained(folder, dtype="auto"{remote})',
                f"tokenizer = AutoTokenizer.from_pretrained(folder{remote})",
                *self._show_image(f"folder{remote}"),
            ]
        base, dtype = self.base or f"path/to/{Path(self.config.model.name).name}", self.plan.layout.compute_dtype
        revision = self.config.model.revision
        at = remote + (f", revision={_python(revision)}" if revision else "")
        more = at
        lines = ["import torch", "from peft import PeftModel", *["from PIL import Image"] * reads, load]
        quantized = self.config.method.name == "qlora" and self.plan.stored_nf4 is None
        if quantized:
            named = nf4_options(double_quant=method_of(self.plan, self.config).double_quant)
            options = ", ".join(f"{key}={value!r}" for key, value in named.items()).replace("'", '"')
            lines[-1] += ", BitsAndBytesConfig"
            lines += ["", f"nf4 = BitsAndBytesConfig({options}, bnb_4bit_compute_dtype=torch.{dtype})"]
            more += ", quantization_config=nf4"
        lines += ["", f"base = {self.opener}.from_pretrained({_python(base)}, dtype=torch.{dtype}{more})"]
        if self.plan.new_tokens is not None:
            lines.append(f"base.resize_token_embeddings({self.plan.new_tokens.vocab_size})")
        lines.append('model = PeftModel.from_pretrained(base, "path/to/this/folder")')
        tokenizer, own = ("path/to/this/folder", remote) if self.has_tokenizer else (base, at)
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({_python(tokenizer)}{own})")
        return [*lines, *self._show_image(f"{_python(base)}{at}")]

    @property
    def _reads_images(self) -> bool:
        """Whether the base has a processor, which prepares its images."""
        folder = Path(self.plan.model_folder)
        return self.opener != "AutoModelForCausalLM" and any((folder / name).is_file() for name in PROCESSOR_FILES)

    def _show_image(self, place: str) -> list[str]:
        """An answer about an image; ``place``: the arguments that open the processor."""
        if not self._reads_images:
            return []
        own = ["processor.tokenizer, processor.chat_template = tokenizer, tokenizer.chat_template"]
        return [
            f"processor = AutoProcessor.from_pretrained({place})",
            *own * (self.kind == "adapter" and self.has_tokenizer),
            "",
            'image = {"type": "image", "image": Image.open("image.png")}',
            'messages = [{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}]',
            "inputs = processor.apply_chat_template(",
            '    messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"',
            ").to(model.device, model.dtype)",
            "answer = model.generate(**inputs, max_new_tokens=100)",
            'print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
        ]


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
) -> str:
    """The card's text, of the run in the folder ``run``. What is not at hand any more (the token cache, say) is left
    out.
    """
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
        has_tokenizer=kind != "adapter" or changes_tokenizer(model),
    ).text()


def read_curve(metrics: Path, step: int) -> list[dict[str, Any]]:
    """Of the steps up to ``step``; of one that several launches made, the last."""
    rows = {row["step"]: row for row in read_rows(metrics, "step") if row["step"] <= step}
    return make_curve([row for _, row in sorted(rows.items())], CURVE_ROWS)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _python(text: str) -> str:
    """A literal of Python, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def changes_tokenizer(asked: ModelSection) -> bool:
    """Whether a run's tokenizer is another than its base's, so that an adapter's folder holds it too."""
    return bool(asked.chat_template or asked.new_tokens or asked.special_tokens)


def name_on_hub(name: str, model_folder: str) -> str | None:
    """OWNER/NAME of a model of the hub, if ``name`` is that or a folder of the hub's cache; None for other folders.

    ``model_folder`` is where the plan found it: a relative path is meant from where the run was started.
    """
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
