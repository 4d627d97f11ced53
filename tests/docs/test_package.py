"""The wheel: what its index page would show, and that it works where nothing else of the repository is."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import setup

ROOT = Path(__file__).parents[2]


def test_links_of_the_description_name_files_of_the_repository() -> None:
    import tomllib

    repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    found = re.findall(r"\]\(([^)\s]+)\)", setup.long_description())
    assert len(found) > 15 and all(re.match(r"https?://|#", link) for link in found)
    ours = [link.removeprefix(f"{repository}/blob/main/") for link in found if link.startswith(repository)]
    assert ours and not [path for path in ours if not (ROOT / path.partition("#")[0]).exists()]


def test_links_are_made_absolute() -> None:
    text = "[a](b.md#c) [d](#e) [f](https://g) [h](../i.py)"
    expected = "[a](https://r/blob/main/docs/b.md#c) [d](#e) [f](https://g) [h](https://r/blob/main/docs/../i.py)"
    assert setup.absolute_links(text, "https://r", "docs/") == expected


@pytest.mark.slow
def test_the_wheel_is_whole_and_works(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    source = tmp_path / "source"
    source.mkdir()
    subprocess.run(["cp", "-r", "--parents", *PARTS, str(source)], cwd=ROOT, check=True)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [metadata] = [archive.read(name).decode() for name in names if name.endswith("/METADATA")]
    inside = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "manyhands").rglob("*") if _ships(path)}
    assert inside - names == set()
    head = email.message_from_string(metadata)
    assert head["Author"] and head["License-Expression"] == "Apache-2.0"
    assert {link.split(",")[0] for link in head.get_all("Project-URL", [])} >= {"Repository", "Changelog", "Issues"}
    assert "# Changelog" in metadata and "# manyhands" in metadata

    target = tmp_path / "target"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    code = "import manyhands; print(manyhands.__file__, manyhands.plan, manyhands.__version__)"
    shown = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert str(target) in shown.stdout, shown
    command = [sys.executable, str(target / "bin" / "manyhands"), "--version"]
    shown = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert shown.stdout == f"manyhands {head['Version']}\n", shown


PARTS = ("src", "pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "docs/changelog.md")


def _ships(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile; comments out, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


def test_the_dockerfile_copies_what_exists_and_names_what_the_project_has() -> None:
    """By reading it: building it needs Docker, which tests do not have."""
    import tomllib

    parsed = instructions((ROOT / "Dockerfile").read_text())
    known = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in parsed} <= known and [name for name, _ in parsed[:2]] == ["ARG", "FROM"]
    copied = {path for name, rest in parsed if name == "COPY" for path in rest.split()[:-1]}
    assert set(PARTS) - {"MANIFEST.in"} <= copied and all((ROOT / path).exists() for path in copied)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not copied & set(ignored)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [extras] = [rest.partition("=")[2].split(",") for name, rest in parsed if name == "ARG" and "EXTRAS" in rest]
    assert set(extras) <= project["optional-dependencies"].keys()
    shells = [rest for name, rest in parsed if name == "RUN"]
    for shell in shells:
        assert subprocess.run(["bash", "-n", "-c", shell]).returncode == 0, shell
