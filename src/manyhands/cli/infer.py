"""Commands on a trained model; each starts ``python -m manyhands.infer``."""

import glob
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from manyhands.cli import process
from manyhands.cli.run_file import find_run_folder
from manyhands.core.errors import UserError
from manyhands.core.files import parse_json
from manyhands.core.text import report_aside
from manyhands.infer.settings import SERVED, GenerationSettings
from manyhands.infer.text_metrics import TEXT_METRICS, check_metrics

RUN_HELP = "A run's folder, its model/ or adapter/, or its run file."
Folder = Annotated[Path | None, typer.Argument(metavar="RUN", help=RUN_HELP)]
Model = Annotated[str | None, typer.Option("--model", "-m", help="Instead of RUN: hub name or folder of a model.")]
Adapter = Annotated[
    Path | None, typer.Option("--adapter", metavar="DIR", help="Instead of RUN: folder of an adapter, beside --model.")
]
Base = Annotated[
    str | None, typer.Option("--base", help="Base model of the adapter (default: from its configuration).")
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", metavar="N", help="Maximum number of new tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 takes the most likely token; above it, sample.")]
TopP = Annotated[float, typer.Option("--top-p", help="Sample from the likeliest tokens that reach this sum.")]
TopK = Annotated[int, typer.Option("--top-k", metavar="K", help="Sample from the K likeliest tokens; 0: from all.")]
RepetitionPenalty = Annotated[
    float, typer.Option("--repetition-penalty", help="Above 1, tokens that have occurred become less likely.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of sampled answers, with each prompt's number.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before this text; repeatable.")
]
System = Annotated[str | None, typer.Option("--system", help="System prompt.")]
Tools = Annotated[
    Path | None, typer.Option("--tools", metavar="FILE", help="JSON list of functions for the chat template.")
]
Gpus = Annotated[int | None, typer.Option("--gpus", metavar="N", help="Number of GPUs (default: all).")]
Processes = Annotated[int, typer.Option("--processes", metavar="N", min=1, help="On the CPU: copies of the model.")]
DeviceMap = Annotated[
    Literal["auto", "none", "balanced", "sequential"],
    typer.Option(
        "--device-map",
        help="Copies of the model: on as few GPUs as hold one (auto), on each (none), or one on all GPUs, its layers "
        "divided evenly (balanced) or GPU by GPU (sequential).",
    ),
]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", metavar="N", min=1, help="Most prompts in a batch (default: by memory).")
]
Engine = Annotated[
    Literal["transformers", "vllm"], typer.Option("--engine", help="vllm: where it is installed, same greedy answers.")
]

