"""``manyhands export``: a folder or GGUF file of a run; ``manyhands push``: a folder to the hub. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer

from manyhands.cli import process
from manyhands.cli.run_file import find_run_folder
from manyhands.core.errors import UserError

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # what people write


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="A run's folder or run file, or one of its checkpoints; for --gguf a model's folder too.",
        ),
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write; it must not exist.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into the model's weights.")] = False,
    by_expert: Annotated[
        bool, typer.Option("--by-expert", help="Write an adapter of experts with one pair of factors an expert.")
    ] = False,
    dtype: Annotated[
        str,
        typer.Option("--dtype", help="Dtype of the saved weights: bfloat16, float16 or float32; auto: the run's own."),
    ] = "auto",
    gguf: Annotated[
        str | None, typer.Option("--gguf", metavar="TYPE", help="Write a GGUF file: q8_0, q4_k_m, bf16, ...; merges.")
    ] = None,
    llama_cpp: Annotated[
        Path | None, typer.Option("--llama-cpp", help="With --gguf: llama.cpp's folder, if it is not on PATH.")
    ] = None,
) -> None:
    """Export an adapter, a model or a GGUF file; verify it."""
    dtype = DTYPES.get(dtype, dtype)
    if dtype not in ("auto", *DTYPES.values()):
        raise UserError(
            f"{dtype!r} is no dtype of saved weights",
            where="--dtype",
            fix="choose bfloat16, float16, float32, or auto; types of a GGUF file, such as q8_0, go to --gguf",
        )
    if llama_cpp is not None and gguf is None:
        raise UserError("--llama-cpp is for --gguf", where="--llama-cpp", fix="add --gguf q8_0, or leave it out")
    if by_expert and (merge or gguf):
        raise UserError("--by-expert writes an adapter", where="--by-expert", fix="leave out --merge and --gguf, or it")
    gguf = gguf.lower() if gguf else None
    source = find_run_folder(source)
    arguments = [str(source), "--output", str(output or default_output(source, merge, gguf, by_expert))]
    arguments += ["--merge"] if merge else []
    arguments += ["--by-expert"] if by_expert else []
    arguments += ["--dtype", dtype] if dtype != "auto" else []
    arguments += ["--gguf", gguf] if gguf else []
    arguments += ["--llama-cpp", str(llama_cpp)] if llama_cpp is not None else []
    raise typer.Exit(process.run_module("manyhands.export", arguments))


def default_output(source: Path, merge: bool, gguf: str | None = None, by_expert: bool = False) -> Path:
    """``export``, ``merged``, ``by-expert`` or ``gguf-q8_0`` and any step, in the run's folder or beside a model's."""
    kind = f"gguf-{gguf}" if gguf else "merged" if merge else "by-expert" if by_expert else "export"
    if (source / "run.json").is_file():
        return source / kind
    source = source.resolve()
    if (source / "config.json").is_file():
        return source.with_name(f"{source.name}-{kind}")
    return source.parent.parent / f"{kind}-{source.name}"


def push(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_FOLDER", help="A finished run (its adapter, else its model), or a folder that was exported."
        ),
    ],
    to: Annotated[str, typer.Option("--to", metavar="OWNER/NAME", help="The model's name on the hub.")],
    yes: Annotated[bool, typer.Option("--yes", help="Upload; without it, show what would be uploaded.")] = False,
    public: Annotated[bool, typer.Option("--public", help="A public repository; without it, a private one.")] = False,
    base: Annotated[
        str | None, typer.Option("--base", help="The base model's name on the hub, for an adapter trained on a folder.")
    ] = None,
) -> None:
    """Upload a verified result to the Hugging Face hub. The token is HF_TOKEN of the environment.

    Without --yes nothing is sent. The repository is private unless --public is given."""
    from manyhands.export.push import plan_upload, upload
    from manyhands.launch.run.folder import describe_earlier_result

    folder = find_run_folder(source)
    planned = plan_upload(folder, to, private=not public, base=base)
    print(planned.describe())
    if note := describe_earlier_result(folder):
        print(note)
    if not yes:
        print("nothing was sent; add --yes to upload")
        return
    print(f"uploaded: {upload(planned, public=public)}")
