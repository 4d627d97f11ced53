"""Tokenizes the parts of a run's sources, here or in as many processes as there are cores and memory for.

One fresh process loads the tokenizer and forks a pool, whose workers share its memory; files in the folder of the
preparation pass between them and this one: ``job.json`` in, segments and outcomes out, ``error.json`` and a log where
it fails. A large part (``files.FilePart.large``) is read by the process that loaded the tokenizer, which hands its rows
out in batches, so that all cores work, and waits while enough of them wait. Each process ends when the one above it
does, however that ended. Knows no cache.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from pydantic import TypeAdapter

from manyhands.config.schema import DataSection, ModelSection
from manyhands.config.tasks import TASKS
from manyhands.core.errors import EXIT_FAILED, UserError, explain_foreign
from manyhands.core.files import write_atomically
from manyhands.core.machine import count_cores, memory_bytes
from manyhands.data.chat.template import complete_arguments, probe_in_subprocess
from manyhands.data.images.open import ImageOpener
from manyhands.data.read.files import FilePart, Row, unpacked_bytes
from manyhands.data.read.formats import DETECT_ROWS, choose_format, trains_images
from manyhands.data.read.sources import ResolvedSource, read_rows, split_source
from manyhands.data.store.streams import TOKENS
from manyhands.data.tokenize.part import PartTokenizer, count_characters
from manyhands.data.tokenize.summary import Outcome
from manyhands.data.tokenize.tokenizer import note_plain_markers, open_tokenizer, widen_cache

MIN_PARALLEL_BYTES = 32 << 20  # less is done here before other processes would have started
IMAGE_ROWS_FACTOR = 64  # bytes of text that take as long as one byte of rows that name images
PART_BYTES = 8 << 20  # many more parts than processes, so that all end at the same time
LOADED_BYTES = 512 << 20  # the process that loads the tokenizer, which imports torch
WORKER_BYTES = 64 << 20  # what a forked process adds
MAX_BYTES = 2 << 30  # of all together
CHUNK_CHARACTERS_HERE = 4_000_000  # enough for all threads of the tokenizer
CHUNK_CHARACTERS_FORKED = 500_000  # one thread
BATCH_CHARACTERS = 1 << 20  # a quarter of a second's work: much to a process, little to memory
MAX_HANDED_CHARACTERS = 4 << 20  # a batch is larger where one row is: it stays with who read it
REPORT_EVERY_S = 10.0
GRACE_S = 10.0

Report = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What to tokenize: ``parts`` are (position of the source, part) in row order. Output goes into ``folder``."""

    folder: Path
    task: str
    data: DataSection
    model: ModelSection
    model_folder: Path
    sources: tuple[ResolvedSource, ...]
    parts: tuple[tuple[int, FilePart], ...]
    num_processes: int
    batch_characters: int
    images: bool  # rows are read with their images

    def write(self) -> None:
        (self.folder / "job.json").write_bytes(TypeAdapter(Job).dump_json(self))

    @staticmethod
    def read(folder: Path) -> Job:
        return TypeAdapter(Job).validate_json((folder / "job.json").read_bytes())

    def segments(self, number: int) -> list[Path]:
        """All that there are of a part, in the order of its rows."""
        return sorted((self.folder / "segments").glob(f"{number:06d}*"))

    def outcome(self, name: str) -> Path:
        return self.folder / f"outcome-{name}.json"


def plan_job(
    task: str,
    data: DataSection,
    model: ModelSection,
    model_folder: Path,
    sources: Sequence[ResolvedSource],
    folder: Path,
    num_processes: int | None,
) -> Job:
    """Divides sources into parts, and chooses the number of processes where it is None."""
    images = trains_images(data.images, model_folder, sources)
    # Each image is decoded once, which takes longer than the text of its row.
    factor = IMAGE_ROWS_FACTOR if images else 1
    num_bytes = [factor * sum(map(unpacked_bytes, source.files)) for source in sources]
    wanted = choose_num_processes(sum(num_bytes)) if num_processes is None else num_processes
    parts = [
        (index, part)
        for index, (source, size) in enumerate(zip(sources, num_bytes, strict=True))
        for part in split_source(source, max(1, round(size / PART_BYTES)) if wanted > 1 else 1)
    ]
    useful = wanted if any(part.large for _, part in parts) else len(parts)
    num_processes = max(1, min(wanted, useful))
    return Job(
        folder, task, data, model, model_folder, tuple(sources), tuple(parts), num_processes, BATCH_CHARACTERS, images
    )


