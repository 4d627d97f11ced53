"""Config to facts to plan to folder, in the one process that plans a run: our launcher, or rank 0."""

import contextlib
import importlib.metadata
import importlib.util
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyhands import families
from manyhands.config.schema import ModelSection, RunConfig
from manyhands.core.errors import UserError, require_extras
from manyhands.core.units import count_of, describe_ranks, format_gib
from manyhands.data.tokenize.summary import PreparedData
from manyhands.facts.adapter import find_adapter, read_base_files
from manyhands.facts.host import read_disks, read_host_facts
from manyhands.facts.hub import locate_model
from manyhands.facts.identity import differing_files, identify_files
from manyhands.facts.model import has_weights, read_model_facts, resize_vocabulary
from manyhands.facts.model_config import judge_packing
from manyhands.facts.types import DataFacts, Facts, HostFacts, NewTokens
from manyhands.families.family import DELTA_RULE
from manyhands.importers.load import LoadedRun
from manyhands.launch.environment import apply_variables
from manyhands.launch.local.watch import raise_when_stopped
from manyhands.launch.nodes.info import NodeGroup, join_hosts
from manyhands.launch.run.folder import RunFolder, refuse_unusable
from manyhands.launch.run.lock import FolderLock, TakeLock
from manyhands.launch.run.rehearsal import refuse_unmatched, rehearse
from manyhands.launch.run.resume import (
    changed_limits,
    fetch_run,
    find_run,
    folder_of,
    fresh_name,
    is_taken,
    refuse_no_longer,
    refuse_other_checkpoint,
    refuse_other_course,
    refuse_without_checkpoint,
)
from manyhands.planner.types import Cause, Plan


@dataclass(frozen=True)
class Prepared:
    """A run ready to start. ``config.name`` changes after ``--fresh``. Holds ``lock``."""

    folder: RunFolder
    config: RunConfig
    plan: Plan
    resume: bool  # there is a checkpoint to resume from
    finished: bool  # nothing is left to do
    lock: FolderLock | None = None
    num_left: int | None = None  # ranks, once a fault has left fewer GPUs
    written: bool = True  # the plan is in the folder

    def release(self) -> None:
        """Releases the folder for another launch."""
        if self.lock is not None:
            self.lock.release()


def summarize_start(prepared: Prepared, *, starts: bool = True) -> list[str]:
    """Lines for the start of a run: what was found, what a step is; without the last one in a dry run."""
    config, plan, layout = prepared.config, prepared.plan, prepared.plan.layout
    device = next((reason.values for reason in plan.why if reason.code == "device"), {})
    gpus, on_gpu = device.get("gpus", []), layout.device == "cuda"
    found = "Planned for" if any(reason.code == "hardware" for reason in plan.why) else "Detected"
    lines = [f"[train] {found} {len(gpus)} GPU{'s' * (len(gpus) != 1)}{':' if gpus else ''}"]
    lines += [f"  GPU {index}: {gpu['name']} ({format_gib(gpu['bytes'])})" for index, gpu in enumerate(gpus)]
    if gpus:
        lines.append(f"[train] Total VRAM: {format_gib(sum(gpu['bytes'] for gpu in gpus))}")
    if layout.micro_samples is not None:
        size, accumulation, asked = f"{layout.micro_samples}", f"{layout.accumulation}", config.batch.micro_samples
    else:
        size, asked = f"packs of up to {layout.micro:,} tokens", config.batch.micro_tokens
        accumulation = "as many packs as the samples of a step fill" if layout.accumulates else "1"
    title = "Auto-calculated batch size" if asked == "auto" else "Batch size"
    lines.append(f"[train] {title}: {size} per {'GPU' if on_gpu else 'process'}, gradient accumulation: {accumulation}")
    whole = f"at least {plan.batch_loss_tokens:,} loss tokens" if plan.batch_loss_tokens else plan.batch_samples
    if plan.batch_packs:
        whole = f"{plan.batch_packs:,} pack{'s' * (plan.batch_packs > 1)} of {config.data.max_length:,} tokens"
    lines.append(f"[train] Effective batch size: {whole}")
    if starts:
        begin = f"Resuming from step {prepared.folder.newest_step()}:" if prepared.resume else "Starting new"
        precision = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}[layout.compute_dtype]
        ranks = describe_ranks(layout.device, layout.world_size)
        how = f"{config.method.name} {layout.strategy} run with {precision} precision"
        lines.append(f"[train] {begin} {how} on {ranks if on_gpu else ranks.replace(' ', ' CPU ')}")
    return lines


