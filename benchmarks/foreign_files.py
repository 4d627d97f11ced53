"""How many published files of other tools run as they are, by tool, and the one reason of each that does not.

    python -m benchmarks.foreign_files FOLDER... [--gpus 8xH100-80GB] [--list] [--json FILE]

Every file is translated, its run file is checked, and the run is planned as ``manyhands plan`` does: with a tiny model
of the family that the file names (with experts or quantized weights where the named model has them), a few rows in the
format that it names, and GPUs that need not be here. No network, nothing is trained. The folders are checkouts of the
tools' repositories; files that are no run file of a tool are not counted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manyhands.config.read import SUFFIXES, read_run_file
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.importers.load import config_from_mapping
from manyhands.importers.recognize import recognize, translate
from manyhands.importers.translation import STOPS, ImportContext, Translation
from tests.data.test_tekken import write_tekken
from tests.support.experts import expert_config
from tests.support.tiny import OF_FAMILY, TINY, tiny_tokenizer

GPUS = "8xH100-80GB"
NUM_ROWS = 400
MAX_RANK = 4
OUT_OF_SCOPE = re.compile(
    r"images|sound|preferences|rewards?\b|classifiers|predict|inference|DPO|KTO|trains nothing|this file merges",
    re.IGNORECASE,
)
# The model type of a name, the first that matches. Types with a star have code of their own and none in transformers.
TYPES: tuple[tuple[str, str], ...] = (
    ("mixtral|8x7b|8x22b", "mixtral"), ("dbrx", "dbrx"), ("qwen1.5-moe", "qwen2_moe"),
    ("qwen3-next", "qwen3_next_moe"), (r"qwen3\.5.*-a\d", "qwen3_5_moe_text"), (r"qwen3\.5", "qwen3_5_text"),
    (r"qwen3-\d+b-a\d", "qwen3_moe"), ("qwen3|plano", "qwen3"), ("qwen/qwen-", "qwen*"),
    ("qwen|deepcoder|cogito.*qwen", "qwen2"), ("mimo", "mimo*"), ("deepseek-v4", "deepseek_v4*"),
    ("deepseek-v2", "deepseek_v2"), ("deepseek-(v3|r1)|moonlight|kimi-k2", "deepseek_v3"),
    ("kimi-linear", "kimi_linear"), ("gpt-oss", "gpt_oss"), ("jamba", "jamba"), ("llama-4", "llama4_text"),
    (r"glm-4\.5|glm-4\.7-f|glm-5|glm-4\.6", "glm4_moe"), ("glm", "glm4"), ("minimax-m2", "minimax_m2"),
    ("minimax", "minimax"), ("trinity", "afmoe"), ("lfm2-8b-a1b", "lfm2_moe"), ("lfm2", "lfm2"),
    ("granite-4", "granitemoehybrid"),
    ("granite", "granite"), ("gemma-4.*a4b", "gemma4_moe"), ("gemma-4", "gemma4_text"), ("gemma-3n", "gemma3n_text"),
    ("gemma-3", "gemma3_text"), ("gemma-2", "gemma2"), ("gemma", "gemma"), ("falcon-h1", "falcon_h1"),
    ("falcon-e", "llama"), ("falcon", "falcon"), ("mistral-small-4", "mistral4"), ("nemotron-3", "nemotron_h"),
    ("nemotron-mini", "nemotron"), ("ministral-3", "ministral3"), ("voxtral", "llama"),
    ("mistral|devstral|magistral|ministral", "mistral"),
    ("phi-3|phi-4", "phi3"), ("phi-", "phi"), ("pythia|redpajama", "gpt_neox"), ("gpt-j", "gptj"),
    ("cerebras-gpt", "gpt2"), ("btlm", "btlm*"), ("mpt", "mpt"), ("xgen-7b", "xgen*"), ("replit", "replit*"),
    ("mamba", "mamba"), ("stablelm", "stablelm"), ("starcoder2", "starcoder2"), ("command-r7b", "cohere2"),
    ("olmo-3", "olmo3"), ("olmo", "olmo2"), ("hunyuan", "hunyuan_v1_dense"), ("afm", "arcee"),
    ("seed-oss", "seed_oss"), ("apertus", "apertus"), ("smollm3", "smollm3"), ("internlm", "internlm*"),
    ("", "llama"),
)  # fmt: skip
NF4 = r"bnb.nf4"  # which can be trained beside as it is
QUANTIZED = r"nvfp4|gptq|awq|aqlm|prequantized|2of4|minimax-m2"  # the last one in fp8
EXPERTS = {"qwen3_next_moe": "qwen3_next", "gemma4_moe": "gemma4_text"}  # names of ours: their type, with experts
TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<start_of_turn>", "<end_of_turn>", "<|user|>",
          "<|assistant|>", "<|end|>", "<|system|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|turn>",
          "<turn|>", "[INST]", "[/INST]", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|START_OF_TURN_TOKEN|>",
          "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<｜User｜>", "<｜Assistant｜>")  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ROWS: Mapping[str, dict[str, Any]] = {
    "alpaca": {"instruction": "Say hello.", "input": "", "output": "Hello."},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
    "messages": {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
    "prompt": {"prompt": "Hi", "completion": "Hello."},
    "question": {"question": "Hi?", "answer": "Hello."},
    "tokens": {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "attention_mask": [1, 1, 1, 1]},
    "segments": {"segments": [{"label": False, "text": "Hi"}, {"label": True, "text": "Hello."}]},
    "preference": {"prompt": "Hi", "chosen": "Hello.", "rejected": "Go away."},
    "label": {"prompt": "Hi", "completion": "Hello.", "label": True},
    "text": {"text": "Once upon a time there was a river that ran up the hill. " * 8},
}


@dataclass(frozen=True)
class Row:
    """A file's outcome: ``runs``, ``refused`` or ``out of scope``, and why not. ``substituted``: keys, if it runs."""

    tool: str
    file: str
    outcome: str
    reason: str = ""
    substituted: tuple[str, ...] = ()
    keys: int = 0


