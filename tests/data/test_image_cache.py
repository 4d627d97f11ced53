"""Prepared images that are kept: within the bounds, by use, and never another one's."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from manyhands.data.images.cache import ImageCache


def entries(seed: int, size: int = 1000) -> dict[str, np.ndarray]:
    return {"pixel_values": np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)}


def key(number: int) -> bytes:
    return number.to_bytes(2, "big") + bytes(15)


def fetch(cache: ImageCache, number: int) -> bool:
    """Whether an image had to be made."""
    made: list[int] = []
    found = cache.get(key(number), lambda: made.append(number) or entries(number))
    assert np.array_equal(found["pixel_values"], entries(number)["pixel_values"])
    return bool(made)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/*"))


def test_memory_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path, "a", 3000, 0)
    assert [fetch(cache, number) for number in (0, 1, 2, 0, 3, 0, 1)] == [True, True, True, False, True, False, True]
    assert cache.held_bytes == 3000 and not files(tmp_path)


def test_the_disk_keeps_them_for_other_processes_within_its_bound(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path, "a", 0, 10_000)
    for number in range(20):
        assert fetch(cache, number)
        for age, path in enumerate(files(tmp_path)):  # file times are too coarse for a test
            os.utime(path, ns=(age, age))
    total = sum(path.stat().st_size for path in files(tmp_path))
    assert 5000 < total <= 10_000
    other = ImageCache(tmp_path, "a", 0, 10_000)
    assert not fetch(other, 19) and fetch(other, 0)


def test_a_file_that_is_used_stays(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path, "a", 0, 6_000)
    for number in range(3):
        fetch(cache, number)
    for age, path in enumerate(files(tmp_path)):
        os.utime(path, ns=(age, age))
    assert not fetch(cache, 0)  # the oldest is used
    for number in (10, 11):
        fetch(cache, number)
    assert not fetch(ImageCache(tmp_path, "a", 0, 6_000), 0) and fetch(ImageCache(tmp_path, "a", 0, 6_000), 1)


def test_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    assert fetch(ImageCache(tmp_path, "a", 0, 10_000), 1)
    (path,) = files(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[300] ^= 1
    path.write_bytes(raw)
    assert fetch(ImageCache(tmp_path, "a", 0, 10_000), 1) and not fetch(ImageCache(tmp_path, "a", 0, 10_000), 1)
    path.write_bytes(raw[:100])
    assert fetch(ImageCache(tmp_path, "a", 0, 10_000), 1)


def test_of_more_images_than_fit_the_same_stay_in_every_epoch(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    keys = [rng.bytes(17) for _ in range(40)]
    cache = ImageCache(tmp_path, "a", 0, 20_000, needed_bytes=40_000)
    made = [0, 0]
    for epoch in range(2):
        for number in keys:
            cache.get(number, lambda epoch=epoch: made.__setitem__(epoch, made[epoch] + 1) or entries(0))
    assert made[0] == 40 and 12 <= made[1] <= 32  # about half of them again


def test_a_disk_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ImageCache(tmp_path / "file", "a", 0, 10_000)
    assert fetch(cache, 1) and fetch(cache, 1)


def test_the_bound_is_that_of_all_processors_together(tmp_path: Path) -> None:
    """Another model's images, or those of another size, take the room of what was not used for the longest time."""
    first, second = (ImageCache(tmp_path, name, 0, 10_000) for name in ("first", "second"))
    for number in range(6):
        fetch(first, number)
    for age, path in enumerate(files(tmp_path)):
        os.utime(path, ns=(age, age))
    assert [fetch(second, number) for number in range(6)] == [True] * 6  # another's are not taken for one's own
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 10_000
    again = ImageCache(tmp_path, "second", 0, 10_000)
    assert not any(fetch(again, number) for number in range(6)) and fetch(ImageCache(tmp_path, "first", 0, 10_000), 0)