def _refuse_missing_trackers(config: RunConfig) -> None:
    """UserError before any work, not where measurements begin."""
    for name in ("wandb", "mlflow", "trackio"):
        if getattr(config.log, name) is not None and importlib.util.find_spec(name) is None:
            raise UserError(
                f"log.{name} is set, and the package {name} is not installed",
                where=f"log.{name}",
                fix=f"pip install 'manyhands[trackers]' or pip install {name}, or remove the key",
            )


@raise_when_stopped()
def prepare_run(
    config: RunConfig,
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
    fresh: bool = False,
    dry_run: bool = False,
    origin: LoadedRun | None = None,
    host: HostFacts | None = None,
    group: NodeGroup | None = None,
    num_left: int | None = None,
    take_lock: TakeLock = FolderLock,
    report: Callable[[str], None] = print,
) -> Prepared:
    """Plans one launch and writes run.json and plan into the run's folder, which stays locked.

    ``world_size``, and ``local_world_size`` of one machine, are given where another launcher started the processes. A
    dry run writes the same two files and nothing else, and may be for another machine, ``host``, as long as the run was
    not started. ``group``: all nodes, where there are several. ``origin``: the run as it was read, if its file is
    another tool's, which is kept beside run.json. ``num_left``: ranks that a fault has left of a run with more.
    ``take_lock``: how the folder is locked. A start that fails here leaves no new folder behind. UserError if the
    folder holds another run, if it is running, or if facts or plan refuse it; ``Stopped`` after Ctrl-C or SIGTERM.
    """
    _refuse_missing_trackers(config)
    config, notes = apply_variables(config)
    for note in notes:
        report(f"note: {note}")
    require_extras("" if dry_run else config.parallel.strategy)
    config, new_folders, lock = _take_folder(config, fresh, take_lock, report)
    folder = folder_of(config)
    if lock is None:
        return Prepared(folder, config, folder.read_plan(), resume=False, finished=True)
    try:
        if find_run(folder, config) == "finished":  # now that nobody else writes: it was another's until then
            lock.release()
            return Prepared(folder, config, folder.read_plan(), resume=False, finished=True)
        if not (fresh or dry_run):
            fetch_run(folder, config, report)
        with refuse_unusable(folder):
            folder.remove_temporaries()
            if not dry_run:
                folder.stop_file.unlink(missing_ok=True)  # meant for an earlier launch
        if host is not None and folder.was_started():
            raise UserError(
                "this run has been started, and its plans are for the machine it runs on",
                where=str(folder.path),
                fix="plan for other GPUs with `manyhands plan`, which writes nothing",
            )
        longer = bool(changed_limits(folder, config))
        if longer and not (dry_run and config.checkpoint.copy_to):  # copies are fetched by the start itself
            refuse_without_checkpoint(folder, config)
        plan = _plan_launch(
            config, folder, world_size, local_world_size, report, host=host, group=group, num_left=num_left
        )
        if dry_run:
            rehearse(config, plan)
        writes = not (dry_run and longer)  # a run stays as long as it is until it is started with other limits
        with refuse_unusable(folder):
            if writes:
                if folder.is_finished and (renamed := folder.reopen()):
                    report(f"note: exports of the run as it was are now {', '.join(renamed)}")
                folder.create()
                folder.write_config(config)
                if origin is not None:
                    folder.write_origin(origin)
                folder.write_plan(plan)
            if not dry_run:
                folder.clear_ranks()
    except BaseException:
        if new_folders:
            with contextlib.suppress(OSError):  # another start has the folder by now, or one above it
                if {entry.name for entry in folder.path.iterdir()} <= {folder.lock_file.name}:
                    folder.lock_file.unlink(missing_ok=True)
                    for made in new_folders:
                        made.rmdir()
        lock.release()
        raise
    resume = folder.newest_step() is not None
    return Prepared(folder, config, plan, resume=resume, finished=False, lock=lock, num_left=num_left, written=writes)


