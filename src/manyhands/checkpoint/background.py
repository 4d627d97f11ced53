"""Saving a checkpoint in the background: staged in host memory, written by another process, committed by rank 0.

The rank's main thread only starts the copies. A background thread makes those of host memory, waits for the others
and the writer process
(``staging.py``) has finished; on rank 0 also until every other rank's list of files exists, and then commits. Ranks
communicate through those files alone, so saving adds no collective to training. The caller gathers ``status``, the
progress of a save. At most one is in flight.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from manyhands.checkpoint.manifest import PARTIAL, FileEntry, Manifest
from manyhands.checkpoint.save import SEEN_LATE_S, commit, explain_unwritten, not_shared, write_state
from manyhands.checkpoint.shards import ShardFile, own_files
from manyhands.checkpoint.staging import NoRoom, Spans, Staging, count_staged_bytes, place
from manyhands.checkpoint.tensors import describe
from manyhands.core.files import read_json, write_json
from manyhands.core.progress import advance, muted

POLL_S = 0.05


class Status(IntEnum):
    """How far a rank is with the save under way."""

    NONE = 0
    WRITING = 1
    WRITTEN = 2  # this rank's files are on the disk
    COMMITTED = 3  # of rank 0: the checkpoint exists, and what follows a commit is done
    FAILED = 4


class BackgroundSave:
    """One checkpoint on its way to the disk."""

    def __init__(self, folder: Path, run: Callable[[BackgroundSave], None]) -> None:
        self.folder, self._run = folder, run
        self.status = Status.WRITING
        self.written_bytes = 0
        self.error: BaseException | None = None
        self.all_written_at: float | None = None  # when every rank was known to have written
        self.begun, self.seconds = time.monotonic(), 0.0
        self._ended = threading.Event()
        self._is_abandoned = threading.Event()
        threading.Thread(target=self._work, name="checkpoint", daemon=True).start()

    def _work(self) -> None:
        try:
            with muted():
                self._run(self)
        except BaseException as error:
            self.error, self.status = error, Status.FAILED
        finally:
            self.seconds = time.monotonic() - self.begun
            self._ended.set()

    def add_written(self, num_bytes: int) -> None:
        self.written_bytes += num_bytes

    def know_all_written(self) -> None:
        """Every rank has written its files: rank 0 finds them from now on, or never."""
        self.all_written_at = self.all_written_at or time.monotonic()

    def wait_written(self) -> None:
        """Returns once this rank's files are on the disk; raises what prevented it."""
        self._wait(lambda: self.status >= Status.WRITTEN)

    def wait_ended(self, limit_s: float = math.inf) -> None:
        """Waits until all is written, on rank 0 also committed, or for ``limit_s``; raises what prevented it."""
        end = time.monotonic() + limit_s
        self._wait(lambda: self._ended.is_set() or time.monotonic() > end)

    def abandon(self) -> None:
        """The save will not be completed: some rank cannot write."""
        self._is_abandoned.set()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        seen = self.written_bytes
        while not is_done() and not self._ended.wait(POLL_S):
            if self.written_bytes != seen:
                seen = self.written_bytes
                advance()
        if self.error is not None:
            raise self.error

    def await_file(self, path: Path) -> dict[str, Any]:
        """The JSON of a file that another rank writes."""
        while (value := read_json(path)) is None:
            at = self.all_written_at
            if self._is_abandoned.wait(POLL_S) or (at is not None and time.monotonic() > at + SEEN_LATE_S):
                raise not_shared(path.parent, path.name)
        return value


