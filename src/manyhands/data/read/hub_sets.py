"""Data sets of the hub, and folders that ``save_to_disk`` wrote, as Arrow files.

The library ``datasets`` is imported only to fetch a set: it leaves Arrow files in its own cache, and those are read
like any others, in several processes and without the library.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from manyhands.config.schema import Source
from manyhands.config.sources import SplitSlice
from manyhands.core.errors import UserError

PREFIX = "hub:"
MIN_MAJOR = 4  # before, a data set could bring code that was run
STREAMED_ROWS = 1000  # in one record batch
ANSWER_TIMEOUT_S = 5.0


def is_hub(path: str) -> bool:
    return path.startswith(PREFIX)


def fetch_set(source: Source, rows: SplitSlice) -> tuple[Path, ...]:
    """Arrow files of one split of a hub data set that hold at least ``rows``, fetched where the cache does not hold
    them. Of a slice that ends at a row (``train[:1000]``) only the rows up to there are fetched. Raises UserError.
    """
    name, stop = source.path.removeprefix(PREFIX), rows.stop
    num_rows = int(stop) if stop.isdecimal() and not rows.needs_total else None
    return _fetch(name, source.subset, rows.name, source.revision, source.files or (), num_rows)


@lru_cache(maxsize=64)
def _fetch(
    name: str, subset: str | None, split: str, revision: str | None, chosen: tuple[str, ...], num_rows: int | None
) -> tuple[Path, ...]:
    where = PREFIX + name + (f", subset {subset}" if subset else "") + f", split {split}"
    where += f", files {', '.join(chosen)}" if chosen else ""
    fix = f"pip install 'datasets>={MIN_MAJOR}', or download the files and name their folder"
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "data sets of the hub need the package datasets", where=where, why=str(error), fix=fix
        ) from error
    if int((version := datasets.__version__).split(".")[0]) < MIN_MAJOR:
        raise UserError("the package datasets is too old", where=where, why=f"it is version {version}", fix=fix)
    asked = {"split": split, "revision": revision} | ({"data_files": list(chosen)} if chosen else {})
    if num_rows is not None:
        first = _fetch_first(datasets, name, subset, asked, num_rows)
        if first is not None:
            return (first,)
    try:
        found = datasets.load_dataset(name, subset, **asked, keep_in_memory=False)
        files = tuple(Path(entry["filename"]) for entry in found.cache_files)
    except Exception as error:  # the library, the network and the set's own files raise as they like
        why = " ".join(str(error).split())[:400] or type(error).__name__
        raise UserError("the data set cannot be loaded", where=where, why=why, fix=_advise(error, why)) from error
    if not files:
        raise UserError(
            "the data set has no files in the cache", where=where, fix="unset HF_DATASETS_IN_MEMORY_MAX_SIZE"
        )
    return files


def _fetch_first(datasets: Any, name: str, subset: str | None, asked: dict[str, Any], num_rows: int) -> Path | None:
    """An Arrow file with the first rows of a split, read as a stream; None where the set cannot be streamed. It is kept
    in the library's cache; a newer commit of a branch is then not looked for.
    """
    try:
        folder = Path(datasets.config.HF_DATASETS_CACHE) / "manyhands"
        digest = hashlib.sha256(json.dumps([name, subset, asked, num_rows]).encode()).hexdigest()
        path = folder / f"{digest[:32]}.arrow"
        if not path.is_file():
            stream = datasets.load_dataset(name, subset, **asked, streaming=True).take(num_rows)
            folder.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            try:
                with temporary.open("wb") as file:
                    write_tables(stream.with_format("arrow").iter(batch_size=STREAMED_ROWS), file)
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
    except Exception:  # no network, or a set that cannot be read so: it is fetched whole, and says what is wrong
        return None
    return path


def write_tables(tables: Iterator[Any], file: BinaryIO) -> int:
    """Writes tables of one schema, that of the first, as an Arrow stream; returns the number of rows."""
    import pyarrow as pa

    if (first := next(tables, None)) is None:
        return 0
    num_rows = 0
    with pa.ipc.new_stream(file, first.schema) as writer:
        for table in chain((first,), tables):
            writer.write_table(table.cast(first.schema))
            num_rows += table.num_rows
    return num_rows


def _advise(error: Exception, why: str) -> str:
    if "onfig name is missing" in why or "BuilderConfig" in why:
        return "choose one with `subset`"
    if "nknown split" in why:
        return "choose one with `split`"
    if type(error).__name__ == "DatasetNotFoundError":
        return "check the name (hub:OWNER/NAME); a set that is not public needs a token: `hf auth login`"
    return "check the network, or download the files and name their folder"


def fetch_file(name: str, file: str) -> Path:
    """One file of a data set on the hub, from the hub's cache if it cannot be reached. Raises UserError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, file, repo_type="dataset", etag_timeout=ANSWER_TIMEOUT_S))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = " ".join(str(error).split())[:400]
        fix = f"check the name, or run `hf download {name} {file} --repo-type dataset` where the hub can be reached"
        raise UserError("the file cannot be fetched from the hub", where=f"{name}/{file}", why=why, fix=fix) from error


def list_saved_set(folder: Path, split: str) -> tuple[Path, ...] | None:
    """The Arrow files of a folder that ``save_to_disk`` wrote, those of ``split`` if it holds several; None for another
    folder. UserError for a split that the folder does not hold.
    """
    has_splits = (folder / "dataset_dict.json").is_file()
    if has_splits:
        splits = _read_json(folder / "dataset_dict.json").get("splits", [])
        if split not in splits or not isinstance(split, str):
            raise UserError(
                "the saved data set has no such split",
                where=str(folder),
                why=f"its splits: {splits}",
                fix="set `split`",
            )
        folder = folder / split
    state = _read_json(folder / "state.json") if (folder / "state.json").is_file() else None
    if not has_splits and split not in ("train", (state or {}).get("_split")):  # all of its rows would be read
        raise UserError(
            f"the folder has no split {split}",
            where=str(folder),
            why="its files do not say what split they are of, so all of them would be read"
            if state is None
            else "it is one data set that save_to_disk wrote, without splits",
            fix="name the files to read in a list, or remove `split`"
            if state is None
            else "remove `split`, or choose rows by train[...]",
        )
    if state is None:
        return None
    try:
        names = [Path(entry["filename"]).name for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise UserError(
            "the saved data set is damaged", where=str(folder / "state.json"), why=f"no {error}", fix="save it again"
        ) from None
    return tuple(folder / name for name in names)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            "the saved data set is damaged", where=str(path), why=str(error), fix="save it again"
        ) from error
    return value if isinstance(value, dict) else {}