DEFAULT_METRICS = "loss,perplexity,accuracy"
NEW_TOKENS = 256
EvalRun = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="A run's folder or run file; with --data also a model folder.")
]
Data = Annotated[
    str | None, typer.Option("--data", metavar="FILE", help="Rows to evaluate on (default: the run's held-out ones).")
]
Metrics = Annotated[
    str,
    typer.Option(
        "--metrics",
        help="Of loss, perplexity, accuracy, exact_match, f1, rouge1, rouge2, rougeL; of pairs "
        "preference_accuracy, reward_margin.",
    ),
]
Extract = Annotated[
    str | None,
    typer.Option(
        "--extract",
        metavar="PATTERN",
        help="What exact_match compares: gsm8k, number, boxed, choice, or a regular expression.",
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Answer at most N samples.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", metavar="N", min=1, help="Samples of at most N tokens.")]
Tasks = Annotated[str | None, typer.Option("--tasks", metavar="NAMES", help="Tasks of lm-eval, instead of --metrics.")]
FewShot = Annotated[int | None, typer.Option("--num-fewshot", metavar="N", min=0, help="lm-eval: examples.")]
IncludePath = Annotated[Path | None, typer.Option("--include-path", help="lm-eval: folder of own tasks.")]
ApplyChatTemplate = Annotated[
    bool, typer.Option("--apply-chat-template", help="lm-eval: prompts in the model's chat template.")
]
EvalOutput = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder for figures and answers (default: RUN/eval).")
]


def find_model(
    verb: str, run: Path | None, base: str | None, model: str | None, adapter: Path | None
) -> dict[str, Any]:
    """Folder and base of RUN, or of --model and --adapter in its place. A model of the hub is downloaded."""
    from manyhands.facts.adapter import CONFIG
    from manyhands.facts.hub import locate_model

    if model is None and adapter is None:
        if run is None:
            raise UserError(
                "no model was given",
                where="command line",
                fix=f"write manyhands {verb} RUN; RUN: {RUN_HELP} Or --model OWNER/NAME, and --adapter DIR beside it",
            )
        return {"folder": str(find_run_folder(run)), "base": base}
    option = "--adapter" if model is None else "--model"
    if run is not None:
        raise UserError(f"a run and {option} are both given", where=f"{run} {option}", fix="leave one of them out")
    if adapter is None:
        assert model is not None
        if base is not None:
            raise UserError("--base has no effect on --model", where="--base", fix="leave it out, or add --adapter DIR")
        if (Path(model) / "run.json").is_file():
            return {"folder": model, "base": None}
        return {"folder": str(locate_model(model, None, True, report=report_aside)), "base": None}
    if model is not None and base is not None:
        raise UserError("--model and --base both name the adapter's base", where="--base", fix="leave it out")
    adapter = adapter / "adapter" if (adapter / "run.json").is_file() else adapter
    if not (adapter / CONFIG).is_file():
        raise UserError(
            "there is no adapter in this folder",
            where=f"--adapter {adapter}",
            why=f"it has no {CONFIG}" if adapter.is_dir() else "there is no such folder",
            fix="name the folder of an adapter as PEFT saves it, such as runs/NAME/adapter",
        )
    return {"folder": str(adapter), "base": model or base}


def _check_prompts(prompt: str | None, input: Path | None, output: Path | None) -> None:
    """UserError unless there is one prompt, or a file of them and one to write."""
    if (input is None) == (prompt is None):
        raise UserError(
            "generate needs --prompt or --input" if input is None else "--prompt and --input are both given",
            where="command line",
            fix='manyhands generate RUN --prompt "...", or --input prompts.jsonl --output answers.jsonl; '
            "manyhands chat RUN for a conversation",
        )
    if (input is None) != (output is None):
        raise UserError("--input and --output belong together", where="command line", fix="give both, or --prompt")


def generate(
    folder: Folder = None,
    model: Model = None,
    adapter: Adapter = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="One prompt.")] = None,
    input: Annotated[
        Path | None, typer.Option("--input", metavar="FILE", help="JSONL of prompts: prompt or messages, tools.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="JSONL to write: each row with its answer.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")] = False,
    image: Annotated[
        list[str] | None, typer.Option("--image", help="Image that --prompt is about; may be given several times.")
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    system: System = None,
    tools: Tools = None,
    base: Base = None,
    gpus: Gpus = None,
    processes: Processes = 1,
    device_map: DeviceMap = "auto",
    batch_size: BatchSize = None,
    engine: Engine = "transformers",
) -> None:
    """Answer a prompt, or a file of prompts on all GPUs. A file that a kill interrupts is continued."""
    sampling = (temperature, top_p, top_k, repetition_penalty, seed)
    settings = GenerationSettings(max_new_tokens, *sampling, tuple(stop or ())).to_json()
    placement = dict(gpus=gpus, processes=processes, device_map=device_map, batch_size=batch_size, engine=engine)
    found = find_model("generate", folder, base, model, adapter)
    _check_prompts(prompt, input, output)
    if input is None:
        # Options of --input that would do nothing.
        defaults = dict(gpus=None, processes=1, device_map="auto", batch_size=None, engine="transformers")
        given = [name for name, value in placement.items() if value != defaults[name]] + ["overwrite"] * overwrite
        if given:
            raise UserError(f"--{given[0].replace('_', '-')} has an effect with --input only", where="command line")
    elif image:
        raise UserError("--image belongs to --prompt", where="command line", fix="name images in the rows of --input")
    elif not input.is_file():
        raise UserError("there is no such file", where=str(input), fix="--input names a JSONL file of prompts")
    request = {
        **found,
        "prompt": prompt,
        "images": image or [],
        "input": input and str(input),
        "output": output and str(output),
        "settings": settings,
        "options": {"system": system, "tools": _read_tools(tools)},
        "placement": placement,
        "overwrite": overwrite,
    }
    raise typer.Exit(_run("generate", request))


def chat(
    folder: Folder = None,
    model: Model = None,
    adapter: Adapter = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    system: System = None,
    tools: Tools = None,
    base: Base = None,
) -> None:
    """Chat with a trained model. Each line of standard input is a turn."""
    sampling = (temperature, top_p, top_k, repetition_penalty, seed)
    request = {
        **find_model("chat", folder, base, model, adapter),
        "settings": GenerationSettings(max_new_tokens, *sampling, tuple(stop or ())).to_json(),
        "options": {"system": system, "tools": _read_tools(tools)},
    }
    raise typer.Exit(_run("chat", request))


def serve(
    folder: Folder = None,
    model: Model = None,
    adapter: Adapter = None,
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Port on this machine's loopback address.")
    ] = 8000,
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name in requests (default: the folder's).")
    ] = None,
    engine: Annotated[
        Literal["auto", "vllm", "transformers"],
        typer.Option("--engine", help="vllm: its own server; auto takes it where it is installed."),
    ] = "auto",
    max_new_tokens: MaxNewTokens = SERVED.max_new_tokens,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    base: Base = None,
    gpus: Gpus = None,
    device_map: DeviceMap = "auto",
    batch_size: BatchSize = None,
) -> None:
    """Serve a trained model by OpenAI's protocol. On this machine only; options are for requests without their own."""
    process.refuse_used_port(port)
    request = {
        **find_model("serve", folder, base, model, adapter),
        "port": port,
        "name": name,
        "engine": engine,
        "settings": GenerationSettings(
            max_new_tokens, temperature, top_p, top_k, repetition_penalty, stop=tuple(stop or ())
        ).to_json(),
        "placement": dict(gpus=gpus, device_map=device_map, batch_size=batch_size),
    }
    raise typer.Exit(_run("serve", request))


def evaluate(
    run: EvalRun = None,
    model: Model = None,
    adapter: Adapter = None,
    data: Data = None,
    metrics: Metrics = DEFAULT_METRICS,
    extract: Extract = None,
    limit: Limit = None,
    max_tokens: MaxTokens = None,
    no_base: Annotated[bool, typer.Option("--no-base", help="Do not measure the base model beside it.")] = False,
    tasks: Tasks = None,
    fewshot: FewShot = None,
    include_path: IncludePath = None,
    apply_chat_template: ApplyChatTemplate = False,
    output: EvalOutput = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    max_new_tokens: MaxNewTokens = NEW_TOKENS,
    stop: Stop = None,
    base: Base = None,
    gpus: Gpus = None,
    processes: Processes = 1,
    device_map: DeviceMap = "auto",
    batch_size: BatchSize = None,
) -> None:
    """Evaluate a trained model and its base. Losses, scores of its answers, tasks of lm-eval."""
    if output is not None and output.is_file():
        raise UserError("--output is a file", where=str(output), fix="name a folder")
    request: dict[str, Any] = {
        **find_model("eval", run, base, model, adapter),
        "limit": limit,
        "output": output and str(output),
        "as_json": as_json,
    }
    changed: dict[str, Any] = dict(gpus=gpus, processes=processes != 1, device_map=device_map != "auto", stop=stop)
    own_length = max_new_tokens != NEW_TOKENS
    if tasks is not None:
        changed |= dict(data=data, extract=extract, metrics=metrics != DEFAULT_METRICS, max_tokens=max_tokens)
        _refuse(
            changed | dict(no_base=no_base, max_new_tokens=own_length),
            "has no effect with --tasks",
            "--tasks brings its own data, metrics and lengths, and runs in one process",
            "leave it out",
        )
        if include_path is not None and not include_path.is_dir():
            raise UserError("there is no such folder", where=f"--include-path {include_path}", fix="correct the path")
        own: dict[str, Any] = {"tasks": tasks.split(","), "num_fewshot": fewshot, "batch_size": batch_size}
        own |= {"apply_chat_template": apply_chat_template, "include_path": include_path and str(include_path)}
        raise typer.Exit(_run("harness", request | own))
    if fewshot is not None or include_path is not None or apply_chat_template:
        raise UserError("--num-fewshot, --include-path, --apply-chat-template are for --tasks", where="command line")
    asked = check_metrics([name.strip() for name in metrics.split(",") if name.strip()], extract)
    if not set(asked) & set(TEXT_METRICS):
        _refuse(
            dict(limit=limit, stop=stop, batch_size=batch_size, max_new_tokens=own_length),
            "has no effect without answers",
            "the metrics are computed from losses alone",
            f"leave it out, or add to --metrics one of {', '.join(TEXT_METRICS)}",
        )
    if data is not None and not data.startswith("hub:") and not any(glob.iglob(str(Path(data).expanduser()))):
        fix = "correct the path; hub:OWNER/NAME names a data set of the hub"
        raise UserError("no such data file", where=f"--data {data}", fix=fix)
    request |= {
        "data": data,
        "metrics": asked,
        "settings": GenerationSettings(max_new_tokens, stop=tuple(stop or ())).to_json(),
        "placement": dict(gpus=gpus, processes=processes, device_map=device_map, batch_size=batch_size),
        "extract": extract,
        "max_tokens": max_tokens,
        "with_base": not no_base,
    }
    raise typer.Exit(_run("evaluate", request))


def _refuse(given: dict[str, Any], what: str, why: str, fix: str) -> None:
    """UserError for the first option that is given."""
    for option in (f"--{name.replace('_', '-')}" for name, value in given.items() if value):
        raise UserError(f"{option} {what}", where=option, why=why, fix=fix)


def _run(verb: str, request: dict[str, Any]) -> int:
    return process.run_module("manyhands.infer", [verb, json.dumps(request)])


def _read_tools(file: Path | None) -> list[Any] | None:
    if file is None:
        return None
    try:
        tools = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError("the tools cannot be read", where=str(file), why=str(error)) from None
    if not isinstance(tools, list):
        raise UserError("the tools are not a JSON list", where=str(file), fix="write [{...}, ...]")
    return tools