def _take_folder(
    config: RunConfig, fresh: bool, take_lock: TakeLock, report: Callable[[str], None]
) -> tuple[RunConfig, list[Path], FolderLock | None]:
    """The run under its name, the folders made for it (innermost first), the lock; None where it is finished."""
    asked, running = config, set[str]()
    while True:
        with refuse_unusable(folder_of(config)):
            if fresh:
                config = fresh_name(asked, lambda one: one.name in running or is_taken(one))
            folder = folder_of(config)
            if find_run(folder, config) == "finished":
                return config, [], None
            new_folders = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
            folder.path.mkdir(parents=True, exist_ok=True)
            try:
                return config, new_folders, take_lock(folder, report)
            except UserError:
                if not fresh:
                    raise
                running.add(config.name)  # of another fresh start, which writes run.json once its data is prepared


@raise_when_stopped()
def plan_smaller(prepared: Prepared, group: NodeGroup | None = None) -> Prepared:
    """The next smaller plan after an OOM, written into the folder. UserError (NothingSmaller) where there is none."""
    folder = prepared.folder
    plan = _plan_launch(prepared.config, folder, must_shrink=True, group=group, num_left=prepared.num_left)
    folder.write_plan(plan)
    return replace(prepared, plan=plan, resume=folder.newest_step() is not None)


# Keys that may leave no plan for a number of ranks, where fewer have one.
OF_THE_NUMBER = ("batch.samples", "parallel.shard_degree", "parallel.expert_degree")


@raise_when_stopped()
def plan_fewer(prepared: Prepared, num_left: int) -> Prepared:
    """The same run planned for the ``num_left`` GPUs (on a CPU, processes) that a fault has left, written into its
    folder: the same samples in each step. It may be for fewer, down to ``launch.min_gpus``, where no plan for as many
    has exactly these. UserError where there is none.
    """
    folder, least = prepared.folder, prepared.config.launch.min_gpus or num_left
    refused: UserError | None = None
    for num in range(num_left, least - 1, -1):
        try:
            plan = _plan_launch(prepared.config, folder, num_left=num)
        except UserError as error:
            refused = refused or error
            if error.where not in OF_THE_NUMBER:
                raise
        else:
            folder.write_plan(plan)
            return replace(prepared, plan=plan, resume=folder.newest_step() is not None, num_left=num)
    assert refused is not None
    raise refused


def _with_batch_of(config: RunConfig, before: Plan) -> RunConfig:
    """The config with the batch that ``before`` has, however many ranks carry it out."""
    samples = before.batch_samples if config.batch.samples == "auto" else None
    update = {"accumulation": "auto"} | ({} if samples is None else {"samples": samples})
    return config.model_copy(update={"batch": config.batch.model_copy(update=update)})


def _plan_launch(
    config: RunConfig,
    folder: RunFolder,
    world_size: int | None = None,
    local_world_size: int | None = None,
    report: Callable[[str], None] = lambda line: None,
    *,
    must_shrink: bool = False,
    host: HostFacts | None = None,
    group: NodeGroup | None = None,
    num_left: int | None = None,
) -> Plan:
    """``must_shrink``: refuse after an OOM of the smallest plan, else try it again. ``num_left``: GPUs to plan for."""
    from manyhands.planner.oom import NothingSmaller
    from manyhands.planner.search import plan
    from manyhands.planner.steps import explain_longer

    facts = gather_facts(
        config, world_size=world_size, local_world_size=local_world_size, host=host, group=group, report=report
    )
    folder.read_plans()  # none of another run
    number, step = folder.newest_plan_number() + 1, folder.newest_step()
    continues = step is not None or num_left is not None
    before = folder.read_plan() if continues or (number > 1 and folder.was_started()) else None
    cause: Cause = "first" if step is None else "resume"
    asked = config
    if before is not None and num_left is not None:
        facts, asked = facts.model_copy(update={"num_left": num_left}), _with_batch_of(config, before)
    after: Plan | None = None
    if before is not None and folder.ran_out_of_memory(before):
        try:
            found = folder.memory_found()
            after = plan(asked, facts, number=number, cause="out_of_memory", before=before, found=found)
        except NothingSmaller:
            if must_shrink:
                raise
    if after is None or after.ran_out is None:
        after = plan(asked, facts, number=number, cause=cause, before=before)
    if before is not None and continues and after.layout.world_size != before.layout.world_size:
        after = plan(asked, facts, number=number, cause="resize")
    changed = changed_limits(folder, config) if step is not None else ()
    if before is not None and (continues or after.cause == "out_of_memory"):
        refuse_other_course(before, after, folder, longer=bool(changed))
    if before is not None and step is not None and changed:
        refuse_no_longer(before, after, folder, config)
        after = after.model_copy(
            update={"why": (*after.why, explain_longer(config.schedule, before, after, step, changed))}
        )
    if step is not None:
        refuse_other_checkpoint(folder.checkpoints / f"step-{step:06d}", config, folder)
    if before is None:
        refuse_unmatched(config, after, facts.model)
    return after if asked is config else after.model_copy(update={"config_digest": config.digest})


