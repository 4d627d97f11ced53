"""Headers of safetensors files: names, shapes and dtypes of tensors without reading one. Knows no torch and no model.

Format: 8 bytes little-endian length n, n bytes of JSON ``{name: {dtype, shape, data_offsets}}``, then the data.
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from manyhands.core.errors import UserError
from manyhands.core.files import parse_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPE_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
DTYPE_BITS |= {"I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64}
_LFS_POINTER = b"version https://git-lfs"
_DOWNLOAD_AGAIN = "download the model again"
_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class TensorHeader:
    """What a file's header says of one tensor; ``dtype`` in the format's own names (BF16, F32, ...)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BITS[self.dtype] // 8


def find_weight_files(folder: Path) -> list[Path]:
    """A model folder's safetensors files in order, from the index if there is one. UserError if any is missing."""
    index = folder / INDEX_FILE
    if index.is_file():
        return _shards(index)
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    pickles = sorted(
        path.name
        for pattern in ("*.bin", "*.pt", "*.pth")
        for path in folder.glob(pattern)
        if path.name != "training_args.bin"
    )
    if pickles:
        raise UserError(
            "the model's weights are pickles, which are not opened",
            where=f"{folder}: {', '.join(pickles[:3])}",
            why="reading a pickle runs code that it carries",
            fix="take a revision with safetensors files, or convert them: transformers' save_pretrained writes those",
        )
    raise UserError(
        "the model folder has no weights",
        where=str(folder),
        why=f"neither {SINGLE_FILE} nor {INDEX_FILE} is there; it holds {_listing(folder)}",
        fix="give a folder with safetensors files, or set model.init=random to start from new weights; `manyhands plan`"
        " needs config.json alone",
    )


def _shards(index: Path) -> list[Path]:
    try:
        weight_map = parse_json(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
        if not names or any(not isinstance(name, str) or Path(name).name != name or "\0" in name for name in names):
            raise ValueError("weight_map must name files of this folder")
        missing = [name for name in names if not (index.parent / name).is_file()]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:  # the last: a name that is too long
        raise UserError(
            "the index of the model's weights cannot be read", where=str(index), why=_say(error), fix=_DOWNLOAD_AGAIN
        ) from error
    if missing:
        raise UserError(
            f"{len(missing)} of {len(names)} weight files are missing",
            where=str(index.parent),
            why=f"{index.name} names files that are not there",
            fix=_DOWNLOAD_AGAIN,
            details=missing[:20],
        )
    return [index.parent / name for name in names]


def read_headers(files: list[Path]) -> dict[str, TensorHeader]:
    """All tensors by name. UserError for a broken, cut or doubled file."""
    tensors: dict[str, TensorHeader] = {}
    for path in files:
        found = read_header(path)
        doubled = tensors.keys() & found.keys()
        if doubled:
            raise UserError(f"the tensor {min(doubled)} is stored twice", where=str(path), fix=_DOWNLOAD_AGAIN)
        tensors |= found
    return tensors


def read_header(path: Path) -> dict[str, TensorHeader]:
    """One file's tensors by name. UserError for a malformed header or a file of another length than it gives."""
    with _open(path) as file:
        slices = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118  (no iterator)
        return {name: TensorHeader(part.get_dtype(), tuple(part.get_shape())) for name, part in slices}


def read_bytes(path: Path, name: str) -> bytes:
    """A small tensor's bytes, such as a text. ValueError for one of more than a megabyte."""
    with _open(path) as file:
        if math.prod(file.get_slice(name).get_shape()) > _CHUNK_BYTES:
            raise ValueError(f"{name} is too long")
        return file.get_tensor(name).tobytes()


def read_metadata(path: Path) -> dict[str, str]:
    """What a file's writer said of it. UserError as ``read_header``."""
    with _open(path) as file:
        return file.metadata() or {}


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """A safetensors file whose tensors are not read: numpy, which has no bfloat16, is never asked for one."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise _broken(path, "it is a git-lfs pointer, not the weights", "run `git lfs pull` in the model's folder")
    try:
        with safe_open(path, framework="numpy") as opened:
            yield opened
    except SafetensorError as error:
        raise _broken(path, str(error).removeprefix("Error while deserializing header: ")) from error


def equal_bytes(files: list[Path], first: str, second: str) -> bool:
    """Whether two tensors have the same dtype, shape and bytes. UserError as ``read_headers``."""
    tensors = {name: (path, header) for path in files for name, header in read_header(path).items()}
    (path, one), (other_path, other) = tensors[first], tensors[second]
    if one != other:
        return False
    with path.open("rb") as file, other_path.open("rb") as other_file:
        _seek(file, first)
        _seek(other_file, second)
        sizes = (min(_CHUNK_BYTES, one.num_bytes - start) for start in range(0, one.num_bytes, _CHUNK_BYTES))
        return all(file.read(size) == other_file.read(size) for size in sizes)


def _seek(file: BinaryIO, name: str) -> None:
    """Go to the first byte of a tensor, in a file whose header was checked."""
    length = int.from_bytes(file.read(8), "little")
    file.seek(8 + length + parse_json(file.read(length))[name]["data_offsets"][0])


def _broken(path: Path, why: str, fix: str = _DOWNLOAD_AGAIN) -> UserError:
    return UserError("a weights file is broken", where=str(path), why=why, fix=fix)


def _say(error: Exception) -> str:
    return f"no key {error}" if isinstance(error, KeyError) else str(error)


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return (", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")) or "nothing"