def judge(path: Path, name: str, gpus: str, work: Path) -> Row | None:
    """The outcome of one file; None if it is no run file of another tool."""
    try:
        source = read_run_file(path)
        importer = recognize(source.mapping)
    except UserError:
        return None
    if importer is None:
        return None
    from manyhands.facts.gpu_kinds import parse_gpus

    tool = importer.TOOL
    try:
        context = ImportContext(
            folder=path.parent,
            count_gpus=lambda: parse_gpus(gpus).total,
            hub_file=lambda _, file: _beside(path, file),
            model_config=lambda name: json.loads((tiny_folder(name, work / "models") / "config.json").read_text()),
        )
        done = translate(source, importer, context)
    except UserError as error:
        return Row(tool, name, "refused", error.what)
    num_keys = len(done.outcomes)
    stops = [outcome for outcome in done.outcomes if outcome.kind in STOPS]
    if stops:
        outside = next((outcome for outcome in stops if OUT_OF_SCOPE.search(outcome.why)), None)
        verdict, stop = ("out of scope", outside) if outside else ("refused", _foremost(stops))
        return Row(tool, name, verdict, f"{stop.key.split('.')[0].split('[')[0]}: {stop.why}", keys=num_keys)
    substituted = tuple(outcome.key for outcome in done.outcomes if outcome.kind == "substituted")
    try:
        plan_it(done, work, gpus)
    except UserError as error:
        verdict = "out of scope" if "images" in error.what else "refused"  # tiny models here are of text alone
        return Row(tool, name, verdict, _one_reason(error), keys=num_keys)
    return Row(tool, name, "runs", substituted=substituted, keys=num_keys)


def _beside(path: Path, name: str) -> Path | None:
    """In place of a file on the hub: the checkout's own of this name."""
    return next((file for folder in path.parents if (file := folder / "data" / name).is_file()), None)


def _foremost(stops: list[Any]) -> Any:
    """The reason that no other key's change would remove: experts first, then the rest in the file's order."""
    return next((outcome for outcome in stops if "experts" in outcome.why), stops[0])


def _one_reason(error: UserError) -> str:
    text = error.details[0] if error.details else error.what
    return re.sub(r"line \d+, ?|\(.*line.*\)|/\S+/", "", text)


