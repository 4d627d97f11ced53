"""Effects of the keys of images: which rows with images are trained, and which images are used."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.core.errors import UserError
from manyhands.data.tokenize.prepare import prepare
from manyhands.data.tokenize.summary import PreparedData
from manyhands.planner.types import Plan
from tests.keys.lab import Lab
from tests.support.vision import write_tiny_processor, write_tiny_vision


def facts_of(lab: Lab, places: list[Any], **keys: Any) -> PreparedData:
    """What is prepared of one row for each of ``places``; None is a row of text."""
    folder = lab.folder / "vision"
    if not folder.exists():
        write_tiny_processor(folder, "gemma3")
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "so"}]}
        | ({} if image is None else {"image": image})
        for image in places
    ]
    given = {f"data.{key}": value for key, value in keys.items()}
    path = lab.write_rows("images.jsonl", rows)
    config = lab.config({"data.train": path, "data.validation_fraction": 0.0, **given})
    return prepare(config, folder, lambda _: None)


def draw(path: Path, size: int = 30) -> str:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size, 3), 77, dtype=np.uint8)).save(path)
    return str(path)


def images(lab: Lab) -> None:
    place = draw(lab.folder / "drawn" / "a.png")
    late = [None] * 101 + [place]  # behind the rows that tell whether there are images
    assert facts_of(lab, [place]).num_images == 1
    with pytest.raises(UserError, match="1 row cannot be trained"):
        facts_of(lab, late)
    assert facts_of(lab, late, images=True).num_images == 1
    with pytest.raises(UserError, match="only text can be trained"):
        facts_of(lab, [place], images=False)


def image_folder(lab: Lab) -> None:
    draw(lab.folder / "drawn" / "b.png")
    with pytest.raises(UserError, match="cannot be used"):
        facts_of(lab, ["b.png"])
    assert facts_of(lab, ["b.png"], image_folder=str(lab.folder / "drawn")).num_images == 1
    with zipfile.ZipFile(lab.folder / "drawn.zip", "w") as archive:
        archive.write(lab.folder / "drawn" / "b.png", "c.png")
        archive.write(lab.folder / "drawn" / "b.png", "../outside.png")
    assert facts_of(lab, ["c.png"], image_folder=str(lab.folder / "drawn.zip")).num_images == 1
    (outside,) = lab.folder.rglob("outside.png")
    assert outside.parent.name.startswith("images-"), "inside of the folder that the archive is unpacked into"
    (lab.folder / "damaged.zip").write_bytes(b"PK")
    with pytest.raises(UserError, match="the archive of images cannot be unpacked"):
        facts_of(lab, ["d.png"], image_folder=str(lab.folder / "damaged.zip"))
    with pytest.raises(UserError, match="names no archive"):
        facts_of(lab, ["d.png"], image_folder="hub:o/set")


def image_urls(lab: Lab) -> None:
    address = ["http://127.0.0.1:9/a.png"]  # nobody answers there
    inner, alone = "address of this machine", "none of the hosts"
    cases = ((False, "data.image_urls is true"), (True, inner), (["127.0.0.1"], "refused"), (["a.example"], alone))
    for allowed, words in cases:
        with pytest.raises(UserError) as caught:
            facts_of(lab, address, image_urls=allowed)
        assert words in caught.value.details[0]


def bad_images(lab: Lab) -> None:
    places = [draw(lab.folder / "drawn" / "a.png"), "nowhere.png"]
    with pytest.raises(UserError, match="cannot be used"):
        facts_of(lab, places)
    facts = facts_of(lab, places, bad_images="skip")
    assert facts.num_samples == 1 and facts.left_out == {"data.bad_images": {"images": 1}}


def max_image_pixels(lab: Lab) -> None:
    place = draw(lab.folder / "drawn" / "a.png")
    assert facts_of(lab, [place], max_image_pixels=900).num_images == 1
    with pytest.raises(UserError) as caught:
        facts_of(lab, [place], max_image_pixels=899)
    assert "900 pixels" in caught.value.details[0]


def shrink_images_above(lab: Lab) -> None:
    assert _size_of(lab) == (30, 30) and _size_of(lab, shrink_images_above=100) == (10, 10)


def enlarge_images_below(lab: Lab) -> None:
    assert _size_of(lab, enlarge_images_below=3600) == (60, 60)


def _size_of(lab: Lab, **keys: int) -> tuple[int, int]:
    """Of an image of 30 x 30 pixels, as the processor gets it."""
    from manyhands.data.store.store import TokenStore
    from manyhands.data.store.streams import from_streams

    facts = facts_of(lab, [draw(lab.folder / "drawn" / "a.png")], **keys)
    return from_streams(TokenStore.open(facts.folder).train.sample(0))[0].size


def kept(lab: Lab, **keys: Any) -> tuple[list[Path], int]:
    """(files of prepared images, bytes that this process holds) once one image was in a batch."""
    from types import SimpleNamespace

    from manyhands.data.images.batch import ImageBatcher
    from manyhands.data.store.store import TokenStore
    from manyhands.data.store.streams import from_streams
    from manyhands.model.inputs import image_work

    place = draw(lab.folder / "drawn" / "a.png")
    cache = Path(str(lab.folder / "kept"))
    shutil.rmtree(cache, ignore_errors=True)
    facts = facts_of(lab, [place], cache=str(cache), **keys)
    config = lab.config({f"data.{key}": value for key, value in {"cache": str(cache), **keys}.items()})
    plan = SimpleNamespace(model_folder=str(lab.folder / "vision"), parts={"vision": "frozen"})
    store = TokenStore.open(facts.folder)
    work = image_work(config, plan, store)  # type: ignore[arg-type]
    assert work is not None
    batcher = ImageBatcher(work)
    batcher.prepare(from_streams(store.train.sample(0))[0], True)
    return list(cache.glob("images/*/*/*.npz")), batcher._cache.held_bytes


def image_cache_gb(lab: Lab) -> None:
    assert len(kept(lab)[0]) == 1 and not kept(lab, image_cache_gb=0.0)[0]


def image_memory_gb(lab: Lab) -> None:
    assert kept(lab)[1] == 3 * 28 * 28 and kept(lab, image_memory_gb=0.0)[1] == 0


def planned(lab: Lab, **keys: Any) -> Plan:
    """Of a projector that is trained behind a frozen tower, for two epochs."""
    model = lab.folder / "tiny-vision"
    if not model.exists():
        write_tiny_vision(model, "gemma3")
    parts = {"vision": "frozen", "projector": "trained"}
    rows = [
        {"image": draw(lab.folder / "drawn" / "a.png"), "prompt": "?", "completion": "so"},
        {"prompt": "?", "completion": "no"},
    ]
    given = {"model.name": str(model), "data.train": lab.write_rows("features.jsonl", rows), "method.parts": parts}
    given |= {"method.name": "full", "stop.epochs": 2, "data.validation_fraction": 0.0, "data.packing": False}
    return lab.prepare(given | {key.replace("__", "."): value for key, value in keys.items()}).plan


def cache_features(lab: Lab) -> None:
    """What is kept then: model/test_feature_runs.py."""
    assert planned(lab).keeps_features and not planned(lab, data__cache_features=False).keeps_features
    once: dict[str, Any] = {"stop__epochs": 1}
    assert not planned(lab, **once).keeps_features and planned(lab, **once, data__cache_features=True).keeps_features
    with pytest.raises(UserError, match=r"data\.cache_features is true") as caught:
        planned(lab, data__cache_features=True, method__parts={"vision": "trained"})
    assert caught.value.why == "the vision tower is trained, so that they change"


def feature_cache_gb(lab: Lab) -> None:
    small: dict[str, Any] = {"data__feature_cache_gb": 1e-7}
    assert not planned(lab, **small).keeps_features
    with pytest.raises(UserError, match=r"data\.cache_features is true") as caught:
        planned(lab, **small, data__cache_features=True)
    assert "raise data.feature_cache_gb" in (caught.value.fix or "")