class BackgroundSaver:
    """What a rank needs to save beside the training; memory and process are kept from save to save."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self._rank, self._world_size, self._device = rank, world_size, device
        self._staging: Staging | None = None
        self._room: threading.Thread | None = None
        self._no_room: NoRoom | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def has_asked(self) -> bool:
        """Whether room was ever asked for."""
        return self._room is not None or self._no_room is not None

    def make_room(self, tensors: dict[str, torch.Tensor]) -> None:
        """Begins to reserve what ``tensors`` need, beside the training. For the main thread."""
        num_bytes = count_staged_bytes(own_files(tensors, self._rank))
        if self._staging is not None and self._staging.num_bytes >= num_bytes:
            return
        self.close()
        try:
            self._staging = Staging(num_bytes, self._device)
        except NoRoom as error:
            self._no_room = error
            return
        self._room = threading.Thread(target=self._fill, args=(self._staging,), name="checkpoint-room", daemon=True)
        self._room.start()

    def _fill(self, staging: Staging) -> None:
        try:
            staging.make_room()
        except NoRoom as error:
            self._no_room = error
        except Exception as error:  # whatever it is, checkpoints can be written while training waits
            self._no_room = NoRoom(str(error) or type(error).__name__)

    def reserve(self, tensors: dict[str, torch.Tensor]) -> str:
        """Returns once there is room for ``tensors``, or why there is none. For the main thread."""
        self.make_room(tensors)
        self._await_room()
        return str(self._no_room or "")

    def _await_room(self) -> None:
        if self._room is not None and self._staging is not None:
            self._staging.hurry.set()
            self._room.join()

    def save(
        self,
        folder: Path,
        tensors: dict[str, torch.Tensor],
        state: dict[str, Any],
        *,
        manifest_extra: dict[str, Any],
        after_commit: Callable[[Callable[[int], object]], object] = lambda moved: None,
    ) -> tuple[BackgroundSave, Callable[[], None]]:
        """Begins to save ``tensors`` as ``folder``. ``after_commit`` is called on rank 0, in a thread,
        with what it calls with the bytes that it has moved.

        Returns the save, and what must be called before ``tensors`` are next written to: it makes the device wait until
        those on it are copied, and the host until those in its own memory are, which the save's thread copies.
        ``reserve`` comes first.
        """
        assert self._staging is not None and self._no_room is None, "reserve comes first"
        files = own_files(tensors, self._rank)
        spans, copied, host_copied = place(files), None, threading.Event()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._staging.copy(files, spans, on_host=False)
                copied = torch.cuda.Event()
                copied.record()
        run = functools.partial(
            self._write,
            staging=self._staging,
            files=files,
            spans=spans,
            copied=copied,
            host_copied=host_copied,
            state=state,
            manifest=Manifest(world_size=self._world_size, files={}, tensors=describe(tensors), extra=manifest_extra),
            after_commit=after_commit,
        )
        return BackgroundSave(folder, run), functools.partial(_await_copies, self._device, copied, host_copied)

    def _write(
        self,
        save: BackgroundSave,
        *,
        staging: Staging,
        files: list[ShardFile],
        spans: Spans,
        copied: torch.cuda.Event | None,
        host_copied: threading.Event,
        state: dict[str, Any],
        manifest: Manifest,
        after_commit: Callable[[Callable[[int], object]], object],
    ) -> None:
        partial = save.folder.with_name(save.folder.name + PARTIAL)
        try:
            staging.copy(files, spans, on_host=True)  # states that are kept there, or all of a CPU
        finally:
            host_copied.set()
        try:
            partial.mkdir(parents=True, exist_ok=True)
            if copied is not None:
                torch.cuda.set_device(self._device)  # of this thread, which begins with the first device
                copied.synchronize()
            found = staging.write(partial, files, spans, save.add_written)
            own = {name: FileEntry.model_validate(entry) for name, entry in found.items()}
            own |= write_state(partial, state, self._rank)
            if self._rank:
                entries = {name: entry.model_dump() for name, entry in own.items()}
                write_json(_list_of(partial, self._rank), entries)
        except OSError as error:
            raise explain_unwritten(error, partial, self._rank) from error
        save.status = Status.WRITTEN
        if self._rank:
            return
        lists = [_list_of(partial, rank) for rank in range(1, self._world_size)]
        for path in lists:
            own |= {name: FileEntry.model_validate(entry) for name, entry in save.await_file(path).items()}
        try:
            for path in lists:
                path.unlink()
            commit(partial, save.folder, manifest.model_copy(update={"files": own}))
        except OSError as error:
            raise explain_unwritten(error, partial, self._rank) from error
        after_commit(save.add_written)  # part of the save: the next one, or a rollback, waits for its end
        save.seconds = time.monotonic() - save.begun
        save.status = Status.COMMITTED

    def close(self) -> None:
        """Frees memory and process; a save under way ends with them."""
        self._await_room()
        self._room = None
        if self._staging is not None:
            self._staging.close()
            self._staging = None


def _list_of(partial: Path, rank: int) -> Path:
    """Where a rank says which files it has written."""
    return partial / f"files-{rank + 1:05d}.json"


def _await_copies(device: torch.device, copied: torch.cuda.Event | None, host_copied: threading.Event) -> None:
    if copied is not None:
        torch.cuda.current_stream(device).wait_event(copied)
    host_copied.wait()