def plan_here(
    config: RunConfig, *, world_size: int | None = None, host: HostFacts | None = None, report: Callable[[str], Any]
) -> Plan:
    """The plan that a start on this machine, or on ``host``, would make. Writes nothing. Raises UserError."""
    from manyhands.planner.search import plan

    config, facts = facts_here(config, world_size=world_size, host=host, report=report)
    made = plan(config, facts)
    refuse_unmatched(config, made, facts.model)
    return made


def facts_here(
    config: RunConfig, *, world_size: int | None = None, host: HostFacts | None = None, report: Callable[[str], Any]
) -> tuple[RunConfig, Facts]:
    """What ``plan_here`` plans: the run with this machine's variables, and its facts."""
    if host is None:
        config, notes = apply_variables(config)
        for note in notes:
            report(f"note: {note}")
    return config, gather_facts(
        config, world_size=world_size, identify=False, only_plans=True, host=host, report=report
    )


def gather_facts(
    config: RunConfig,
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
    data: PreparedData | None = None,
    host: HostFacts | None = None,
    group: NodeGroup | None = None,
    saves: bool = True,
    identify: bool = True,
    only_plans: bool = False,
    report: Callable[[str], Any] = print,
) -> Facts:
    """Find the model, read its dimensions, prepare the rows (cached), and look at the machine.

    ``world_size``: the number of processes where somebody else launched them, ``local_world_size`` of them on this
    machine.
    ``group``: all nodes, with the samples that this one has prepared; the numbers above are then its own. ``host``: a
    machine in place of this one, of whose disk nothing is known. ``data``: the rows, where they are prepared already.
    ``saves``: whether checkpoints and a result are written, for which the disk must have room. ``identify``:
    hash the base model's files, which a run that can be resumed needs; that reads all of them once. ``report`` gets
    what takes time, as text. ``only_plans``: config.json suffices of the model; without weights they are those that
    it describes, without a tokenizer the lengths of samples are estimates.
    The model is judged before the data is touched, so that a wrong name costs nothing.
    """
    from manyhands.data.tokenize.prepare import prepare, refuse_equal_labels, refuse_outside_ids
    from manyhands.data.tokenize.tokenizer import CHARACTERS, has_tokenizer, write_stand_in

    needs_weights = config.model.init == "pretrained"
    folder = locate_model(
        config.model.name,
        config.model.revision,
        needs_weights,
        trust_remote_code=config.model.trust_remote_code,
        config_suffices=only_plans,
        report=report,
    )
    init = config.model.init
    if only_plans and needs_weights and (folder / "config.json").is_file() and not has_weights(folder):
        report("note: there are no weights: planned for those that config.json describes; a run needs the files")
        init = "random"
    model = judge_packing(config, read_model_facts(folder, config.model.name, init), report)
    if identify:
        model = model.model_copy(update={"files": identify_files(folder, config, report)})
    text_folder = folder
    if only_plans and not has_tokenizer(folder) and data is None:
        report(
            f"note: there is no tokenizer: lengths of samples are estimated, {CHARACTERS} characters to a token;"
            " a run needs the tokenizer's files"
        )
        scratch = tempfile.TemporaryDirectory(prefix="manyhands-plan-")  # removed with this function's frame
        text_folder = Path(scratch.name)
        write_stand_in(folder, text_folder)
    new_tokens = find_new_tokens(config.model, text_folder, model.vocab_size)
    adapter = find_adapter(config, report)
    if adapter is not None and (others := differing_files(read_base_files(Path(adapter.folder)), model.files)):
        report(f"warning: the adapter was trained on another base model, by SHA-256: {'; '.join(others)}")
    if group is not None:
        host, data = join_hosts(group.hosts), group.data
        world_size, local_world_size = group.world_size, max(group.num_ranks)
    elif config.parallel.nodes != "auto" and world_size is None and host is None:  # those not here are like this one
        host = read_host_facts().model_copy(update={"num_nodes": config.parallel.nodes})
    data = prepare(config, text_folder, report) if data is None else data
    refuse_outside_ids(config, text_folder, data, model.vocab_size if new_tokens is None else new_tokens.vocab_size)
    refuse_equal_labels(config, data)
    disks = folder_of(config).path, config.data.cache, data.num_images
    host = host or read_host_facts()
    family = families.find(model.model_type)
    if host.is_here and family.kernels == DELTA_RULE:
        _refuse_missing_gradient(host)
    missing = [name for name in family.packages if not importlib.util.find_spec(name)]
    if missing and host.gpus and host.is_here and model.num_mixer_layers:
        report(
            f"note: not installed: {' and '.join(missing)}, with kernels for {model.num_mixer_layers} of"
            f" {count_of(model.num_layers, 'block')}; transformers' own code is slower and keeps more than planned"
        )
    return Facts(
        model=resize_vocabulary(model, new_tokens),
        data=DataFacts(**vars(data)),
        host=host,
        new_tokens=new_tokens,
        adapter=adapter,
        **(read_disks(*disks) if saves and (host is None or host.is_here) else {}),
        world_size=world_size,
        local_world_size=local_world_size,
        hosts=group.hosts if group is not None else (),
        node_ranks=group.num_ranks if group is not None else (),
        node_link=group.link if group is not None else None,
    )


