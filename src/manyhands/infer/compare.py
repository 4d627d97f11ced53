"""``manyhands eval``: which data, which models, and the table of what was measured beside what the run recorded."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from manyhands.config.schema import PreferenceSection, RunConfig, Source
from manyhands.core.errors import UserError
from manyhands.core.files import read_json, write_atomically, write_json
from manyhands.core.text import report_aside
from manyhands.core.units import count_of
from manyhands.data.store.store import TokenStore
from manyhands.data.tokenize.prepare import prepare
from manyhands.infer.evaluate import EvaluationData, Scores, are_pairs, judge_pairs, measure
from manyhands.infer.load import ModelLocation, find_parts
from manyhands.infer.replicas import ALL_GPUS, Placement
from manyhands.infer.settings import GenerationSettings
from manyhands.infer.text_metrics import LOSS_METRICS, PAIR_METRICS, TEXT_METRICS, check_metrics
from manyhands.launch.run.folder import RunFolder
from manyhands.metrics.summary import read_evaluations

PAGE = Path(__file__).with_name("samples.html.jinja")
MAX_LENGTH = 32_768  # tokens of a sample of a model folder, which has no run that says


@dataclass(frozen=True)
class Comparison:
    """Columns of the table in their order: name to figures by metric; ``scores`` is of the trained model."""

    folder: Path
    data: EvaluationData
    metrics: tuple[str, ...]
    columns: dict[str, dict[str, float]]
    scores: Scores
    step: int | None = None
    notes: tuple[str, ...] = ()


def compare(
    folder: Path,
    *,
    data: str | None = None,
    metrics: Sequence[str] = ("loss", "perplexity", "accuracy"),
    settings: GenerationSettings | None = None,
    extract: str | None = None,
    limit: int | None = None,
    max_tokens: int | None = None,
    base: str | None = None,
    with_base: bool = True,
    placement: Placement = ALL_GPUS,
) -> Comparison:
    """Measures a run and its base on its validation samples or a file's. UserError where there is nothing to."""
    metrics = check_metrics(metrics, extract)
    found, run = find_parts(folder, base), RunFolder(folder) if (folder / "run.json").is_file() else None
    chosen = replace(choose_data(found, run, folder, data, max_tokens), limit=limit)
    if metrics == LOSS_METRICS and are_pairs(chosen.open()):  # nothing else was asked for
        metrics = PAIR_METRICS
    origin = find_base_parts(found, run) if with_base else None
    preference = _read_preference(run, origin) if run and not set(PAIR_METRICS).isdisjoint(metrics) else None
    options: dict[str, Any] = dict(settings=settings, extract=extract, placement=placement)
    columns: dict[str, dict[str, float]] = {}
    step, notes = None, []
    if run is not None and data is None:
        recorded, step = _recorded(run, max_tokens)
        columns |= recorded
        if "after" not in recorded:
            notes.append("the run recorded no evaluation of these weights")
        config = run.read_config()
        in_4_bits = config.method.name == "qlora" and config.method.init != "loftq"
        if in_4_bits or config.model.frozen_dtype == "fp8":
            notes.append("the base is not quantized here, as it was in training")
    scores = measure(found, chosen, metrics, **options)
    before = None
    if origin is not None:
        report_aside("the base model")
        before = measure(origin, chosen, metrics, **options)
        columns["base"] = before.values
    if preference is not None:
        reference = before.pairs if before is not None and preference.needs_reference else None
        for each in (scores, before):
            if each is not None and each.pairs is not reference:
                figures = judge_pairs(preference, each.pairs, reference)
                each.values |= {metric: figures[metric] for metric in PAIR_METRICS if metric in metrics}
        if not columns.get("base", True):  # its rewards are 0
            del columns["base"]
    columns["measured"] = scores.values
    return Comparison(folder, chosen, metrics, columns, scores, step, tuple(notes))


def _read_preference(run: RunFolder, origin: ModelLocation | None) -> PreferenceSection:
    """What rewards are made of. UserError where they compare with a model that is not measured."""
    config = run.read_config()
    if config.preference.needs_reference and (origin is None or config.method.adapter):
        raise UserError(
            "rewards compare with the model before training, which is not measured",
            where="method.adapter" if config.method.adapter else str(run.path),
            why="the run began with an adapter" if config.method.adapter else "--no-base, or its files are not here",
            fix="leave --no-base out, or read the evaluations of the run's report",
        )
    return config.preference