def plan_it(done: Translation, work: Path, gpus: str) -> None:
    """Checks and plans the run with a tiny model and a few rows. Raises UserError with what the run would refuse."""
    from manyhands.facts.gpu_kinds import describe_host, parse_gpus
    from manyhands.launch.run.prepare import gather_facts
    from manyhands.planner.search import plan

    mapping = json.loads(json.dumps(done.mapping, default=str))
    asked = str(mapping["model"]["name"])
    mapping["model"] = mapping["model"] | {"revision": None}
    mapping["model"]["name"] = str(
        tiny_folder(asked, work / "models", tekken=mapping["model"].get("chat_template") == "tekken")
    )
    for key in ("adapter", "parts"):  # parts: the tiny model is of text alone
        mapping.setdefault("method", {}).pop(key, None)
    if "rank" in mapping["method"]:  # one that the named model's experts take
        mapping["method"]["rank"] = min(mapping["method"]["rank"], MAX_RANK)
    usual = {"preference": "preference", "kto": "label"}.get(mapping.get("task", ""), "messages")
    for key, first in (("train", 0), ("validation", 1_000_000)):
        if mapping["data"].get(key):
            mapping["data"][key] = _tiny_sources(mapping["data"][key], mapping["data"], work / "data", first, usual)
    if "max_steps" not in mapping.get("stop", {}):  # few rows make few steps: more epochs instead
        mapping.setdefault("stop", {})["epochs"] = 50
    mapping["method"] = {key: _of_text(value) for key, value in mapping["method"].items()}
    mapping.setdefault("name", "run")
    mapping["data"]["cache"] = str(work / "cache")
    mapping.setdefault("output", {})["dir"] = str(work / "runs")
    config: RunConfig = config_from_mapping(mapping, origins=done.origins)
    host = describe_host(parse_gpus(gpus))
    plan(config, gather_facts(config, identify=False, saves=False, host=host, report=lambda _: None))


def _of_text(value: Any) -> Any:
    """Names of modules as the tiny model has them, which is the text part alone of models of images."""
    if isinstance(value, list):
        return [_of_text(one) for one in value]
    return value.replace("language_model.", "").replace(r"language_model\.", "") if isinstance(value, str) else value


def _tiny_sources(value: Any, data: Mapping[str, Any], folder: Path, first: int, usual: str) -> list[dict[str, Any]]:
    """The same sources with files of a few rows in place of theirs, numbered from ``first`` on; of the format ``usual``
    where none is named.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources = []
    for index, item in enumerate([value] if isinstance(value, str) else value):
        source = {"path": item} if isinstance(item, str) else dict(item)
        kind = source.get("format") or data.get("format") or "auto"
        kind = usual if kind == "auto" else kind
        fields = source.get("fields") or data.get("fields") or {}
        cells = ROWS.get(kind, ROWS["messages"])
        if kind in ("preference", "label") and "messages" in fields:  # the prompt's turns, answers as one turn each
            turn = {"role": "assistant", "content": "Hello."}
            answers = {name: turn | {"content": cell} for name, cell in cells.items() if name in ("chosen", "rejected")}
            cells = {"messages": [{"role": "user", "content": "Hi"}, *([turn] if kind == "label" else [])]} | answers
            cells |= {"label": True} if kind == "label" else {}
        row = {fields.get(name, name): cell for name, cell in cells.items()}
        inner = {name: fields[name] for name in ("role", "content", "from", "value") if name in fields}
        row = {
            name: [{inner.get(key, key): text for key, text in turn.items()} for turn in cell]
            if isinstance(cell, list) and isinstance(cell[0], dict)
            else {inner.get(key, key): text for key, text in cell.items()}
            if isinstance(cell, dict)
            else cell
            for name, cell in row.items()
        }
        name = re.sub(r"\W+", "-", json.dumps([kind, sorted(row), inner, first + index]))
        path = folder / f"{name}.jsonl"
        text = json.dumps(row, ensure_ascii=False)  # no two alike: copies of training rows are not held out
        numbers = range(first + index * NUM_ROWS, first + (index + 1) * NUM_ROWS)
        lines = [text.replace("Hello.", f"Hello {number}.").replace("hill", f"hill {number}") for number in numbers]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        kept = {
            key: cell for key, cell in source.items() if key not in ("path", "subset", "revision", "split", "files")
        }
        sources.append(kept | {"path": str(path)})
    return sources


def model_type(name: str) -> str:
    """The model type that a published model of this name has, by this file's table."""
    lowered = name.lower()
    return next(kind for pattern, kind in TYPES if re.search(pattern, lowered))