def _refuse_missing_gradient(host: HostFacts) -> None:
    """Raise a UserError before the launch where ``fla-core`` 0.6 would raise in the first backward pass: on Hopper,
    with a Triton that computes the gradient of the gated delta rule incorrectly, and without ``tilelang``.
    """
    hopper = any(gpu.vendor == "nvidia" and (gpu.compute_capability or (0,))[0] == 9 for gpu in host.gpus)
    if not hopper or not importlib.util.find_spec("fla") or importlib.util.find_spec("tilelang"):
        return
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        triton = importlib.metadata.version("triton")
        if (3, 4, 0) <= tuple(int(part) for part in re.findall(r"\d+", triton)[:3]) < (3, 7, 1):
            raise UserError(
                "fla-core cannot compute the gradient of the gated delta rule here",
                where=f"fla-core with triton {triton} on a Hopper GPU",
                why="it raises in the backward pass, because Triton 3.4.0 to 3.7.0 computes this gradient incorrectly",
                fix="pip install tilelang (it needs nvcc, CUDA's compiler), or uninstall fla-core: slower code runs",
            )


def find_new_tokens(model: ModelSection, folder: Path, vocab_size: int) -> NewTokens | None:
    """Ids of ``model.new_tokens`` and of ``model.special_tokens`` that are unknown, and the rows of embeddings that
    they need; None where there are none.

    The vocabulary is resized to exactly what is needed. Models with more rows than the tokenizer has tokens (padded to
    a multiple that is fast) keep their size as long as that is enough. Imports transformers.
    """
    if not model.new_tokens and not model.special_tokens:
        return None
    from manyhands.data.tokenize.tokenizer import load_tokenizer, tokens_to_add

    before = load_tokenizer(folder, trust_remote_code=model.trust_remote_code)
    known, added = before.get_vocab(), tokens_to_add(before, model.new_tokens, model.special_tokens)
    if not added:
        return None
    tokenizer = load_tokenizer(folder, trust_remote_code=model.trust_remote_code, new_tokens=added)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in added}
    return NewTokens(
        ids=tuple(ids.values()),
        fresh_ids=tuple(number for token, number in ids.items() if token not in known),
        vocab_size=max(vocab_size, 1 + max(ids.values())),
    )
