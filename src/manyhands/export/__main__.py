"""``python -m manyhands.export SOURCE --output DIR``: a model or adapter folder, or a GGUF file, from a checkpoint,
written and verified.

One process on the CPU, whatever trained it: the base is loaded, the checkpoint put into it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from manyhands.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError
from manyhands.core.files import explain_refused, nearest_folder, read_json, refuse_outside_links
from manyhands.core.text import print_safely

if TYPE_CHECKING:
    from torch import nn

    from manyhands.config.schema import RunConfig
    from manyhands.launch.run.folder import RunFolder
    from manyhands.planner.types import Plan

PROBE_TOKENS = 16


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "manyhands export", description="Write a model or adapter folder from a run's checkpoint, and verify it."
    )
    parser.add_argument(
        "source", type=Path, help="a run's folder (its newest or best checkpoint), or one checkpoint's folder"
    )
    parser.add_argument("--output", type=Path, required=True, help="a new or empty folder")
    parser.add_argument(
        "--merge", action="store_true", help="lora: write the full model with the adapter merged into its weights"
    )
    parser.add_argument("--by-expert", action="store_true", help="an adapter with one pair of factors an expert")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto")
    parser.add_argument("--gguf", metavar="TYPE", help="write one GGUF file of this type, of a merged or full model")
    parser.add_argument("--llama-cpp", type=Path, help="llama.cpp's folder, or its convert_hf_to_gguf.py")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    source, output = arguments.source, arguments.output
    try:
        if arguments.gguf:
            print(export_gguf(source, output, arguments.gguf, dtype=arguments.dtype, llama_cpp=arguments.llama_cpp))
        elif arguments.by_expert:
            print(export_by_expert(source, output, dtype=arguments.dtype))
        else:
            print(export_source(source, output, merge=arguments.merge, dtype=arguments.dtype))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if (refused := explain_refused(error, output)) is None:
            raise
        print(refused, file=sys.stderr)
        return refused.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def export_source(
    source: Path, output: Path, *, merge: bool = False, dtype: str = "auto", by_expert: bool = False
) -> str:
    """Writes ``output`` and verifies it in a fresh process; returns the line that says so. ``dtype``: of the saved
    weights; auto is the run's own. ``by_expert``: the card is that of an adapter whose experts are then split.
    """
    from manyhands.checkpoint.manifest import TRAIN_STATE
    from manyhands.export.card import make_card
    from manyhands.export.files import refuse_foreign
    from manyhands.export.outputs import choose_output_dtype, write_output
    from manyhands.export.record import find_export, mark_verified, name_source
    from manyhands.export.verify_process import verify_in_fresh_process
    from manyhands.facts.adapter import CONFIG
    from manyhands.facts.experts import vllm_reads
    from manyhands.facts.identity import check_files
    from manyhands.launch.run.folder import RunFolder
    from manyhands.launch.run.resume import refuse_other_checkpoint

    run_folder, checkpoint = find_checkpoint(source)
    print(f"exporting {checkpoint}", flush=True)
    run = RunFolder(run_folder)
    config, plan = read_for_export(run, dtype)
    refuse_other_checkpoint(checkpoint, run.read_config(), run)  # as it was asked for, in whatever dtype it is saved
    is_adapter = config.method.trains_adapters and not merge
    if merge:
        refuse_merge(config, plan, run_folder)
    base = Path(plan.model_folder)
    kind: Literal["adapter", "model", "merged"] = "adapter" if is_adapter else "merged" if merge else "model"
    saved_dtype = choose_output_dtype(kind, plan, config)
    made_of = name_source(kind, saved_dtype, checkpoint)
    if found := find_export(output, made_of):
        return f"already there, verified: {output}: {found}"
    refuse_foreign(output, replace=False)
    check_files(Path(plan.model_folder), config, plan.model_files, weights=plan.keeps_base)
    if merge and "mxfp4" in plan.converters:
        print(f"experts in MXFP4 are dequantized: the merged model has all weights in {saved_dtype}")
    with explain_removed(checkpoint):
        model = load_trained(plan, config, checkpoint)
        state = json.loads((checkpoint / TRAIN_STATE).read_text(encoding="utf-8"))
    step, divergence = state["step"], state.get("divergence", "")
    versions = (read_json(run.report_json) or {}).get("versions")
    card = partial(
        make_card,
        kind,
        config,
        plan,
        run_folder,
        step=step,
        dtype=saved_dtype,
        versions=versions,
        divergence=divergence,
        by_expert=by_expert,
    )
    with tempfile.TemporaryDirectory() as scratch:
        reference, probe = Path(scratch) / "reference.json", Path(scratch) / "probe.safetensors"
        write_output(kind, output, model, plan, config, rank=0, reference_path=reference, card=card)
        compute_probe(model, probe)
        del model
        said = verify_in_fresh_process(output, reference, base=base if is_adapter else None, probe_path=probe) or ""
    mark_verified(output, said.partition(": ")[2], made_of)
    parameters = (read_json(output / CONFIG) or {}).get("target_parameters") if is_adapter and not by_expert else ()
    if not vllm_reads((read_json(base / "config.json") or {}).get("model_type", ""), parameters or ()):
        said += "\nto serve it with vLLM or llama.cpp, export it with --by-expert or --merge: see its README.md"
    return said


def export_by_expert(source: Path, output: Path, *, dtype: str = "auto") -> str:
    """Writes ``output`` with one pair of factors an expert, of the adapter that is verified first."""
    from manyhands.export.by_expert import find_single_experts, split_experts
    from manyhands.export.files import refuse_foreign
    from manyhands.export.record import mark_verified
    from manyhands.launch.run.folder import RunFolder

    run_folder, checkpoint = find_checkpoint(source)
    config, plan = read_for_export(RunFolder(run_folder), dtype)
    if not config.method.trains_adapters:
        raise UserError("--by-expert is for adapters", where=str(source), fix="leave --by-expert out")
    refuse_foreign(output, replace=False)
    base = Path(plan.model_folder)
    find_single_experts(base)  # before anything is loaded
    with tempfile.TemporaryDirectory(prefix=".adapter-", dir=nearest_folder(output.parent)) as scratch:
        adapter = Path(scratch) / "adapter"
        verified = export_source(checkpoint, adapter, dtype=dtype, by_expert=True)
        print(verified.replace(str(adapter), "the adapter of all experts"), flush=True)
        said = split_experts(adapter, output, base)
    mark_verified(output, said.partition(": ")[2])
    return said


def export_gguf(source: Path, output: Path, kind: str, *, dtype: str = "auto", llama_cpp: Path | None = None) -> str:
    """Writes ``output`` with one GGUF file and compares that with the model it was made of; returns the line that says
    so. ``source``: a run, a checkpoint or a model's folder; an adapter is merged.
    """
    from manyhands.export.files import refuse_foreign
    from manyhands.export.gguf_file import find_tools, refuse_own_code, refuse_towers, write_gguf_folder
    from manyhands.export.record import find_export, name_folder, name_source
    from manyhands.launch.run.folder import RunFolder

    tools = find_tools(llama_cpp, kind)  # before anything is loaded
    if not (source / "run.json").is_file() and (source / "config.json").is_file():
        refuse_outside_links(source)
        made_of = name_folder(f"GGUF {kind}", source)
        if found := find_export(output, made_of):
            return f"already there, verified: {output}: {found}"
        refuse_foreign(output, replace=False)
        refuse_own_code(source)
        refuse_towers(source)
        if dtype != "auto":
            raise UserError(
                "--dtype is for checkpoints, and this is a model's folder",
                where=str(source),
                fix="leave --dtype out: --gguf alone decides what the file holds",
            )
        said = write_gguf_folder(source, output, source.resolve().name, kind, tools)
        return note_source(output, said, made_of)
    run_folder, checkpoint = find_checkpoint(source)
    config, plan = read_for_export(RunFolder(run_folder), dtype)
    made_of = name_source(f"GGUF {kind}", dtype, checkpoint)
    if found := find_export(output, made_of):
        return f"already there, verified: {output}: {found}"
    refuse_foreign(output, replace=False)
    refuse_towers(Path(plan.model_folder))
    with tempfile.TemporaryDirectory(prefix=".gguf-", dir=nearest_folder(output.parent)) as scratch:
        model = Path(scratch) / config.name
        said = export_source(checkpoint, model, merge=config.method.trains_adapters, dtype=dtype)
        print(said, flush=True)
        if not config.model.trust_remote_code:
            refuse_own_code(model)
        said = write_gguf_folder(model, output, config.name, kind, tools)
    return note_source(output, said, made_of)


def note_source(output: Path, said: str, made_of: str) -> str:
    """Writes down what a verified ``output`` was made of, so that a second export finds it; returns ``said``."""
    from manyhands.export.record import mark_verified, read_record

    if record := read_record(output):
        mark_verified(output, record.verified, made_of)
    return said


def read_for_export(run: RunFolder, dtype: str) -> tuple[RunConfig, Plan]:
    """The run's configuration and its plan for one process on the CPU; ``dtype`` takes the place of output.dtype."""
    config = run.read_config()
    plan = plan_one_process(run.read_plan(), config)
    if dtype == "auto":
        return config, plan
    output = config.output.model_copy(update={"dtype": dtype})
    return config.model_copy(update={"output": output}), plan.model_copy(update={"output_dtype": dtype})


