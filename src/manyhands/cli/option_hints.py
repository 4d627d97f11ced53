"""Unreadable command lines, such as other tools' options, and what to write here (``importers/hints.py``)."""

import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from manyhands.core.errors import UserError

HAVE_KEYS = ("train", "plan", "data", "submit", "prove", "init")  # commands on a run file
TAKE_MODEL = ("generate", "chat", "serve", "eval", "export", "push", "import", "tensorboard")  # as their first argument


@cache
def _table(name: str) -> dict[str, str]:
    """A table of ``option_hints.toml``: what to write, by each of the words that it is the answer to."""
    table = tomllib.loads(Path(__file__).with_name("option_hints.toml").read_text(encoding="utf-8"))[name]
    return {word: answer for answer, words in table.items() for word in words.split()}


def explain_usage(error: Any, words: Sequence[str], ctx: Any = None) -> UserError | None:
    """What typer refuses on a command line, in our words; None for any other error, and where help is to be shown.

    ``words`` follow the command's name; ``ctx`` is the context that invoked it. Kinds are told by their names, as some
    versions of typer bring click's classes and others import them.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "UsageError" not in kinds or "NoArgsIsHelpError" in kinds:
        return None
    at: Any = getattr(error, "ctx", None)
    path = at.command_path.split()[1:] if at else [getattr(ctx, "invoked_subcommand", None) or ""]
    command = " ".join(path).strip()
    place = f"manyhands {command}".strip()
    help_of = f"`{place} -h`"
    message = str(error.message).removeprefix("Value error, ").rstrip(".")
    message = message[:1].lower() + message[1:]
    if "NoSuchOption" in kinds:
        known = [name for parameter in at.command.params for name in parameter.opts] if at else []
        return explain_option(command, error.option_name, words, known, _commands_by_option(at))
    if "MissingParameter" in kinds:
        needed = " ".join(_usage(parameter) for parameter in at.command.params if parameter.required)
        about = f"; {_name(error.param)}: {_about(error.param)}"
        return UserError(f"{_name(error.param)} is missing", where=place, fix=f"write {place} {needed}{about}")
    if "BadParameter" in kinds and error.param is not None:
        fix = f"write {_usage(error.param)}: {_about(error.param)}"
        return UserError(f"{_name(error.param)}: {message}", where=place, fix=fix)
    if named := re.match(r"no such command '(.*?)'", message):
        return UserError(f"there is no command {named[1]}", where=place, fix=_other_command(named[1], at))
    if extra := re.fullmatch(r"got unexpected extra arguments?(?:\(s\))? \((.*)\)", message, re.DOTALL):
        return UserError(
            f"{place} takes no argument {extra[1]}", where=place, fix=_place_extra(command, extra[1], help_of)
        )
    option = getattr(error, "option_name", None)
    if option is not None and "requires" in message:
        return UserError(f"{option} needs a value", where=place, fix=f"write {option} VALUE; {help_of} explains it")
    return UserError(message, where=place, fix=f"{help_of} shows what it takes")


def _name(parameter: Any) -> str:
    """As a user writes it: an option's longest form, an argument's metavar."""
    is_option = str(parameter.opts[0]).startswith("-")
    return str(max(parameter.opts, key=len) if is_option else parameter.metavar or parameter.name.upper())


def _usage(parameter: Any) -> str:
    """``--to OWNER/NAME``."""
    name = _name(parameter)
    return f"{name} {parameter.metavar or 'VALUE'}" if name.startswith("-") else name


def _about(parameter: Any) -> str:
    return str(parameter.help or f"see `-h` for {_name(parameter)}").removesuffix(".")


def _commands_by_option(ctx: Any) -> dict[str, str]:
    """``merge`` to ``export --merge``: every option of our commands, and the first that has it."""
    found: dict[str, str] = {}
    root = ctx.find_root().command if ctx is not None else None
    for name, command in getattr(root, "commands", {}).items():
        for parameter in command.params:
            for option in (opt for opt in parameter.opts if opt.startswith("--")):
                found.setdefault(option.lstrip("-").replace("-", "_"), f"manyhands {name} {option}")
    return found


def _other_command(word: str, ctx: Any) -> str:
    from manyhands.config.text import nearest_name

    if ctx is not None and ctx.parent is not None:  # runs
        if (Path(word) / "run.json").is_file() or (Path("runs") / word / "run.json").is_file():
            return f"manyhands runs show {word}"
        if Path(word).is_dir():
            return f"manyhands runs list {word}"
    elif Path(word).is_dir():
        return (
            f"name a command: `manyhands runs show {word}` for a run, `manyhands runs list {word}` for a folder of runs"
        )
    elif Path(word).suffix in (".yaml", ".yml", ".toml", ".json") or "=" in word:
        return f"manyhands train {word if '=' not in word else f'RUN.yaml {word}'}"
    elif other := _table("commands").get(word.lower()):
        return f"manyhands {other}"
    known = getattr(ctx.command, "commands", {}) if ctx is not None else {}
    if near := nearest_name(word, known):
        return f"did you mean {near}?"
    return f"choose one of {', '.join(known)}"


def _place_extra(command: str, extra: str, help_of: str) -> str:
    from manyhands.config.keys import table

    if extra.partition("=")[0] in table():
        return f"keys are set where a run starts: manyhands train RUN.yaml {extra}"
    if answer := _table("extra").get(command):
        return f"write {answer.format(word=shlex.quote(extra))}, or leave it out"
    return f"leave it out, or quote a name that contains spaces; {help_of} shows what it takes"


def explain_option(
    command: str,
    option: str,
    words: Sequence[str],
    known: Sequence[str],
    others: Mapping[str, str] = MappingProxyType({}),
) -> UserError:
    """``option`` of ``words``, unknown to ``command``, with what to write; ``others``: commands that have it."""
    word = next((word for word in words if word.partition("=")[0] == option), None)
    word = word or next((word for word in words if option != "-" and word.startswith(option)), option)
    name, _, value = word.partition("=")
    following = words[words.index(word) + 1] if word in words and word != words[-1] else ""
    if not value and not following.startswith("-"):
        value = following
    on_file = command in HAVE_KEYS
    answer = _write if on_file else _write_without_keys
    return UserError(
        f"there is no option {name}",
        where=f"manyhands {command}".strip(),
        why="keys of the run file are set as section.key=value, without dashes" if on_file else "",
        fix=answer(command, name.lstrip("-").replace("-", "_").lower(), value, known, others),
    )


def _write(command: str, name: str, value: str, known: Sequence[str], others: Mapping[str, str]) -> str:
    from manyhands.config.keys import table
    from manyhands.config.text import nearest_name
    from manyhands.importers.hints import hint, nearest

    options = _by_name(known)
    if name in options:  # --node_rank
        return f"write {options[name]}"
    if name.startswith(("fsdp_", "use_fsdp")) and name not in _table("stand_for"):
        return "write parallel.strategy=fsdp, without dashes; accelerate's own file goes to --accelerate-config FILE"
    if name in _table("launch"):
        return _table("launch")[name].format(command=command)
    path = _table("stand_for").get(name, name)
    key = path if path in table() else nearest(path)
    if key in table() and key.rpartition(".")[2] == path.rpartition(".")[2]:
        return f"write {key}={value if _may_be(key, value) else '...'}: {table()[key].sentence}"
    from manyhands.config.read import parse_or_text

    told = hint(path, parse_or_text(value) if value else True)
    if told.startswith((";", ": did you mean")):
        if name in others:
            return f"it is an option of another command: {others[name]}"
        if near := nearest_name(name, options):
            return f"did you mean {options[near]}?"
    options_too = f", `manyhands {command} -h` all options" if told.startswith(";") else ""
    return told.removeprefix(": ").removeprefix("; ") + options_too


def _write_without_keys(command: str, name: str, value: str, known: Sequence[str], others: Mapping[str, str]) -> str:
    """For a command that starts no run: its own options, those of other commands, keys of a run file."""
    from manyhands.config.keys import table
    from manyhands.config.text import nearest_name
    from manyhands.importers.hints import nearest

    if not command:
        where = others.get(name)
        return f"it is an option of a command: {where}" if where else "name a command first: `manyhands -h` lists them"
    options = _by_name(known)
    if name in options:
        return f"write {options[name]}"
    if told := _table("of_command").get(f"{command}/{name}"):
        return told
    if (same := _table("same").get(name)) in known:
        return f"write {same} {value}".rstrip()
    if name in _table("first") and command in TAKE_MODEL:
        return _table("first")[name].format(command=command, value=value or "RUN")
    if name in others:
        return f"it is an option of another command: {others[name]}"
    if near := nearest_name(name, options):
        return f"did you mean {options[near]}?"
    if (key := nearest(_table("stand_for").get(name, name))) in table():
        return f"{key} is a key of the run file, for training: manyhands train RUN.yaml {key}={value or '...'}"
    return f"`manyhands {command} -h` lists its options"


def _may_be(key: str, value: str) -> bool:
    """Whether ``value`` is one of the words that are allowed, where only words are."""
    from manyhands.config.keys import table

    words = re.split(", | or ", table()[key].allowed)
    return bool(value) and (f"`{value}`" in words or not all(re.fullmatch("`.+`", word) for word in words))


def _by_name(options: Sequence[str]) -> dict[str, str]:
    return {option.lstrip("-").replace("-", "_"): option for option in options if option.startswith("--")}
