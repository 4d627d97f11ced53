"""Opens the images of rows while their text is prepared: finds and decodes each once, so that an error names its row,
and gives the text that replaces its placeholder. Knows no batch.

Each address is asked once, whatever number of rows name it, by all processes of the preparation together. Copies lie in
its folder, within a bound, and go with it: the next preparation asks again.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from manyhands.config.schema import DataSection
from manyhands.core.errors import UserError
from manyhands.core.files import explain_full_disk, is_disk_full, make_folder, read_object
from manyhands.data.images.files import (
    BadImage,
    PixelBounds,
    check_pillow,
    content_of,
    decode,
    fetch_bytes,
    is_address,
    is_animated,
    locate,
    name_of,
    read_bytes,
)
from manyhands.data.images.inferred import InferredProcessor
from manyhands.data.images.processor import ImageProcessor, family_of
from manyhands.data.images.rows import ImageRef
from manyhands.data.read.formats import Conversation
from manyhands.data.read.hub_sets import PREFIX, fetch_file, is_hub
from manyhands.data.store.streams import StoredImage
from manyhands.families import ImageLayout

MAX_KNOWN = 65_536  # images that several rows may name, which are decoded once
MAX_COPIES_BYTES = 16 << 30  # on disk, by all processes
TRIED_SIZE = (336, 448)  # height and width in pixels of an image that every processor takes
MAX_FAILED = 65_536  # addresses that gave no image, which each process remembers


@dataclass(frozen=True)
class OpenedImage:
    """An image that can be used; ``text`` replaces its placeholder."""

    stored: StoredImage
    text: str


def open_processor(model_folder: str | Path, layout: ImageLayout) -> ImageProcessor:
    """The processor of the model in a folder. Raises UserError where it cannot be used."""
    try:
        processor = (InferredProcessor if layout.inferred else ImageProcessor)(model_folder, layout)
        processor.shape_of(TRIED_SIZE)
        return processor
    except UserError:
        raise
    except Exception as error:  # values that its class has taken as they are
        raise UserError(
            "the image processor cannot be used",
            where=str(model_folder),
            why=f"an image of {TRIED_SIZE[1]} x {TRIED_SIZE[0]} pixels ends in {type(error).__name__}: {error}",
            fix="compare the values of preprocessor_config.json with those of the original model",
        ) from error


class ImageOpener:
    """Opens images for one run. ``fetched``: for copies of remote ones. UserError if the processor is unusable."""

    def __init__(
        self, data: DataSection, model_folder: str | Path, tokenizer: Any, fetched: Path | None = None
    ) -> None:
        check_pillow()
        layout = family_of(model_folder).images
        assert layout is not None, "asked only of models that take images"
        self._data, self._bounds, self.layout = data, PixelBounds.of(data), layout
        self.processor = open_processor(model_folder, layout)
        self._words = self.processor.words(tokenizer)
        self.placeholder, self._token = self._words[layout.placeholder], self._words[layout.token]
        self.token_id = read_object(Path(model_folder) / "config.json").get(layout.token_field, -1)
        if not isinstance(self.token_id, int) or tokenizer.convert_tokens_to_ids(self._token) != self.token_id:
            raise UserError(
                f"{self._token} is not the token that the model puts images in place of",
                where=str(model_folder),
                why=f"{layout.token_field} of config.json is {self.token_id}, and the tokenizer's id of it is "
                f"{tokenizer.convert_tokens_to_ids(self._token)}",
                fix="use the tokenizer's and the processor's files of the model",
            )
        self._fetched = FetchedImages(fetched, None if data.image_urls is True else data.image_urls or ())
        self._folder = find_image_folder(data)
        self._has_animated = False
        self._known: OrderedDict[tuple[str, int, int], tuple[bytes, tuple[int, int]]] = OrderedDict()

    def open(self, conversation: Conversation, file: str) -> Conversation:
        """The conversation with its images opened; those named by relative paths are looked for beside the data file,
        or in ``data.image_folder``. Raises BadImage."""
        folder = self._folder or Path(file).parent.expanduser()
        alone = len(conversation.images) == 1
        return replace(conversation, images=tuple(self.open_ref(ref, folder, alone) for ref in conversation.images))

    def open_ref(self, ref: ImageRef, folder: Path = Path(), alone: bool = True) -> OpenedImage:
        """One image, the only one of its sample where ``alone``. Raises BadImage."""
        place = locate(ref, folder, self._data.image_urls)
        content, size, raw = self._look(place, ref.data)
        try:
            shape = self.processor.shape_of(size, alone)
            text = self.processor.expand(shape, self._words)
        except Exception as error:  # a library's code, on sizes and values from outside: it raises many kinds
            raise BadImage(
                f"{name_of(place)} of {size[1]} x {size[0]} pixels is refused by the processor: {error}"
            ) from None
        stored = StoredImage(bool(raw), raw or place.encode(), content, size, shape.units, text.count(self._token))
        return OpenedImage(stored, text)

    def _look(self, place: str, data: bytes) -> tuple[bytes, tuple[int, int], bytes]:
        """(hash of the content, (height, width), the bytes unless a file has them)."""
        if not place:
            return *self._read(data, place), data
        fetched = self._fetched.read(place) if is_address(place) else b""  # kept: it may be another one tomorrow
        key = (place, len(fetched), 0) if fetched else _stamp(place)
        if key is None or key not in self._known:
            raw = fetched or read_bytes(place)
            found = self._read(raw, place)
            if key is None:
                return *found, b""
            self._known[key] = found
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return *self._known[key], fetched

    def _read(self, raw: bytes, place: str) -> tuple[bytes, tuple[int, int]]:
        height, width = decode(raw, name_of(place), self._bounds).shape[:2]
        self._has_animated = self._has_animated or is_animated(raw)
        return content_of(raw), (height, width)

    def notes(self) -> list[str]:
        """What a user should know about the images, once they were opened."""
        return ["of images with several frames or pages, only the first one is trained"] * self._has_animated


def _stamp(place: str) -> tuple[str, int, int] | None:
    """What changes when a file does; None for what is no file."""
    try:
        status = os.stat(place)
    except (OSError, ValueError):
        return None
    return place, status.st_size, status.st_mtime_ns


class FetchedImages:
    """Encoded images by address. ``folder``: of the preparation; None: one of this object's own. ``hosts``: those that
    may be asked; None: public ones.

    ``max_bytes``: of copies that are written; what is beyond that is fetched for each row.
    """

    def __init__(
        self, folder: Path | None = None, hosts: Sequence[str] | None = None, max_bytes: int = MAX_COPIES_BYTES
    ) -> None:
        self._given, self._hosts, self._max_bytes = folder, hosts, max_bytes
        self._failed: OrderedDict[str, str] = OrderedDict()

    @cached_property
    def _folder(self) -> Path:
        if self._given is None:
            self._own = tempfile.TemporaryDirectory(prefix="manyhands-images-")  # goes with this object
            return Path(self._own.name)
        self._given.mkdir(parents=True, exist_ok=True)
        return self._given

    def read(self, address: str) -> bytes:
        """The encoded image at an address. Raises BadImage, for each row that names it."""
        if address in self._failed:
            raise BadImage(self._failed[address])
        copy = self._folder / hashlib.blake2b(address.encode(), digest_size=16).hexdigest()
        try:
            with copy.open("ab+", buffering=0) as file:  # others wait for whoever fetches it
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                raw = file.readall()
                if not raw:
                    raw = fetch_bytes(address, self._hosts)
                    if self._claim(len(raw)) and file.write(raw) != len(raw):
                        file.truncate(0)  # the disk is full
                return raw
        except BadImage as bad:
            self._failed[address] = str(bad)
            if len(self._failed) > MAX_FAILED:
                self._failed.popitem(last=False)
            raise
        except OSError:  # a disk that is full or cannot be written keeps nothing
            return fetch_bytes(address, self._hosts)

    def _claim(self, num_bytes: int) -> bool:
        """Whether so many bytes more are within the bound; then they count."""
        with (self._folder / "bytes").open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            total = int(file.read() or b"0") + num_bytes
            if total > self._max_bytes:
                return False
            file.truncate(0)
            file.write(str(total).encode())
        return True


MAX_GROWTH = 20  # images are already compressed; an archive that grows by more does not hold images


def find_image_folder(data: DataSection) -> Path | None:
    """The folder that ``data.image_folder`` names, be it an archive; None where it names none. Raises UserError."""
    named = data.image_folder
    if named is None:
        return None
    if is_hub(named):
        parts = named.removeprefix(PREFIX).split("/", 2)
        if len(parts) < 3 or not parts[2].endswith(".zip"):
            raise UserError(
                f"{named} names no archive", where="data.image_folder", fix="write hub:OWNER/NAME/FILE.zip, or a folder"
            )
        return _unpack(fetch_file("/".join(parts[:2]), parts[2]), Path(data.cache).expanduser())
    path = Path(named).expanduser()
    return _unpack(path, Path(data.cache).expanduser()) if path.suffix == ".zip" and path.is_file() else path


def _unpack(archive: Path, cache: Path) -> Path:
    """The files of an archive, in a folder of the cache that is named by its place, size and time."""
    archive = archive.resolve()
    status = archive.stat()
    digest = hashlib.sha256(f"{archive}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()
    folder, part = cache / f"images-{digest[:32]}", None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                part = make_folder(cache, f".{folder.name}-")
                with zipfile.ZipFile(archive) as opened:
                    size = sum(entry.file_size for entry in opened.infolist())
                    if size > MAX_GROWTH * status.st_size:
                        raise zipfile.BadZipFile(f"its {status.st_size:,} bytes would become {size:,}")
                    opened.extractall(part)  # leaves no folder: names are made relative, links become files
                os.replace(part, folder)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise UserError(
            "the archive of images cannot be unpacked",
            where=str(archive),
            why=str(error),
            fix="name a folder of images",
        ) from error
    except OSError as error:
        if is_disk_full(error):
            raise explain_full_disk(error, cache) from error
        raise UserError(
            "the archive of images cannot be unpacked", where=str(cache), why=str(error), fix="set data.cache"
        ) from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
    return folder
