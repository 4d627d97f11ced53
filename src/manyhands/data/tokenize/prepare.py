"""Tokenizes the data of a run once and caches the result by content. Knows the files and the cache, not how rows look.

The cache folder's name is a hash of all that decides about the samples and how often each is taken; it appears by one
rename of a finished folder, so whatever has the name is whole. Two preparations at once both work; the second finds the
first's and throws its own away. Where only the choice of samples differs from a store that is there, its tokens are
linked, not made again.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.config.schema import DataSection, RunConfig
from manyhands.config.sources import list_sources
from manyhands.config.tasks import JUDGED, TASKS, name_tasks
from manyhands.config.text import nearest_name
from manyhands.core.errors import UserError
from manyhands.core.files import make_folder
from manyhands.core.units import count_of, describe_counts
from manyhands.data.images.files import find_changed
from manyhands.data.read.sources import ResolvedSource, read_rows, resolve_sources
from manyhands.data.store.segment import finish_store, join_segments
from manyhands.data.store.store import TokenStore, find_file
from manyhands.data.store.streams import EVERY, LABELS, PACKED_BY, TOKENS
from manyhands.data.tokenize.cache import (
    UNFINISHED,
    clean_unfinished,
    link_other,
    name_store,
    name_tokens,
    open_cached,
    publish,
    remove,
)
from manyhands.data.tokenize.divide import Division, divide_samples, find_repeated
from manyhands.data.tokenize.parallel import Job, cannot_write, plan_job, tokenize_parts
from manyhands.data.tokenize.summary import Outcome, PreparedData, count_left_out, summarize
from manyhands.data.tokenize.tokenizer import open_tokenizer

MAX_BAD_IMAGES = 5  # of each source that are named where they are left out
MAX_PAIRS = 5  # of repeated samples that are named
OFFSETS = f"{PACKED_BY}_offsets"

Report = Callable[[str], None]


def prepare(
    config: RunConfig, model_folder: str | Path, report: Report = print, *, num_processes: int | None = None
) -> PreparedData:
    """Tokens of all rows of ``config.data``, from the cache or made now, and what they add up to.

    ``report`` gets one line of progress at a time. ``num_processes`` tokenize; None takes one for little data, else all
    cores. The tokens do not depend on it. Raises UserError for data that cannot be used.
    """
    data, model_folder = config.data, Path(model_folder)
    for rules in () if TASKS[config.task].takes_text else list_sources(config):
        if rules.too_long == "split":
            raise UserError(
                f"{rules.too_long_key}: split needs task: {name_tasks(lambda task: task.takes_text)}",
                why="a part of a conversation is not a conversation",
                fix="use truncate",
            )
    if data.max_length < 2:
        raise UserError("data.max_length must be at least 2", why="one token has nothing to be predicted from")
    sources = resolve_sources(data, config.evaluate.data)
    stamps = {path: _stamp(path) for source in sources for path in source.files}  # before anything is read
    tokens = name_tokens(sources, config.task, data, config.model, model_folder)
    folder = Path(data.cache).expanduser() / name_store(tokens, sources, data, config.seed)
    store = open_cached(folder, report)
    if store is not None and (changed := find_changed(folder)) is not None:
        report(f"{changed} has changed since the data was prepared: made again")
        remove(folder)
        store = None
    if store is None:
        unfinished = _make_unfinished(folder)
        try:
            made = link_other(tokens, unfinished, report)
            if made is None:
                job = plan_job(config.task, data, config.model, model_folder, sources, unfinished, num_processes)
                made = _tokenize(job, report)
                if rewritten := next((path for path, stamp in stamps.items() if _stamp(path) != stamp), None):
                    raise UserError(
                        "a data file changed while it was read",
                        where=str(rewritten),
                        fix="start again when it is complete",
                    )
            named = {"digest": folder.name, "tokens": tokens, "made": made, "seed": config.seed, "task": config.task}
            finish(sources, data, unfinished, named)
            published = publish(unfinished, folder)
        except OSError as error:
            raise cannot_write(unfinished, error) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        store = TokenStore.open(folder, check_tokens=not published)
    else:
        report(
            f"tokens cached: {count_of(store.train.num_samples, 'sample')}, "
            f"{_millions(int(store.train.lengths.sum(dtype=np.int64)))} tokens"
        )
    for line in store.meta["notes"]:
        report(line)
    return summarize(store, config.seed, config.batch, data.max_length, config.stop)


def _make_unfinished(folder: Path) -> Path:
    """A folder beside ``folder``, which it becomes once it is finished."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        clean_unfinished(folder.parent)
        return make_folder(folder.parent, f"{UNFINISHED}{folder.name[:16]}-")
    except OSError as error:
        raise UserError(
            "the token cache cannot be written", where="data.cache", why=str(error), fix="name another folder"
        ) from error


