"""A run's folder: where everything of one run lies, and how it is read and written. Imports no torch.

| file | contents |
|---|---|
| run.json | the configuration (RunConfig); one that a later launch replaces is kept as plans/001.run.json, and the
report of a run that was made longer as plans/001.report.json |
| origin/ | another tool's file that the run was started from, and outcomes.json: what became of each of its keys |
| plans/001.json, ... | the decisions (Plan), one file a launch |
| plan.json | {"newest": "plans/001.json"}: a pointer file, as some copies and file systems lose symbolic links |
| status.json | {"state": "running", "finished", "failed" or "interrupted", "time": ..., ...} |
| restarts.jsonl | one line for each automatic restart: cause, step, where it resumed from (launch/restart) |
| logs/launcher.log | plans and messages, as shown on the terminal |
| logs/rank-0.log | what rank 0 showed and printed |
| logs/hang-1.txt | what all ranks did when progress stopped (``hang.py``) |
| metrics.jsonl, tensorboard/, report.json, report.md | what was measured |
| checkpoints/step-000010/, model/ or adapter/ | what was trained |
| STOP | made by the user: the run saves, ends, and removes it |
| .lock | held by the launcher (flock), with its process id |
| .ranks/ | heartbeats and failures of the newest launch; removed after a run that ended well |
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from manyhands.config.schema import RunConfig, digest_json
from manyhands.core.errors import EXIT_FAILED, OUT_OF_MEMORY, UserError
from manyhands.core.files import (
    read_json,
    read_rows,
    remove_temporaries,
    write_atomically,
    write_json,
    write_json_on_full_disk,
)
from manyhands.importers.load import LoadedRun
from manyhands.importers.report import as_json
from manyhands.planner.types import MemoryFound, Plan

OUTCOMES = "outcomes.json"
State = Literal["running", "finished", "failed", "interrupted"]


class RunFolder:
    """The paths of one run and the few files in it that launcher and ranks share."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.run_json = self.path / "run.json"
        self.origin = self.path / "origin"
        self.plans = self.path / "plans"
        self.plan_json = self.path / "plan.json"
        self.status_json = self.path / "status.json"
        self.restarts = self.path / "restarts.jsonl"
        self.report_json = self.path / "report.json"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.logs = self.path / "logs"
        self.launcher_log = self.logs / "launcher.log"
        self.checkpoints = self.path / "checkpoints"
        self.submit = self.path / "submit"
        self.stop_file = self.path / "STOP"
        self.lock_file = self.path / ".lock"
        self.ranks = self.path / ".ranks"

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def beat(self, rank: int) -> Path:
        """Written by ``heartbeat.Heartbeat``."""
        return self.ranks / f"beat-{rank}.json"

    def begun(self, rank: int) -> Path:
        """The newest step that the rank has begun, by ``heartbeat.Heartbeat``."""
        return self.ranks / f"step-{rank}.json"

    def failure(self, rank: int) -> Path:
        """Written by ``failure.write_failure``."""
        return self.ranks / f"failure-{rank}.json"

    def reserve(self, rank: int) -> Path:
        """Room that ``failure(rank)`` takes where the disk is full."""
        return self.ranks / f"reserve-{rank}"

    @property
    def stop_reason(self) -> Path:
        """Why the process that started this launch has asked it to end (``ask_to_end``)."""
        return self.ranks / "stop-reason.txt"

    @property
    def stack_request(self) -> Path:
        """Holds a token when all ranks are asked what they are doing (``stacks.request_stacks``)."""
        return self.ranks / "ask"

    def stacks(self, rank: int) -> Path:
        return self.ranks / f"stacks-{rank}.json"

    def stack(self, rank: int) -> Path:
        """Where a signal makes the rank write its stacks."""
        return self.ranks / f"stack-{rank}.txt"

    def hang_file(self) -> Path:
        """A new file, empty, for what all ranks did when progress stopped; several may look at one run."""
        for number in itertools.count(1 + len(list(self.logs.glob("hang-*.txt")))):
            path = self.logs / f"hang-{number}.txt"
            with contextlib.suppress(FileExistsError):
                path.touch(exist_ok=False)
                break
        return path

    def create(self) -> None:
        """Makes the folder and the folders for plans and logs; existing ones are kept."""
        for folder in (self.path, self.plans, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    # What was asked.

    def read_config(self) -> RunConfig:
        """The run as asked. UserError if run.json is missing or not one of ours."""
        try:
            return RunConfig.model_validate_json(self.run_json.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                "this folder contains no run",
                where=str(self.path),
                why="it has no run.json",
                fix="give a run's folder, such as runs/NAME, or its run file",
            ) from None
        except OSError as error:
            raise UserError(
                "run.json cannot be read", where=str(self.run_json), why=error.strerror or str(error)
            ) from None
        except (ValidationError, UnicodeDecodeError) as error:
            raise UserError(
                "the run's run.json is damaged, or was not written by this version of manyhands",
                where=str(self.run_json),
                why=_explain_invalid(error),
                fix="restore the file, or use another name or --fresh for a new run; this folder was not changed",
            ) from None

    def write_config(self, config: RunConfig | str) -> None:
        """Writes run.json, or its text. A different one is first kept beside the newest plan made from it."""
        text = config if isinstance(config, str) else config.model_dump_json(indent=2) + "\n"
        if self.run_json.exists():
            old, kept = self.run_json.read_text(encoding="utf-8"), self._kept_config(self.newest_plan_number())
            if old == text:
                return
            if not kept.exists():  # else nothing was planned from the one that is replaced
                write_atomically(kept, old)
        write_atomically(self.run_json, text)

    def _kept_config(self, number: int) -> Path:
        return self.plans / f"{number:03d}.run.json"

    def write_origin(self, loaded: LoadedRun) -> None:
        """Keeps another tool's file with outcomes, or the run file of a command line; nothing for a native file."""
        if loaded.run_file is not None:
            write_atomically(self.path / "run.yaml", loaded.run_file)
        if loaded.translation is None or loaded.text is None:
            return
        self.origin.mkdir(exist_ok=True)
        write_atomically(self.origin / Path(loaded.translation.where).name, loaded.text)
        write_json(self.origin / OUTCOMES, as_json(loaded.translation))

    # What was decided.

    def newest_plan_number(self) -> int:
        """0 before the first plan."""
        names = (re.fullmatch(r"(\d{3,9})\.json", path.name) for path in _list(self.plans, "*.json"))
        return max((int(match[1]) for match in names if match), default=0)

    @property
    def started(self) -> float:
        """When the first launch was planned, in seconds since 1970: a plan is never written again."""
        return min((path.stat().st_mtime for path in self.plans.glob("[0-9]*.json")), default=time.time())

    def write_plan(self, plan: Plan) -> Path:
        """Writes ``plans/NNN.json`` (N: ``plan.number``), never over another, then updates the pointer."""
        path = self.plans / f"{plan.number:03d}.json"
        if path.exists():
            raise FileExistsError(path)
        self.plans.mkdir(parents=True, exist_ok=True)
        write_atomically(path, plan.model_dump_json(indent=2) + "\n")
        write_json(self.plan_json, {"newest": f"plans/{path.name}"})
        return path

    def read_report(self) -> dict[str, Any]:
        """report.json of a finished run. UserError where there is none."""
        report = read_json(self.report_json)
        if isinstance(report, dict):
            return report
        damaged = self.report_json.exists()
        raise UserError(
            "the run's report is damaged" if damaged else "the run has no report",
            where=str(self.report_json),
            why="it is no JSON object" if damaged else "a run writes it when it has finished",
            fix="restore the file" if damaged else "let it finish, or name a finished run, such as runs/NAME",
        )

    def read_plan(self) -> Plan:
        """The newest plan by number: plan.json is for people. UserError where none can be read."""
        number = self.newest_plan_number()
        fix = "restore the file, or use --fresh for a new run; this folder was not changed"
        if number == 0:
            started = "its files were removed; " if self.was_started() else "it was never planned; "
            raise UserError(
                "this run has no plan",
                where=str(self.plans),
                why=f"{started}there is no {self.plans.name}/001.json",
                fix=fix,
            )
        plan = self._read_plan(number, fix)
        self._refuse_other_plan(number, plan)
        return plan

    def read_plans(self) -> list[Plan]:
        """All that can be read, in order. UserError where one is of another run."""
        plans = {}
        for number in range(1, self.newest_plan_number() + 1):
            with suppress(UserError):
                plans[number] = self._read_plan(number)
        for number, plan in plans.items():
            self._refuse_other_plan(number, plan)
        return list(plans.values())

    def _refuse_other_plan(self, number: int, plan: Plan) -> None:
        """By the digest of the run.json that plan ``number`` was made from: the first kept since, else the present."""
        kept = map(self._kept_config, range(number, self.newest_plan_number() + 1))
        config = next((path for path in kept if path.exists()), self.run_json)
        try:  # not through RunConfig, which adds keys that the version of the plan did not have
            own = digest_json(to_json(from_json(config.read_bytes())))
        except (OSError, ValueError):
            return
        if plan.config_digest != own:
            raise UserError(
                "the plan is of another run",
                where=str(self.plans / f"{number:03d}.json"),
                why=f"it was made from other keys than those in {config.name}",
                fix="move it out of this run's folder, or use --fresh for a new run; this folder was not changed",
            )

    def _read_plan(self, number: int, fix: str = "") -> Plan:
        path = self.plans / f"{number:03d}.json"
        try:
            return Plan.model_validate_json(path.read_text(encoding="utf-8"))
        except (ValidationError, UnicodeDecodeError, OSError) as error:
            what = "the run's plan is damaged, or was not written by this version of manyhands"
            raise UserError(what, where=str(path), why=_explain_invalid(error), fix=fix) from None

    # Its state.

    @property
    def is_gone(self) -> bool:
        """Whether nothing of the run is here any more: it was deleted or moved."""
        return not (self.run_json.exists() or self.plans.exists() or self.logs.exists())

    def refuse_gone(self) -> None:
        """UserError where the folder was deleted or moved: nothing of it is made again."""
        if self.is_gone:
            raise self.explain_gone()

    def explain_gone(self) -> UserError:
        return UserError(
            "the run's folder was deleted or moved while the run was under way",
            where=str(self.path),
            why="what is trained since the last checkpoint cannot be saved there",
            fix="move the folder back, and start again: the run resumes from its newest checkpoint",
            exit_code=EXIT_FAILED,
        )

    def write_status(self, state: State, **fields: Any) -> None:
        """Replaces status.json, on a full disk too; keeps ``fields`` (step, reason) and the number of restarts."""
        num_restarts = len(read_rows(self.restarts))
        restarts = {"restarts": num_restarts} if num_restarts else {}
        write_json_on_full_disk(self.status_json, {"state": state, "time": time.time(), **restarts, **fields})

    def add_restart(self, restart: Mapping[str, Any]) -> None:
        """Appends one line to restarts.jsonl; a full disk loses it and nothing else."""
        with suppress(OSError), self.restarts.open("a", encoding="utf-8") as file:
            file.write(json.dumps(restart) + "\n")

    def read_status(self) -> dict[str, Any]:
        """status.json, ``{}`` before the first launch; if damaged, ``finished`` with a report, else ``unknown``."""
        is_there = self.status_json.exists()  # before it is read: a launch may write the first one in between
        status = read_json(self.status_json)
        if isinstance(status, dict) and status.get("state") in get_args(State):
            return status
        if not is_there and not self.metrics.exists():
            return {}
        is_finished = isinstance(read_json(self.report_json), dict)
        why = (
            f"{self.status_json.name} is {'damaged' if is_there else 'missing'}"
            + f"; there is a {self.report_json.name}" * is_finished
        )
        return {"state": "finished" if is_finished else "unknown", "reason": why}

    def ran_out_of_memory(self, plan: Plan) -> bool:
        """Whether the launch of ``plan`` ended because memory ran out."""
        status = self.read_status()
        ended = status.get("state") in ("failed", "interrupted")
        return ended and (status.get("cause"), status.get("plan")) == (OUT_OF_MEMORY, plan.number)

    def memory_found(self) -> MemoryFound | None:
        """What the launch that ran out of memory had measured; None where it could not."""
        try:
            return MemoryFound.model_validate(self.read_status().get("measured"))
        except ValidationError:
            return None

    def write_failed(self, error: UserError, plan: Plan) -> None:
        """Writes a failed launch's status.json. A finished run stays finished: its later failures change nothing."""
        if self.is_finished or not self.path.exists():
            return
        cause: dict[str, Any] = {"cause": error.kind} if error.kind else {}
        if error.data:
            cause["measured"] = error.data
        self.write_status("failed", reason=error.what, plan=plan.number, **cause)

    def reopen(self) -> list[str]:
        """A finished run is to become longer: it is finished no more. Its report is kept with its plan, and exports of
        its last checkpoint get the step's name, as a name without one is the newest checkpoint's; these are returned.
        """
        step = self.newest_step()
        self.write_status("interrupted", step=step, reason="made longer (stop)")
        for path in self.path.glob("report.*"):
            path.rename(self.plans / f"{self.newest_plan_number():03d}.{path.name}")
        exports = ("export", "gguf-*") if self.read_config().output.merge else ("export", "gguf-*", "merged")
        renamed = []
        for path in (path for name in exports for path in self.path.glob(name) if "-step-" not in path.name):
            target = path.with_name(f"{path.name}-step-{step:06d}")
            while target.exists():
                target = target.with_name(f"{target.name}-old")
            renamed.append(path.rename(target).name)
        return renamed

    def write_interrupted(self, reason: str) -> None:
        """Writes an interrupted launch's status.json, keeping an earlier out-of-memory for a smaller plan."""
        status = self.read_status()
        keeps = (status.get("state"), status.get("cause")) == ("failed", OUT_OF_MEMORY)
        kept = {name: status[name] for name in ("cause", "measured", "plan") if keeps and name in status}
        self.write_status("interrupted", reason=reason, **kept)

    def was_stopped_by_file(self) -> bool:
        """Whether the newest launch ended on the user's file STOP."""
        status = self.read_status()
        return (status.get("state"), status.get("reason")) == ("interrupted", self.stop_file.name)

    def ask_to_end(self, reason: str) -> None:
        """Notes why the launch, which is then sent a signal, is to end; without room on the disk it is the signal."""
        with suppress(OSError):
            self.ranks.mkdir(exist_ok=True)
            self.stop_reason.write_text(reason, encoding="utf-8")

    def read_stop_reason(self) -> str:
        """What ``ask_to_end`` has noted for this launch, or ""."""
        try:
            return self.stop_reason.read_text(encoding="utf-8")
        except OSError:
            return ""

    @property
    def is_finished(self) -> bool:
        return self.read_status().get("state") == "finished"

    def newest_step(self) -> int | None:
        """Step of the newest complete checkpoint; a checkpoint exists when its manifest does."""
        names = (
            re.fullmatch(r"step-(\d+)", path.parent.name) for path in _list(self.checkpoints, "step-*/manifest.json")
        )
        return max((int(match[1]) for match in names if match), default=None)

    def was_started(self) -> bool:
        """Whether a rank has ever run here; without, the folder holds plans only."""
        started = self.status_json.exists() or self.metrics.exists() or self.checkpoints.exists()
        return started or bool(_list(self.logs, "rank-*.log"))

    # What the ranks write while they run.

    def list_ranks(self, pattern: str) -> list[Path]:
        """Files of the newest launch; none in the moment in which the launcher removes those of an earlier one."""
        return _list(self.ranks, pattern)

    def read_failures(self) -> dict[int, dict[str, Any]]:
        """The reasons that ranks of this launch have written."""
        found = (read_json(path) for path in self.list_ranks("failure-*.json"))
        return {fields["rank"]: fields for fields in found if isinstance(fields, dict)}

    def has_cause(self) -> bool:
        """Whether any rank of this launch has failed of itself, not only lost another."""
        return any(not fields["consequence"] for fields in self.read_failures().values())

    def remove_temporaries(self) -> None:
        """Removes half-written files of killed launches. For whoever holds the lock."""
        for folder in (self.path, self.plans, self.path / "verify"):
            remove_temporaries(folder)

    def clear_ranks(self) -> None:
        """Removes heartbeats and failures of an earlier launch."""
        shutil.rmtree(self.ranks, ignore_errors=True)


@contextmanager
def refuse_unusable(folder: RunFolder) -> Iterator[None]:
    """A file system error on the folder itself as UserError: rights, room, length of the name, a file in the way."""
    try:
        yield
    except OSError as error:
        raise UserError(
            "the run's folder cannot be written",
            where=str(folder.path),
            why=f"{error.strerror or error}: {error.filename}" if error.filename else str(error),
            fix="choose another output.dir (or name), or correct the permissions of this one",
        ) from error


def _list(folder: Path, pattern: str) -> list[Path]:
    """What matches in a folder; nothing where it is removed meanwhile, which ``glob`` raises."""
    with suppress(FileNotFoundError):
        return sorted(folder.glob(pattern))
    return []


def _explain_invalid(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, each['loc'])) or 'file'}: {each['msg']}" for each in error.errors()[:5])


def describe_earlier_result(folder: Path) -> str:
    """A line where a run's (or its model/'s, adapter/'s) longer continuation has not finished; else ""."""
    run = next((RunFolder(place) for place in (folder, folder.parent) if (place / "run.json").is_file()), None)
    reports = sorted(run.plans.glob("*.report.json")) if run is not None else []
    if run is None or not reports or run.is_finished:
        return ""
    steps, newest = (read_json(reports[-1]) or {}).get("measured", {}).get("steps"), run.newest_step()
    further = "" if newest is None else f"; manyhands export {run.path} writes that of step {newest:,}"
    return f"note: this run was made longer and has not finished: its result is that of step {steps}{further}"
