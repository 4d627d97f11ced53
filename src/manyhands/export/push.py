"""A verified folder to the hub: what would be uploaded, what is refused, and the upload. Imports no torch.

Only files that the export wrote, and README.md, are uploaded; each must be what was verified. The token, given by the
caller or the environment, goes to huggingface_hub and to nothing else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.files import refuse_links
from manyhands.core.secret_values import find_secrets
from manyhands.core.units import count_of, format_size
from manyhands.export.record import CARD, RECORD, find_changed, read_record
from manyhands.facts.adapter import CONFIG
from manyhands.launch.run.folder import RunFolder

TOKEN = "HF_TOKEN"
OUTPUTS = ("adapter", "model")  # of a run's folder: an adapter before the model that it is merged into
REPOSITORY = re.compile(r"[A-Za-z0-9](?:[\w.-]*\w)?/[A-Za-z0-9](?:[\w.-]*\w)?")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
READ_AS_TEXT = (CARD, CONFIG, "config.json", "generation_config.json", "tokenizer_config.json")
OF_TEXT = (".json", ".md", ".txt", ".jinja", ".py", ".yaml", ".yml", ".toml", "")  # suffixes
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "model.safetensors.index.json")
# An absolute path of two parts or more, not within a URL or a relative path.
LOCAL_PATH = re.compile(r"(?<![\w:/.~-])~?/(?:[\w.@+-]+/)+[\w.@+-]+|[A-Za-z]:\\\\?[\w.-]+")
MAX_SHOWN = 5


@dataclass(frozen=True)
class Upload:
    """Files of ``folder`` by name with sizes; ``replaced`` has the content of those that are changed."""

    folder: Path
    repository: str
    private: bool
    sizes: dict[str, int]
    left_out: tuple[str, ...] = ()
    base: str | None = None  # of an adapter: the model that it is for, which is not uploaded
    replaced: dict[str, bytes] = field(default_factory=dict)

    def describe(self) -> str:
        """The table of a dry run."""
        total = format_bytes(sum(self.sizes.values()))
        kind = "private" if self.private else "PUBLIC"
        lines = [f"{self.folder} -> {self.repository} ({kind}): {count_of(len(self.sizes), 'file')}, {total}"]
        width = max(len(name) for name in self.sizes)
        lines += [f"  {name:<{width}}  {format_bytes(size):>10}" for name, size in self.sizes.items()]
        if self.left_out:
            lines.append(f"not uploaded, as the export did not write them: {', '.join(self.left_out)}")
        if self.base is not None:
            lines.append(f"an adapter without its base model, which it names: {self.base}")
        return "\n".join(lines)


def format_bytes(size: int) -> str:
    return format_size(size) if size >= 2**20 else f"{size / 2**10:,.1f} KiB"


# ---- what would be uploaded ------------------------------------------------------------------------------------------


def plan_upload(source: Path, repository: str, *, private: bool = True, base: str | None = None) -> Upload:
    """Checks everything that can be checked here; UserError for what must not be uploaded. Reaches no network.

    ``source``: a run's folder (its adapter, else its model) or a folder that was exported. ``base``: what an adapter
    trained on a local folder is to name as its base model.
    """
    if not REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        raise UserError(
            f"{repository!r} is not a valid repository name",
            where="--to",
            why="a model on the hub is called OWNER/NAME: letters, digits, and . _ - between them",
            fix="write --to your-name/your-model",
        )
    folder = find_output(source)
    record = read_record(folder)
    refuse_links(folder, [CARD, RECORD, *(record.files if record is not None else ())])
    if record is None or not record.verified:
        raise UserError(
            "this folder was not verified, so it is not uploaded",
            where=str(folder),
            why=f"{RECORD} says so" if record is not None else f"it has no {RECORD}, which an export writes",
            fix="manyhands export RUN --output NEW_FOLDER, which verifies what it writes, and push that",
        )
    changed = find_changed(folder, record)
    spoilt = [f"{name} is {what}" for name, what in changed.items() if what != "added" and name != CARD]
    if spoilt:
        raise UserError(
            "this folder is not as it was when it was verified",
            where=str(folder),
            fix="put the files back, or export the run again",
            details=spoilt[:20],
        )
    names = sorted({*record.files, CARD} if (folder / CARD).is_file() else record.files)
    replaced, named = name_base_model(folder, base)
    if CONFIG in replaced and CARD in record.files and CARD not in changed:
        replaced[CARD] = name_base_in_card(folder, str(named)).encode()
    refuse_private(folder, names, replaced)
    return Upload(
        folder=folder,
        repository=repository,
        private=private,
        sizes={name: len(replaced[name]) if name in replaced else (folder / name).stat().st_size for name in names},
        left_out=tuple(name for name, what in changed.items() if what == "added" and name != CARD),
        base=named,
        replaced=replaced,
    )


def find_output(source: Path) -> Path:
    """The folder to upload. UserError for a run that has not finished, or has written nothing."""
    if not (source / "run.json").is_file():
        return source
    status = RunFolder(source).read_status()
    if status.get("state") != "finished":
        raise UserError(
            "the run has not finished",
            where=str(source / "status.json"),
            why=f"its state is {status.get('state', 'not known')}",
            fix="let it finish (`manyhands train` resumes it); or export a checkpoint, and push that folder",
        )
    found = next((source / name for name in OUTPUTS if (source / name).is_dir()), None)
    if found is None:
        raise UserError(
            "the run has neither an adapter nor a model to upload",
            where=str(source),
            fix="manyhands export RUN, and push the folder that it writes",
        )
    return found


def name_base_model(folder: Path, base: str | None) -> tuple[dict[str, bytes], str | None]:
    """(adapter_config.json where it has to be another one, what it names as the base model); nothing for a model."""
    if not (folder / CONFIG).is_file():
        if base is not None:
            raise UserError(
                "--base is for an adapter", where=str(folder), why="this is a model", fix="leave --base out"
            )
        return {}, None
    fields = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    named = fields.get("base_model_name_or_path") or ""
    if base is None and HUB_NAME.fullmatch(named):
        return {}, named
    if base is None or not HUB_NAME.fullmatch(base):
        raise UserError(
            "the adapter names a folder of this machine as its base model",
            where=f"{folder / CONFIG}: base_model_name_or_path",
            why="those who download the adapter have no such folder, and its path is private",
            fix="add --base OWNER/NAME, the name of that model on the hub",
        )
    text = json.dumps(fields | {"base_model_name_or_path": base}, indent=2, ensure_ascii=False) + "\n"
    return {CONFIG: text.encode()}, base


def name_base_in_card(folder: Path, base: str) -> str:
    """An adapter's card with its base's hub name in the head and in the lines that open it."""
    local = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    text = (folder / CARD).read_text(encoding="utf-8").replace(f"path/to/{Path(local).name}", base)
    return text.replace("---\n", f"---\nbase_model: {base}\nbase_model_relation: adapter\n", 1)


def refuse_private(folder: Path, names: list[str], replaced: dict[str, bytes]) -> None:
    """UserError for paths of this machine and for what looks like a token, in the texts that would be uploaded."""
    found = []
    for name in names:
        if Path(name).suffix not in OF_TEXT or Path(name).name in VOCABULARIES:
            continue
        raw = replaced.get(name) or (folder / name).read_bytes()
        text = raw.decode("utf-8", errors="replace")
        found += [f"{name}: {what}" for what in find_secrets(text)[:MAX_SHOWN]]
        if name not in READ_AS_TEXT:
            continue
        if name == "tokenizer_config.json":
            text = json.dumps({k: v for k, v in (parse(text)).items() if k != "chat_template"}, ensure_ascii=False)
        paths = dict.fromkeys(match[0] for match in LOCAL_PATH.finditer(text))
        found += [f"{name}: the path {path}" for path in list(paths)[:MAX_SHOWN]]
    if found:
        raise UserError(
            "files that would be uploaded hold what belongs to this machine",
            where=str(folder),
            fix="take it out of README.md; in other files, of the model that was trained, and export again",
            details=found,
        )


def parse(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


# ---- the upload ------------------------------------------------------------------------------------------------------


def connect(token: str) -> Any:
    from huggingface_hub import HfApi

    return HfApi(token=token)


def upload(planned: Upload, *, public: bool, token: str | None = None, connect: Callable[[str], Any] = connect) -> str:
    """Makes the repository if there is none, and adds the files in one commit; returns its address. ``token``: by
    default that of the environment.

    UserError without a token, for a public repository unless ``public``, and for whatever the hub answers.
    """
    token = (token or os.environ.get(TOKEN, "")).strip()
    if not token:
        raise UserError(
            "there is no token to upload with",
            where=TOKEN,
            why="it is read from the environment alone, and written nowhere",
            fix=f"export {TOKEN}=..., a token with write access from huggingface.co/settings/tokens",
        )
    import httpx
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.errors import RepositoryNotFoundError

    api = connect(token)
    try:
        try:
            exists, is_private = True, api.repo_info(planned.repository, repo_type="model").private
        except RepositoryNotFoundError:
            exists, is_private = False, True
        if exists and not is_private and not public:
            raise UserError(
                "the repository is public",
                where=planned.repository,
                why="a push is private unless asked",
                fix="add --public, or choose another name",
            )
        if not exists:
            api.create_repo(planned.repository, private=planned.private, repo_type="model")
        operations = [
            CommitOperationAdd(name, planned.replaced.get(name) or str(planned.folder / name)) for name in planned.sizes
        ]
        done = api.create_commit(
            planned.repository,
            operations=operations,
            commit_message="Upload by manyhands",
            repo_type="model",
        )
    except (OSError, httpx.HTTPError, ValueError) as error:
        raise UserError(
            "the hub did not take the upload",
            where=planned.repository,
            why=str(error).replace(token, "***").strip().partition("\n")[0] or type(error).__name__,
            fix="check the network, HF_ENDPOINT, and that the token may write to this owner's repositories; "
            "the same command sends again what is missing",
            exit_code=EXIT_FAILED,
        ) from None
    note = " (the repository was private before, and stays so)" if exists and is_private and public else ""
    return f"{done.commit_url}{note}"