def _tokenize(job: Job, report: Report) -> list[dict[str, Any]]:
    """Writes the tokens of all sources; returns for each what became of its rows."""
    start = time.monotonic()
    outcomes = [Outcome() for _ in job.sources]
    # what leads from a sample back to its file
    samples_of_files = [dict.fromkeys(map(str, source.files), 0) for source in job.sources]
    for (index, part), outcome in zip(job.parts, tokenize_parts(job, report), strict=True):
        outcomes[index].add(outcome)
        samples_of_files[index][part.file] += outcome.num_samples
    for source, outcome in zip(job.sources, outcomes, strict=True):
        if faults := outcome.explain_faults(source, job.task, job.data):
            raise faults[0]
        outcome.notes += [f"left out: {place}" for place in outcome.bad_images.shown[:MAX_BAD_IMAGES]]
    _refuse_unknown_columns(job, outcomes)
    segments = [(path, index) for number, (index, _) in enumerate(job.parts) for path in job.segments(number)]
    join_segments(job.folder, [path for path, _ in segments], [index for _, index in segments], EVERY)
    for path in (job.folder / "segments", *job.folder.glob("outcome-*"), job.folder / "job.json", job.folder / "log"):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    num_samples, num_tokens = (
        sum(getattr(outcome, name) for outcome in outcomes) for name in ("num_samples", "num_tokens")
    )
    with_how_many = f" by {job.num_processes} processes" if job.num_processes > 1 else ""
    report(
        f"tokenized {count_of(num_samples, 'sample')}, {_millions(num_tokens)} tokens in "
        f"{time.monotonic() - start:.1f} s{with_how_many}"
    )
    return [
        outcome.to_meta() | {"samples_of_files": list(files.values())}
        for outcome, files in zip(outcomes, samples_of_files, strict=True)
    ]


def _refuse_unknown_columns(job: Job, outcomes: Sequence[Outcome]) -> None:
    """UserError for a column of ``data.ignore`` that no row of any source has. Sources that read a slice of their rows
    may lack it, and so may those that list columns of their own, as importers do for what a row may have.
    """
    left_out = {name for outcome in outcomes for name in outcome.left_out}
    for name in job.data.ignore:
        sources = [source for source in job.sources if name in source.ignore]
        if name in left_out or not sources or not all(rows.is_whole for one in sources for rows, _ in one.slices):
            continue
        found = dict.fromkeys(column for source in sources for column in next(read_rows(source)).fields)
        near = nearest_name(name, found)
        raise UserError(
            f"no row has the column {name}, which data.ignore is to leave out",
            where="data.ignore",
            why=f"columns of the first rows: {', '.join(list(found)[:20])}",
            fix=f"did you mean {near}?" if near else "correct the name, or remove it",
        )