def choose_data(
    found: ModelLocation, run: RunFolder | None, folder: Path, data: str | None, max_tokens: int | None
) -> EvaluationData:
    """The run's validation samples, tokenized again if need be; or a file's, prepared as the run's were."""
    if data is not None:
        return EvaluationData(_prepare_file(found, run, folder, data), "train", data, max_tokens)
    if run is None:
        raise UserError(
            "there are no samples to evaluate on",
            where=str(folder),
            why="only a run's folder has validation samples of its own",
            fix="give a file: --data FILE",
        )
    config, plan = run.read_config(), run.read_plan()
    store_folder = Path(plan.data_folder)
    if not store_folder.is_dir():
        store_folder = Path(prepare(config, plan.model_folder, report_aside).folder)
    store = TokenStore.open(store_folder)
    if plan.data_content and store.content != plan.data_content:
        raise UserError(
            "the data are not those of the run any more",
            where=str(store_folder),
            why="the tokens differ from those that it was trained and evaluated on",
            fix="put the data files back as they were",
        )
    asked = config.evaluate.max_tokens if max_tokens is None else max_tokens
    if store.validation.num_samples == 0:
        raise UserError(
            "the run has no validation samples",
            where=str(folder),
            why=explain_no_validation(config, store.train.num_samples),
            fix="give a file: --data FILE",
        )
    return EvaluationData(store_folder, "validation", "the run's validation samples", asked)


def explain_no_validation(config: RunConfig, num_samples: int) -> str:
    """Why a run of ``num_samples`` training samples has no others."""
    if config.data.validation is not None:
        return "no row of data.validation has become a sample"
    if config.data.validation_fraction == 0:
        return "data.validation is not set and data.validation_fraction is 0"
    return f"data.validation is not set, and of so few samples ({num_samples:,}), or copies of a few, none was held out"


def _prepare_file(found: ModelLocation, run: RunFolder | None, folder: Path, data: str) -> Path:
    """The folder of a file's tokens, all of its rows."""
    if run is not None:
        config, model_folder = run.read_config(), Path(run.read_plan().model_folder)
        if not model_folder.is_dir():
            model_folder = found.adapter or found.weights
    else:
        of_adapter = found.adapter is not None and (found.adapter / "tokenizer_config.json").is_file()
        model_folder = found.adapter if found.adapter is not None and of_adapter else found.weights
        positions = (read_json(found.weights / "config.json") or {}).get("max_position_embeddings") or MAX_LENGTH
        config = RunConfig.model_validate(
            {
                "name": "eval",
                "task": "mixed",
                "model": {"name": str(folder), "chat_template": found.chat_template},
                "data": {"train": data, "max_length": min(positions, MAX_LENGTH)},
            }
        )
    source = Source(path=data, ignore=config.data.ignore)  # a list of its own, as this file may lack a column of it
    asked: dict[str, Any] = {"train": (source,), "validation": None, "validation_fraction": 0.0, "max_samples": None}
    asked |= {"ignore": (), "deduplicate": False, "order": "as_given"}
    sections = {
        "data": config.data.model_copy(update=asked),
        "evaluate": config.evaluate.model_copy(update={"data": {}}),
    }
    config = config.model_copy(update=sections)
    return Path(prepare(config, model_folder, report_aside).folder)


def find_base_parts(found: ModelLocation, run: RunFolder | None) -> ModelLocation | None:
    """The model before training; None where it is not known, or where it lacks tokens that the adapter adds."""
    if found.adapter is not None:
        import torch
        from transformers import AutoConfig

        from manyhands.facts.adapter import needed_tokens
        from manyhands.model.resize_embeddings import rows_by_token
        from manyhands.model.structure import auto_class_of

        config = read_json(found.weights / "config.json") or {}
        rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size", 0)
        with torch.device("meta"):
            model = auto_class_of(found.weights).from_config(AutoConfig.from_pretrained(found.weights))
        if needed_tokens(found.adapter, rows_by_token(model)) > rows:
            report_aside("the base model is not measured: it lacks the tokens that the adapter adds")
            return None
        return replace(found, adapter=None)
    if run is None:
        return None
    plan, config = run.read_plan(), run.read_config()
    origin = Path(plan.model_folder)
    if not origin.is_dir() or config.model.new_tokens or config.model.init == "random":
        return None
    return replace(found, weights=origin)