def choose_num_processes(num_bytes: int) -> int:
    """One for little data; else as many as there are cores, and memory for (at most 2 GiB together)."""
    if num_bytes < MIN_PARALLEL_BYTES:
        return 1
    _, free = memory_bytes()
    room = min(free // 2, MAX_BYTES) - LOADED_BYTES
    return max(1, min(count_cores(), room // WORKER_BYTES))


def tokenize_parts(job: Job, report: Report) -> list[Outcome]:
    """Writes the segment of every part; returns what became of each. Raises UserError."""
    if job.num_processes == 1:
        part_tokenizer, progress = _open(job, CHUNK_CHARACTERS_HERE), _Progress(job, report)
        for number in range(len(job.parts)):
            _tokenize(job, part_tokenizer, number, progress.show)
    else:
        _run_processes(job, report)
    outcomes = [Outcome() for _ in job.parts]
    for number, total in enumerate(outcomes):
        for path in sorted(job.folder.glob(f"outcome-{number:06d}*.json")):
            total.add(Outcome.read(path))
    return outcomes


class _Progress:
    """Says every 10 seconds how far all processes together are."""

    def __init__(self, job: Job, report: Report) -> None:
        self._job, self._report, self._last = job, report, time.monotonic()

    def show(self) -> None:
        if time.monotonic() - self._last < REPORT_EVERY_S:
            return
        self._last = time.monotonic()
        files = self._job.folder.glob(f"segments/*/{TOKENS.name}.bin")
        num_tokens = sum(path.stat().st_size for path in files) // TOKENS.item_bytes
        self._report(f"tokenized {num_tokens / 1e6:.1f} M tokens so far")


def _open(job: Job, chunk_characters: int) -> PartTokenizer:
    data, tokenizer = job.data, open_tokenizer(job.model_folder, job.model)
    if getattr(tokenizer, "is_fast", False):
        widen_cache(tokenizer)
    if TASKS[job.task].takes_chats and tokenizer.chat_template:
        arguments = complete_arguments(data.chat_template_kwargs, data.date)
        probe_in_subprocess(partial(tokenizer.apply_chat_template, tokenize=False, **arguments))
    images = ImageOpener(data, job.model_folder, tokenizer, job.folder / "fetched") if job.images else None
    formats = [
        choose_format(
            list(islice(read_rows(source), DETECT_ROWS)), source, job.task, bool(tokenizer.chat_template), job.images
        )
        for source in job.sources
    ]
    notes = note_plain_markers(tokenizer) if TASKS[job.task].takes_chats else []
    if "prompt" in formats and not tokenizer.chat_template:
        # A chat model whose template got lost would train on rows that no chat ever shows it.
        note = "no chat template: prompt and completion are concatenated unchanged (model.chat_template sets one)"
        notes = [note, *notes]
    return PartTokenizer(data, job.task, tokenizer, job.sources, formats, chunk_characters, images, notes)


@dataclass(frozen=True)
class RowBatch:
    """Neighboring rows of a large part; ``part`` and ``number``, of the batch in it, count from 0."""

    part: int
    number: int
    rows: list[Row]
    num_characters: float


def cut_batches(part: int, rows: Iterable[Row], batch_characters: int) -> Iterator[RowBatch]:
    """All rows in order, in batches of at most so many characters or one row.

    A row whose text comes in pieces is a batch of its own, to be used up before the next is asked for.
    """
    batch: list[Row] = []
    number, characters = 0, 0.0
    for row in rows:
        size = count_characters(row.fields)
        if batch and characters + size > batch_characters:
            yield RowBatch(part, number, batch, characters)
            batch, number, characters = [], number + 1, 0.0
        batch.append(row)
        characters += size
        if characters >= batch_characters:
            yield RowBatch(part, number, batch, characters)
            batch, number, characters = [], number + 1, 0.0
    if batch:
        yield RowBatch(part, number, batch, characters)


def _tokenize(
    job: Job, part_tokenizer: PartTokenizer, item: int | RowBatch, on_chunk: Callable[[], None] = lambda: None
) -> None:
    """Writes the segment and the outcome of the part of this number, or of one batch of a large part."""
    number, name = (item, f"{item:06d}") if isinstance(item, int) else (item.part, f"{item.part:06d}-{item.number:06d}")
    (source, part), segment = job.parts[number], job.folder / "segments" / name
    if isinstance(item, int):
        outcome = part_tokenizer.run(part, source, segment, on_chunk)
    else:
        outcome = part_tokenizer.run_rows(item.rows, source, segment)
    outcome.write(job.outcome(name))


def _run_processes(job: Job, report: Report) -> None:
    job.write()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TOKENIZERS_PARALLELISM": "false",  # each process takes one core
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    progress = _Progress(job, report)
    log = job.folder / "log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "manyhands.data.tokenize.parallel", str(job.folder)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment)
    assert process.stdin is not None
    try:
        while process.poll() is None:
            try:
                process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                progress.show()
    finally:
        process.stdin.close()  # it ends when nobody holds the other end of this pipe
        try:
            process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.returncode:
        raise _explain(job, process.returncode)


def _explain(job: Job, code: int) -> Exception:
    if (error := job.folder / "error.json").exists():
        return UserError.from_json(error.read_text(encoding="utf-8"))
    if code < 0:
        return _killed(-code)
    return RuntimeError(
        "tokenizing failed:\n" + (job.folder / "log").read_text(encoding="utf-8", errors="replace")[-10_000:]
    )


def cannot_write(folder: Path, error: OSError) -> UserError:
    """No space, no permission, or a disk that went away."""
    return UserError(
        "the token cache cannot be written", where=str(folder), why=str(error), fix="free space, or move data.cache"
    )


def _killed(number: int) -> UserError:
    why = f"it got signal {number} ({signal.Signals(number).name})"
    return UserError(
        "a process that tokenizes the data was killed",
        why=why + (", as the system does with processes when memory runs out" if number == signal.SIGKILL else ""),
        fix="start again when more memory is free",
        exit_code=EXIT_FAILED,
    )


def main() -> None:
    """The process that loads the tokenizer and forks the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process above, which then closes the pipe
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    job = Job.read(Path(sys.argv[1]))
    try:
        part_tokenizer = _open(job, CHUNK_CHARACTERS_FORKED)
        with _as_user_errors(job.folder):
            _run_pool(job, part_tokenizer)
        return
    except UserError as error:
        write_atomically(job.folder / "error.json", error.to_json())
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(EXIT_FAILED)  # waits for no worker: they end with this process


def _end_with_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(EXIT_FAILED)  # the pipe is closed: nobody waits for the tokens


def _run_pool(job: Job, part_tokenizer: PartTokenizer) -> None:
    """Tokenizes all parts. Raises UserError, also where a worker was killed."""
    gc.collect()
    gc.freeze()  # a collection would write into every object, and so copy the memory that is shared
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(job.num_processes, fork, _begin, (job, part_tokenizer))
    pending: set[Future[None]] = set()
    workers: list[multiprocessing.process.BaseProcess] = []

    def finish(most: int) -> None:
        nonlocal pending
        while len(pending) > most:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()

    def submit(item: int | RowBatch) -> None:
        finish(job.num_processes + 1)  # two wait: one batch is read in a fraction of the time that it takes
        pending.add(pool.submit(_work, item))
        workers[:] = workers or multiprocessing.active_children()

    try:
        for number, (source, part) in enumerate(job.parts):
            if not part.large:
                submit(number)
                continue
            outcome = Outcome()
            rows = part_tokenizer.read(part, source, outcome.unreadable)
            for batch in cut_batches(number, rows, job.batch_characters):
                if batch.num_characters > MAX_HANDED_CHARACTERS:
                    _tokenize(job, part_tokenizer, batch)
                else:
                    submit(batch)
            outcome.write(job.outcome(f"{number:06d}"))
        finish(0)
    except BrokenProcessPool:
        end = time.monotonic() + GRACE_S  # the pool ends the other workers by SIGTERM; its shutdown may hang (gh-94777)
        while any(worker.exitcode is None for worker in workers) and time.monotonic() < end:
            time.sleep(0.01)
        codes = [worker.exitcode or 0 for worker in workers]
        signals = sorted((-code for code in codes if code < 0), key=lambda number: number == signal.SIGTERM)
        if not signals:
            raise
        raise _killed(signals[0]) from None
    pool.shutdown()


_worker: tuple[Job, PartTokenizer]


def _begin(job: Job, part_tokenizer: PartTokenizer) -> None:
    """In a forked process, before its first part."""
    global _worker
    _worker = (job, part_tokenizer)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _work(item: int | RowBatch) -> None:
    with _as_user_errors(_worker[0].folder):
        _tokenize(*_worker, item)


@contextmanager
def _as_user_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_write(folder, error) from None
    except BaseException as error:
        if (foreign := explain_foreign(error)) is None:
            raise
        raise foreign from None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