def refuse_merge(config: RunConfig, plan: Plan, run_folder: Path) -> None:
    """UserError where there is nothing to merge, or nothing that it can be merged into."""
    if not config.method.trains_adapters:
        raise UserError(
            "--merge is for runs with method.name=lora or qlora",
            where=str(run_folder),
            fix="leave --merge out: the run trained the model's own weights",
        )
    if plan.stored_nf4 is not None:
        raise UserError(
            "--merge does not go with a model whose weights are stored in NF4",
            where=plan.model_folder,
            fix="leave --merge out; PEFT merges the adapter into the model in 16 bits",
        )


def find_checkpoint(source: Path) -> tuple[Path, Path]:
    """(run's folder, checkpoint's folder). Of a run that keeps its best checkpoint, the best; else the newest."""
    from manyhands.checkpoint import checkpoint_folder, newest_checkpoint
    from manyhands.checkpoint.manifest import MANIFEST, TRAIN_STATE
    from manyhands.launch.run.folder import RunFolder

    if (source / MANIFEST).is_file():
        return source.resolve().parent.parent, source.resolve()
    if not (source / "run.json").is_file():
        raise UserError(
            "this folder is neither a run nor a checkpoint",
            where=str(source),
            why=f"it has neither run.json nor {MANIFEST}",
            fix="give runs/NAME, or runs/NAME/checkpoints/step-000010",
        )
    newest = newest_checkpoint(source / "checkpoints")
    if newest is None:
        raise UserError(
            "the run has no checkpoint",
            where=str(source / "checkpoints"),
            fix="start the run again and let it save one",
        )
    best = (read_json(newest / TRAIN_STATE) or {}).get("best_step")
    keeps_best = RunFolder(source).read_config().checkpoint.keep_best
    if not keeps_best or not best:  # 0: the model before training, a mark to pass
        return source, newest
    chosen = checkpoint_folder(source / "checkpoints", best)
    if not (chosen / MANIFEST).is_file():  # another one in its place would be taken for it
        raise UserError(
            f"the best checkpoint, of step {best}, is not there",
            where=str(chosen),
            why=f"it is no complete checkpoint, or was set aside as {chosen.name}.damaged",
            fix=f"restore it from a copy, or name the newest one: manyhands export {newest}",
        )
    return source, chosen