def finish(sources: Sequence[ResolvedSource], data: DataSection, folder: Path, meta: dict[str, Any]) -> None:
    """Chooses the samples of each set and writes down how the store came about; ``meta`` has the ``seed``, the ``task``
    and, for each source, what was ``made`` of it.

    Raises UserError where every validation sample is a training sample too."""
    tables = {
        name: np.load(folder / f"{name}.npy", allow_pickle=False)
        for name in ("sources", "continued", OFFSETS, "hashes", "lines")
    }
    of_samples, offsets = tables["sources"], tables[OFFSETS]
    division = divide_samples(data, meta["seed"], of_samples, tables["continued"], sources, tables["hashes"])
    num_repeated, repeated = _check_repeated(sources, data, meta["made"], tables, division)
    described = [
        _describe(
            source,
            made,
            division.train[of_samples[division.train] == index],
            division.validation[of_samples[division.validation] == index],
            offsets,
        )
        | {"num_duplicates": int((of_samples[division.duplicates] == index).sum())}
        | ({"set": source.name} if source.use == "set" else {})
        for index, (source, made) in enumerate(zip(sources, meta["made"], strict=True))
    ]
    totals = {name: sum(made.get(name, 0) for made in meta["made"]) for name in Outcome.COUNTS}
    notes = dict.fromkeys(note for made in meta["made"] for note in made["notes"])
    num_train = sum(source.use == "train" for source in sources)
    finish_store(
        folder,
        division.train,
        division.validation,
        {
            **meta,
            "order": data.order,
            "sources": described,
            **totals,
            "largest_id": max(made["largest_id"] for made in meta["made"]),
            "num_dropped": len(of_samples) - sum(map(len, (division.train, division.validation, division.duplicates))),
            "num_repeated": num_repeated,
            "notes": [*division.notes, *repeated, *notes, *_list_notes(data.max_length, described, totals, num_train)],
        },
        EVERY,
    )


def _check_repeated(
    sources: Sequence[ResolvedSource],
    data: DataSection,
    made: Sequence[Mapping[str, Any]],
    tables: Mapping[str, np.ndarray],
    division: Division,
) -> tuple[int, list[str]]:
    """(validation samples that repeat a training sample, a note that names some). UserError where all of them do."""
    repeated, twins = find_repeated(tables["hashes"], division)
    if not len(repeated):
        return 0, []

    pairs = [
        " is ".join(_place_of(sources, made, tables, int(sample)) for sample in pair)
        for pair in zip(repeated[:MAX_PAIRS], twins[:MAX_PAIRS], strict=True)
    ]
    more = f" and {len(repeated) - len(pairs):,} more" if len(repeated) > len(pairs) else ""
    if len(repeated) < len(division.validation):
        count = f"{len(repeated):,} of {len(division.validation):,} validation samples"
        return len(repeated), [f"{count} are trained too (the same tokens): {', '.join(pairs)}{more}"]
    where, fix = "data.validation", "name other samples, or leave it out: then some of data.train are held out"
    if {sources[source].use for source in tables["sources"][division.validation]} == {"set"}:
        where, fix = "evaluate.data", "name other samples"
    elif data.validation is None:
        where = "data.train"
        fix = "remove repeated samples, name others in data.validation, or set data.validation_fraction: 0"
    raise UserError(
        "every validation sample is a training sample too",
        where=where,
        why="the tokens are the same, so a validation loss would say nothing about samples that were not trained",
        fix=fix,
        details=[*pairs, *([more.strip()] if more else [])],
    )


def _place_of(
    sources: Sequence[ResolvedSource], made: Sequence[Mapping[str, Any]], tables: Mapping[str, np.ndarray], sample: int
) -> str:
    """``file:line`` of a sample of the store."""
    file = sources[int(tables["sources"][sample])].files[find_file(made, tables["sources"], sample)]
    return f"{file.name}:{tables['lines'][sample]}"


def refuse_outside_ids(config: RunConfig, model_folder: str | Path, data: PreparedData, num_rows: int) -> None:
    """UserError for tokens without a row in an embedding of ``num_rows``; names up to 5, each with a row of data."""
    if data.largest_id < num_rows:
        return
    folder, sources = Path(data.folder), resolve_sources(config.data, config.evaluate.data)
    made = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["made"]
    tables = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("sources", "lines", OFFSETS)}
    ids = np.fromfile(folder / f"{PACKED_BY}.bin", dtype=TOKENS.item_dtype)
    places = np.flatnonzero((ids >= num_rows) & (ids <= data.largest_id))  # placeholders of images may be larger
    outside, first = np.unique(ids[places], return_index=True)
    tokens = open_tokenizer(Path(model_folder), config.model).convert_ids_to_tokens(outside.tolist())
    samples = np.searchsorted(tables[OFFSETS], places[first], side="right") - 1
    details = [
        f"{_place_of(sources, made, tables, int(sample))}: the token {token!r} has the id {number:,}"
        for token, number, sample in zip(tokens, outside, samples, strict=True)
    ]
    more = [f"and {len(details) - MAX_PAIRS:,} more tokens"] if len(details) > MAX_PAIRS else []
    raise UserError(
        f"the data has tokens beyond the model's embedding, which has {num_rows:,} rows",
        where=str(model_folder),
        why=f"the largest id is {data.largest_id:,}: the tokenizer has tokens that the model was never given, or is "
        "another model's",
        fix="use the model's own tokenizer, or name the tokens that are to get rows of their own in model.new_tokens",
        details=[*details[:MAX_PAIRS], *more],
    )


