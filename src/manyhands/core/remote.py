"""A folder in an object store or on another file system, by its URL, through fsspec: s3://, gs://, az://, file://, ...

Stores have no rename and no folders, so whoever writes here puts the file last that says that the others are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class RemoteError(Exception):
    """The store cannot be read or written; ``str`` says why."""


class RemoteFolder:
    """Names are relative, with ``/``. Every method raises RemoteError."""

    def __init__(self, url: str) -> None:
        """RemoteError where the URL's kind needs a package that is not installed."""
        import fsspec

        self.url = url.rstrip("/")
        with _explained(self.url):
            self._fs, path = fsspec.core.url_to_fs(self.url)
        self._path = path.rstrip("/")

    def read(self, name: str) -> bytes | None:
        """The file's content; None where there is no such file."""
        with _explained(self.url), contextlib.suppress(FileNotFoundError):
            return self._fs.cat_file(f"{self._path}/{name}")
        return None

    def list(self, name: str = "") -> list[str]:
        """The last part of the name of each file and folder in the folder ``name``, sorted; none where it is not
        there.
        """
        with _explained(self.url), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            found = self._fs.ls(f"{self._path}/{name}".rstrip("/"), detail=False)
            return sorted({path.rstrip("/").rpartition("/")[2] for path in found})
        return []

    def put(self, file: Path, name: str, moved: Callable[[int], object] = lambda num_bytes: None) -> None:
        """Copies a local file there, replacing another; ``moved`` hears of bytes that are."""
        with _explained(self.url):
            self._fs.makedirs(f"{self._path}/{name}".rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(file), f"{self._path}/{name}", callback=_make_callback(moved))

    def get(self, name: str, file: Path, moved: Callable[[int], object] = lambda num_bytes: None) -> None:
        """Copies a file from there."""
        with _explained(self.url):
            self._fs.get_file(f"{self._path}/{name}", str(file), callback=_make_callback(moved))

    def remove(self, name: str, first: str) -> None:
        """Removes the folder ``name``, its file ``first`` before all others, if it is there."""
        with _explained(self.url):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._path}/{name}/{first}")
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(f"{self._path}/{name}", recursive=True)


def _make_callback(moved: Callable[[int], object]) -> Any:
    from fsspec.callbacks import Callback

    class Moved(Callback):
        def relative_update(self, inc: int = 1) -> None:
            super().relative_update(inc)
            moved(inc)

    return Moved()


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, RemoteError):
        raise
    except Exception as error:  # each store has its own
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise RemoteError(f"{url}: {type(error).__name__}: {text}") from error
