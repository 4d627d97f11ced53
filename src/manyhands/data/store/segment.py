"""Writing a store: segments, each by one process, joined in order. Knows neither the samples' meaning nor processes.

A segment is a folder with the streams and tables of the samples of one part. Joining copies them end to end, and
forgets each once it is copied, so that the disk holds the samples once and one segment twice.
"""

import hashlib
import json
import os
import shutil
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from manyhands.core.files import hash_in_pieces
from manyhands.data.store.store import FORMAT_VERSION, digest_of
from manyhands.data.store.streams import TEXT, Sample, Stream, count_loss_tokens, describe_streams, sum_loss_weights

COPY_BYTES = 8 << 20
ENDS = (".bin", ".npy")  # of the files of a store, beside meta.json
# What array.array calls the entries of a table while it grows, and their dtype on disk.
TABLES: dict[str, tuple[str, Any]] = {
    "num_loss_tokens": ("i", np.int32),
    "loss_weights": ("d", np.float64),
    "lines": ("i", np.int32),
    "continued": ("b", np.bool_),
    "hashes": ("Q", np.uint64),  # of the streams with a length of their own: equal where two samples hold the same
}
CHECKSUMS, LENGTHS = ("I", np.uint32), ("i", np.int32)


def _tables_of(streams: Iterable[Stream]) -> dict[str, tuple[str, Any]]:
    tables = dict(TABLES)
    for stream in streams:
        tables[f"{stream.name}_checksums"] = CHECKSUMS
        if not stream.along:
            tables[f"{stream.name}_lengths"] = LENGTHS
    return tables


class SegmentWriter:
    """Writes samples one by one into a folder; memory holds some 35 bytes a sample, no items."""

    def __init__(self, folder: Path, streams: Sequence[Stream] = TEXT) -> None:
        folder.mkdir(parents=True)
        self.folder, self._streams = folder, {stream.name: stream for stream in streams}
        self._types = _tables_of(streams)
        self._tables: dict[str, array[Any]] = {name: array(code) for name, (code, _) in self._types.items()}
        self._files: dict[str, BinaryIO] = {
            stream.name: _path(folder, stream).open("wb") for stream in streams if not stream.default_from
        }  # the others are opened by the first sample that carries them
        self.num_items = dict.fromkeys(self._streams, 0)

    @property
    def num_samples(self) -> int:
        return len(self._tables["lines"])

    def append(self, sample: Sample, line: int, continued: bool = False) -> None:
        """One sample, which carries every stream but those with a default. ValueError where it does not, carries one
        that is not declared, or a stream that is not as long as the one it lies along."""
        if unknown := sample.keys() - self._streams.keys():
            raise ValueError(f"the sample carries streams that are not declared: {sorted(unknown)}")
        digest = hashlib.blake2b(digest_size=8)
        for name, stream in self._streams.items():
            if name not in sample and not stream.default_from:
                raise ValueError(f"the sample has no stream {name}")
            if name in sample and len(sample[name]) != len(sample[stream.owner]):
                raise ValueError(f"{name} has {len(sample[name])} items, {stream.owner} {len(sample[stream.owner])}")
        for name, stream in self._streams.items():
            if name in sample and name not in self._files:
                # Begins a stream that the samples so far do not carry.
                self._files[stream.default_from].flush()
                self._files[stream.name] = file = _path(self.folder, stream).open("wb")
                default, lengths = self._streams[stream.default_from], self._tables[f"{stream.owner}_lengths"]
                # This sample's own length may stand in the table already.
                sums = write_default(_path(self.folder, default), default, lengths[: self.num_samples], stream, file)
                self._tables[f"{stream.name}_checksums"] = array(CHECKSUMS[0], sums)
                self.num_items[stream.name] = sum(lengths[: self.num_samples])
            checksum = 0
            if name in self._files:
                raw = stream.to_bytes(sample[name if name in sample else stream.default_from])
                self._files[name].write(raw)
                checksum = zlib.crc32(raw)
                self.num_items[name] += len(sample[stream.owner])
                if not stream.along:
                    if stream.identifies:
                        digest.update(raw)
                    self._tables[f"{name}_lengths"].append(len(sample[name]))
            self._tables[f"{name}_checksums"].append(checksum)
        described = (
            count_loss_tokens(sample),
            sum_loss_weights(sample),
            line,
            continued,
            int.from_bytes(digest.digest(), "little"),
        )
        for name, value in zip(TABLES, described, strict=True):
            self._tables[name].append(value)

    def finish(self) -> None:
        """Writes the tables. The segment is complete afterwards, though the disk may not have it yet."""
        self.close()
        for name, (_, dtype) in self._types.items():
            np.save(self.folder / f"{name}.npy", np.array(self._tables[name], dtype=dtype), allow_pickle=False)

    def close(self) -> None:
        """Lets go of the files without finishing."""
        for file in self._files.values():
            file.close()