def tiny_folder(name: str, folder: Path, *, tekken: bool = False) -> Path:
    """A folder of a tiny model of the named one's family, with tekken.json alone if asked: written once for each."""
    kind, quantized, nf4 = model_type(name), *(re.search(one, name.lower()) for one in (QUANTIZED, NF4))
    if kind.endswith("*"):
        raise UserError(f"models of the type {kind.strip('*')} have code of their own, which transformers has not")
    path = folder / (
        kind + ("-quantized" if quantized else "") + ("-nf4" if nf4 else "") + ("-tekken" if tekken else "")
    )
    if path.is_dir():
        return path
    path.mkdir(parents=True)
    tokenizer = tiny_tokenizer(TOKENS)
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = "<|im_end|>", "<|pad|>", TEMPLATE
    tokenizer.save_pretrained(path)
    size = {"vocab_size": len(tokenizer), "eos_token_id": 258, "max_position_embeddings": 1 << 20}
    _write_model(kind, size, path)
    if nf4 and (path / "model.safetensors").is_file():
        import torch

        from tests.convert.test_stored_nf4 import quantize

        return quantize(path, path.with_name(f"{path.name}-stored"), dtype=torch.bfloat16)
    if tekken:
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (path / file).unlink()
        write_tekken(path)
    if quantized:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "other"}}))
    return path


def _write_model(kind: str, size: Mapping[str, Any], path: Path) -> None:
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from manyhands.model.structure import auto_class

    values = TINY | OF_FAMILY.get(EXPERTS.get(kind, kind), {}) | dict(size)
    if kind in EXPERTS:
        values |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = _configure(CONFIG_MAPPING[EXPERTS.get(kind, kind)], values)
    counts = (getattr(config, name, None) for name in ("num_experts", "n_routed_experts", "num_local_experts"))
    try:
        if any(isinstance(count, int) and count > 1 for count in counts):
            config = expert_config(EXPERTS.get(kind, kind), **size)
        model = auto_class(config).from_config(config, dtype=torch.float32)
        model.save_pretrained(path)
    except Exception:  # sizes that a family does not take: its config.json alone
        config.save_pretrained(path)


def _configure(kind: Any, values: dict[str, Any]) -> Any:
    """A configuration of these sizes; families that derive the size of a head, or have no such key, derive it."""
    try:
        return kind(**values)
    except (AttributeError, TypeError, ValueError):
        return kind(**{name: value for name, value in values.items() if name != "head_dim"})


def judge_all(folders: list[Path], gpus: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as work:
        for folder in folders:
            for path in sorted(folder.rglob("*")):
                if path.suffix in SUFFIXES and path.is_file():
                    row = judge(path, str(path.relative_to(folder)), gpus, Path(work))
                    if row is not None:
                        print(f"{row.outcome:12} {row.file} {row.reason}", file=sys.stderr, flush=True)
                        yield row


def table(rows: list[Row]) -> str:
    """Markdown: files and keys by tool, then the reasons against those that do not run."""
    lines = ["| tool | files | out of scope | run as they are | with a substitution | refused | keys |"]
    lines += ["|---|---|---|---|---|---|---|"]
    tools = sorted({row.tool for row in rows})
    for tool in [*tools, "together"]:
        own = [row for row in rows if tool in (row.tool, "together")]
        counts = Counter(row.outcome for row in own)
        told = sum(bool(row.substituted) for row in own)
        numbers = (
            len(own),
            counts["out of scope"],
            counts["runs"],
            told,
            counts["refused"],
            sum(row.keys for row in own),
        )
        lines.append(" | ".join(["| " + tool, *map(str, numbers)]) + " |")
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row.outcome == "refused":
            reasons[row.reason][row.tool] += 1
    lines += ["", "| reason | " + " | ".join(tools) + " |", "|---" * (len(tools) + 1) + "|"]
    for reason, counts in sorted(reasons.items(), key=lambda item: -item[1].total()):
        cells = [str(counts[tool] or "") for tool in tools]
        lines.append(" | ".join(["| " + reason.replace("|", "\\|"), *cells]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--gpus", default=GPUS, help="the machine to plan for")
    parser.add_argument("--list", action="store_true", help="print each file's outcome, too")
    parser.add_argument("--json", type=Path, help="write each file's outcome here")
    options = parser.parse_args()
    rows = list(judge_all(options.folders, options.gpus))
    if options.list:
        print("\n".join(f"{row.tool}\t{row.outcome}\t{row.file}\t{row.reason}" for row in rows) + "\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