def _recorded(run: RunFolder, max_tokens: int | None) -> tuple[dict[str, dict[str, float]], int | None]:
    """What the run measured itself: before the first step, and of the weights that it has saved; the step of these."""
    report = read_json(run.report_json)
    if not isinstance(report, dict) or max_tokens is not None:
        return {}, None
    best = report.get("best") if run.read_config().checkpoint.keep_best else None
    step = best["step"] if best else report["measured"]["steps"]
    by_step = {evaluation.step: evaluation for evaluation in read_evaluations(run.metrics)}
    columns = {}
    for name, number in (("before", 0), ("after", step)):
        if number in by_step:
            one = by_step[number]
            columns[name] = {"loss": one.terms.get("lm", one.loss), **one.figures}  # other terms are not measured here
    return columns, step


TITLES = {"before": "recorded before", "after": "recorded after", "base": "base model", "measured": "this model"}


def describe(comparison: Comparison) -> str:
    scores = comparison.scores
    counts = f"{count_of(scores.num_samples, 'sample')}"
    counts += f", {count_of(scores.num_loss_tokens, 'loss token')}" if scores.num_loss_tokens else ""
    counts += f", {count_of(len(scores.answers), 'answer')}" if scores.answers else ""
    titles = [TITLES[name] for name in comparison.columns]
    width = max(12, *(len(name) for name in comparison.metrics))
    lines = [
        f"{comparison.folder} on {comparison.data.name}: {counts}, {scores.seconds:.1f} s",
        "".join([" " * width, *(f"{title:>18}" for title in titles)]),
    ]
    for metric in comparison.metrics:
        cells = [_show(metric, column.get(metric)) for column in comparison.columns.values()]
        lines.append("".join([f"{metric:<{width}}", *(f"{cell:>18}" for cell in cells)]))
    return "\n".join([*lines, *comparison.notes])


def _show(metric: str, value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    if metric in ("loss", "perplexity", "reward_margin"):
        return f"{value:.2f}" if metric == "perplexity" else f"{value:.4f}"
    return f"{value:.1%}"


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Figures for programs: those of the trained model at the top, the other columns beside them."""
    recorded = comparison.columns.get("after", {})
    return {
        **comparison.scores.values,
        "num_samples": comparison.scores.num_samples,
        "num_loss_tokens": comparison.scores.num_loss_tokens,
        "num_answers": len(comparison.scores.answers),
        "step": comparison.step if recorded else None,
        "recorded_loss": recorded.get("loss"),
        "columns": comparison.columns,
        "data": comparison.data.name,
    }


def write_files(comparison: Comparison, output: Path) -> list[Path]:
    """figures.json, and where answers were judged samples.jsonl and the page samples.html; returns what was written."""
    output.mkdir(parents=True, exist_ok=True)
    written = [output / "figures.json"]
    write_json(written[0], to_json(comparison))
    judged = comparison.scores.answers
    if judged:
        lines = (json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in judged)
        write_atomically(output / "samples.jsonl", "".join(lines))
        write_atomically(output / "samples.html", render_page(comparison))
        written += [output / "samples.jsonl", output / "samples.html"]
    return written


def render_page(comparison: Comparison) -> str:
    """The answers as one page without script; the template escapes whatever it is given."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    table = [
        (metric, [_show(metric, column.get(metric)) for column in comparison.columns.values()])
        for metric in comparison.metrics
    ]
    return environment.from_string(PAGE.read_text(encoding="utf-8")).render(
        folder=str(comparison.folder),
        data=comparison.data.name,
        titles=[TITLES[name] for name in comparison.columns],
        table=table,
        judged=comparison.scores.answers,
        text_metrics=[name for name in comparison.metrics if name in TEXT_METRICS],
    )


def output_folder(folder: Path, data: str | None) -> Path:
    """``eval/NAME`` in a run's folder, by the data's name; beside other folders nothing is written unasked."""
    name = "validation" if data is None else re.sub(r"[^A-Za-z0-9._-]+", "-", Path(data).stem) or "data"
    return folder / "eval" / name
