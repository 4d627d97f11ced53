"""``manyhands import``: another tool's file as a run file of ours, and what becomes of each of its keys."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.core.errors import EXIT_FAILED, UserError

if TYPE_CHECKING:
    from manyhands.importers.translation import Translation


def import_file(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File of another tool: Axolotl, LLaMA-Factory, TRL, ...")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Run file to write; it must not exist.")] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="GPUs to multiply per-GPU batches by (default: this machine's).")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what becomes of each key and the run file as JSON.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse keys that are only substituted.")] = False,
) -> None:
    """Translate another tool's file into a run file. Lists what becomes of every key.

    Without --output the run file is printed, and the list on standard error. Exit code 1 if a key is refused."""
    from manyhands.importers.report import as_json as plain
    from manyhands.importers.report import describe, native_yaml

    if output is not None and output.exists():
        raise UserError("the file already exists", where=str(output), fix="choose another name for --output")
    translation = _translate(file, gpus, strict)
    if as_json:
        print(json.dumps(plain(translation), indent=2, ensure_ascii=False, default=str))
    else:
        print(describe(translation), file=sys.stdout if output else sys.stderr)
    if translation.findings():
        print(f"\n{file} cannot be run as it is: change what is refused above", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED)
    if output is not None:
        from manyhands.core.files import write_atomically

        write_atomically(output, native_yaml(translation))
        print(f"\nwrote {output}: `manyhands plan {output}` shows what it would do")
    elif not as_json:
        print(native_yaml(translation), end="")


def _translate(file: Path, gpus: int | None, strict: bool) -> Translation:
    from manyhands.config.read import read_run_file
    from manyhands.importers.load import config_from_mapping, resolve_paths
    from manyhands.importers.recognize import recognize, refuse_settings, translate
    from manyhands.importers.translation import clean_name
    from manyhands.launch.run.file import probe_host

    source = read_run_file(file)
    importer = recognize(source.mapping)
    if importer is None:
        refuse_settings(source)
        raise UserError(
            "this is already a run file of manyhands, or its format is unknown",
            where=str(file),
            fix=f"`manyhands plan {file}` checks it",
        )
    context = replace(probe_host(strict=strict), folder=file.absolute().parent, gpus=gpus)
    translation = translate(source, importer, context)
    translation.mapping.setdefault("name", clean_name(file.stem))
    resolve_paths(translation.mapping, context.folder)
    if not translation.findings():
        config_from_mapping(translation.mapping, where=str(file), origins=translation.origins)
    return translation