def refuse_equal_labels(config: RunConfig, data: PreparedData) -> None:
    """UserError where answers are judged, and all that are trained are judged alike."""
    if set(JUDGED).isdisjoint(TASKS[config.task].formats):
        return
    folder = Path(data.folder)
    labels = np.fromfile(folder / f"{LABELS.name}.bin", dtype=LABELS.item_dtype)[np.load(folder / "train.npy")]
    if labels.min() == labels.max():
        kind, other = ("good", "false") if labels[0] else ("bad", "true")
        raise UserError(
            f"all {len(labels):,} answers to train on are labelled {kind}",
            where="data.train",
            why=f"task: {config.task} learns how good answers differ from bad ones; by one kind its loss means nothing",
            fix=f"add rows whose label is {other}"
            + " (or train the good answers alone: task: sft, data.ignore: [label])" * bool(labels[0]),
        )


def _describe(
    source: ResolvedSource, made: Mapping[str, Any], train: np.ndarray, validation: np.ndarray, offsets: np.ndarray
) -> dict[str, Any]:
    """A source as ``meta["sources"]`` has it: what was asked, and how many samples and tokens of it each set has.

    ``train`` and ``validation`` are the positions of its own samples.
    """
    described = {
        "name": source.name,
        "path": source.path,
        "format": " + ".join(made["formats"]),
        "weight": source.weight,
    }
    described |= {name: made[name] for name in ("unread", "left_out", "num_too_long", "num_too_short")}
    described |= {"num_bad_images": made["num_bad_images"]} if made.get("num_bad_images") else {}
    for kind, samples in (("", train), ("validation_", validation)):
        described[f"num_{kind}samples"] = len(samples)
        described[f"num_{kind}tokens"] = int((offsets[samples + 1] - offsets[samples]).sum())
    return described


def _list_notes(
    max_length: int, sources: Sequence[Mapping[str, Any]], totals: Mapping[str, int], num_train: int
) -> Iterator[str]:
    """Notes for the user: unread columns, what was cut or left out by which key, and ``num_train`` sources."""
    for source in sources:
        for what, names in (("not read", source["unread"]), ("left out by data.ignore", source["left_out"])):
            if names:
                yield f"columns of {source['name']} that are {what}: {', '.join(names)}"
    said = {
        "num_truncated": ("sample", f"cut at {max_length:,} tokens"),
        "num_split": ("document", f"split into samples of at most {max_length:,} tokens"),
        "num_straddling_tokens": (
            "token",
            "in which a prompt and a trained part meet (answers that begin, or prompts that end, with blanks)",
        ),
        "num_rows_with_placeholders": (
            "row",
            "with <image>, <video> or <audio>, which is text like any other to this model",
        ),
        "num_rows_with_markers": (
            "row",
            "with the spelling of a special token, which the tokenizer takes for the token itself",
        ),
    }
    yield from (f"{count_of(totals[name], noun)} {text}" for name, (noun, text) in said.items() if totals[name])
    yield from (f"left out by {key}: {describe_counts(counts)}" for key, counts in count_left_out(sources).items())
    for source in sources[:num_train] if num_train > 1 or sources[0]["weight"] != 1 else ():
        samples, tokens = count_of(source["num_samples"], "sample"), _millions(source["num_tokens"])
        weight = f", weight {source['weight']:g}" if source["weight"] != 1 else ""
        yield f"source {source['name']} ({source['format']}): {samples}, {tokens} tokens{weight}"


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 100_000 else f"{count:,}"