@contextmanager
def explain_removed(checkpoint: Path) -> Iterator[None]:
    """UserError where its run, which is under way, removes the checkpoint while it is read, whatever error that is."""
    try:
        yield
    except Exception as error:
        if checkpoint.exists():
            raise
        raise UserError(
            "the checkpoint was removed while it was read",
            where=str(checkpoint),
            why="a run that is under way keeps only its newest checkpoints (checkpoint.keep_last)",
            fix="export the run again, which takes the newest; a larger checkpoint.keep_last leaves more time",
            exit_code=EXIT_FAILED,
        ) from error


def plan_one_process(plan: Plan, config: RunConfig) -> Plan:
    """The run's plan for this process alone, on the CPU, with the base model where it lies now."""
    from manyhands.planner.converters import CONVERTERS
    from manyhands.planner.layout import change, mesh_of

    folder = plan.model_folder
    if not Path(folder).is_dir():
        from manyhands.facts.hub import locate_model

        folder = str(locate_model(config.model.name, config.model.revision, config.model.init == "pretrained"))
    layout = change(
        plan.layout,
        device="cpu",
        mesh=mesh_of("single", 1),
        strategy="single",
        compile=False,
        offload="none",
        offload_activations=False,
        activation_checkpointing="none",
        lighter_layers=0,
    )
    converters = tuple(
        name for name in plan.converters if name not in CONVERTERS or not CONVERTERS[name].only_while_training
    )
    return plan.model_copy(
        update={"layout": layout, "attention": "sdpa", "converters": converters, "model_folder": folder}
    )


def load_trained(plan: Plan, config: RunConfig, checkpoint: Path) -> nn.Module:
    """The base with the checkpoint's trained weights, in evaluation mode."""
    import torch

    from manyhands.checkpoint import load_checkpoint
    from manyhands.convert.build import build_on_meta, load_weights, make_all
    from manyhands.convert.protocol import Context

    context = Context(config, plan, torch.device("cpu"), resumes=True)
    converters = make_all(context)
    model: nn.Module = build_on_meta(context, converters).model
    load_weights(context, converters, model, context.device)
    load_checkpoint(checkpoint, model, None)
    return model.eval()


def compute_probe(model: nn.Module, path: Path) -> None:
    """Logits of the model in memory on a few tokens spread over the vocabulary."""
    import torch

    from manyhands.export.reference import save_probe

    weight = next(p for p in model.parameters() if p.is_floating_point())
    vocab_size = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    ids = torch.linspace(0, vocab_size - 1, PROBE_TOKENS).long()[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    save_probe(path, ids, logits, str(weight.dtype).removeprefix("torch."))


if __name__ == "__main__":
    print_safely()
    sys.exit(main(sys.argv[1:]))