def _path(folder: Path, stream: Stream) -> Path:
    return folder / f"{stream.name}.bin"


def write_default(path: Path, default: Stream, lengths: Iterable[int], stream: Stream, file: BinaryIO) -> list[int]:
    """Appends to ``file`` the values of ``stream`` for samples of such lengths that do not carry it: those of
    ``default``, whose items begin ``path``. Returns their checksums."""
    sums = []
    with path.open("rb") as source:
        for length in lengths:
            raw = stream.to_bytes(default.from_bytes(source.read(length * default.item_bytes)))
            file.write(raw)
            sums.append(zlib.crc32(raw))
    return sums


def join_segments(
    folder: Path, segments: Sequence[Path], sources: Sequence[int], streams: Sequence[Stream] = TEXT
) -> dict[str, np.ndarray]:
    """Joins segments into the files and tables of ``folder`` and removes them; returns the tables.

    ``sources[i]`` is the source of segment i. The result does not depend on how samples were divided into segments.
    """
    declared = {stream.name: stream for stream in streams}
    kept = [stream for stream in streams if any(_path(segment, stream).exists() for segment in segments)]
    names = list(_tables_of(kept))
    parts = [{name: np.load(segment / f"{name}.npy", allow_pickle=False) for name in names} for segment in segments]
    files = {stream.name: _path(folder, stream).open("wb") for stream in kept}
    try:
        for segment, part in zip(segments, parts, strict=True):
            for stream in kept:
                if _path(segment, stream).exists():
                    with _path(segment, stream).open("rb") as part_file:
                        shutil.copyfileobj(part_file, files[stream.name], COPY_BYTES)
                else:
                    default, lengths = declared[stream.default_from], part[f"{stream.owner}_lengths"].tolist()
                    sums = write_default(_path(segment, default), default, lengths, stream, files[stream.name])
                    part[f"{stream.name}_checksums"] = np.array(sums, dtype=np.uint32)
            shutil.rmtree(segment)
        for file in files.values():
            _sync(file)
    finally:
        for file in files.values():
            file.close()
    tables = {name: np.concatenate([part[name] for part in parts]) for name in names}
    tables["sources"] = np.repeat(np.array(sources, dtype=np.int16), [len(part["lines"]) for part in parts])
    for stream in kept:
        if not stream.along:
            ends = np.cumsum(tables.pop(f"{stream.name}_lengths"), dtype=np.int64)
            tables[f"{stream.name}_offsets"] = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    save_tables(folder, tables)
    return tables


def save_tables(folder: Path, tables: Mapping[str, np.ndarray]) -> None:
    """Each as ``name.npy``, forced onto the disk."""
    for name, table in tables.items():
        with (folder / f"{name}.npy").open("wb") as file:
            np.save(file, table, allow_pickle=False)
            _sync(file)


def finish_store(
    folder: Path, train: np.ndarray, validation: np.ndarray, meta: Mapping[str, Any], streams: Sequence[Stream] = TEXT
) -> None:
    """Says which samples belong to which set, and hashes all files. ``meta.json`` comes last: a store with it is
    complete."""
    save_tables(folder, {"train": train.astype(np.int64), "validation": validation.astype(np.int64)})
    hashes = hash_in_pieces(sorted(path for path in folder.iterdir() if path.suffix in ENDS))
    body = {
        "version": FORMAT_VERSION,
        "streams": describe_streams(stream for stream in streams if _path(folder, stream).exists()),
        "files": {path.name: digest for path, digest in hashes.items()},
        **meta,
    }
    with (folder / "meta.json").open("wb") as file:
        file.write(json.dumps({"meta_digest": digest_of(body), **body}, indent=1).encode())
        _sync(file)


def link_tokens(store: Path, folder: Path) -> bool:
    """Gives ``folder`` the token files and tables of another store, by hard links; False where the disk cannot."""
    linked: list[Path] = []
    try:
        for path in store.iterdir():
            if path.suffix in ENDS and path.stem not in ("train", "validation"):
                os.link(path, folder / path.name)
                linked.append(folder / path.name)
    except OSError:
        for path in linked:
            path.unlink()
        return False
    return True


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
