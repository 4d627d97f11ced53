"""Which GPUs, or processes on the CPU, a model works on, and its copies that share the work: one per GPU, or per group
of GPUs where a model is divided by layers, or processes on the CPU. Tasks go out one at a time to whoever is free, so
the number of copies decides nothing but the time.

A single copy works in the calling process. Of several each has a process of its own, which ends when the pipe to the
caller does, however that ended.
"""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn, Protocol

from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.files import read_json
from manyhands.core.machine import count_cores

WEIGHTS_SHARE = 0.75  # of a GPU's free memory for weights; the rest is for the cache


@dataclass(frozen=True)
class DeviceSlot:
    """Where a copy of the model is: the positions of its GPUs among the visible ones; none is the CPU.

    ``threads``: of torch on the CPU, None for its own choice.
    """

    gpus: tuple[int, ...] = ()
    threads: int | None = None

    def enter(self) -> None:
        """Called first in the copy's process."""
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.gpus:
            torch.cuda.set_device(self.gpus[0])

    def hide_others(self) -> None:
        """Leaves this process its own GPUs only, for a library that takes all that it sees; before CUDA starts."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = [name.strip() for name in visible.split(",")] if visible else []
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] if names else str(gpu) for gpu in self.gpus)


class Replica(Protocol):
    """What a process makes: a model that does tasks. ``capacity`` is what the caller needs to know to cut them."""

    capacity: Any

    def run(self, task: Any) -> Any: ...


Open = Callable[[DeviceSlot], Replica]


def run_tasks(
    slots: Sequence[DeviceSlot], open_replica: Open, next_task: Callable[[Any], Any], on_result: Callable[[Any], object]
) -> None:
    """Does all tasks: ``next_task(capacity)`` cuts one for a free copy (None: no more), ``on_result`` takes the result.

    ``open_replica`` is called in each process; it and the tasks are pickled. Raises what a copy raised first.
    """
    if len(slots) == 1:
        copy = open_replica(slots[0])
        while (task := next_task(copy.capacity)) is not None:
            on_result(copy.run(task))
        return
    with _start(slots, open_replica) as started:
        working = dict(started)
        while working:
            for ready in connection.wait(
                [end for pipe, process in working.items() for end in (pipe, process.sentinel)]
            ):
                pipe = next((p for p, process in working.items() if ready in (p, process.sentinel)), None)
                if pipe is None or (ready is not pipe and pipe.poll()):
                    continue  # its process was closed, or has left a message
                try:
                    message = pipe.recv()
                except (EOFError, ConnectionError):
                    _raise_ended(working[pipe], slots[[*started].index(pipe)])
                if isinstance(message, BaseException):
                    raise message
                capacity, results = message
                for result in results:
                    on_result(result)
                task = next_task(capacity)
                if task is None:
                    del working[pipe]
                pipe.send(task)


def _raise_ended(process: Any, slot: DeviceSlot) -> NoReturn:
    process.join(10)
    code = process.exitcode
    by = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with {code}"
    raise UserError(
        f"the process of {describe_slot(slot)} has ended {by}",
        why="most likely the machine ran out of memory" if by.endswith("SIGKILL") else "",
        fix="answers so far are kept: the same command continues",
        exit_code=EXIT_FAILED,
    ) from None


@contextmanager
def _start(slots: Sequence[DeviceSlot], open_replica: Open) -> Iterator[dict[Any, Any]]:
    """Processes by their pipes, in the order of the slots; ended with the context, whatever ends that."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    started: dict[Any, Any] = {}
    try:
        for slot in slots:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, slot, open_replica))  # vLLM starts more
            process.start()
            theirs.close()
            started[ours] = process
        yield started
        for process in started.values():
            process.join(30)
    finally:
        for process in started.values():
            process.terminate()
        for pipe, process in started.items():
            process.join(10)
            process.kill()
            pipe.close()


def _work(pipe: Any, slot: DeviceSlot, open_replica: Open) -> None:
    """Sends (capacity, results), at first without a result, or the error that ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller, who ends this process
    try:
        copy = open_replica(slot)
        pipe.send((copy.capacity, []))
        while (task := pipe.recv()) is not None:
            pipe.send((copy.capacity, [copy.run(task)]))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the caller is gone
    except UserError as error:
        pipe.send(error)
    except BaseException:
        pipe.send(RuntimeError(f"in a process of its own:\n{traceback.format_exc()}"))


def describe_slot(slot: DeviceSlot) -> str:
    if not slot.gpus:
        return "the CPU"
    return f"GPU {slot.gpus[0]}" if len(slot.gpus) == 1 else f"GPUs {slot.gpus[0]} to {slot.gpus[-1]}"


@dataclass(frozen=True)
class Placement:
    """Where the model runs. ``gpus``: how many of the visible ones, None for all; ``processes``: on the CPU, where each
    has its share of the cores. ``device_map``: ``none`` (a copy on each GPU), ``balanced``, ``sequential`` (one copy
    over all of them), ``auto`` (as few GPUs to a copy as hold it). ``batch_size``: rows of a batch, None by memory.
    """

    gpus: int | None = None
    processes: int = 1
    device_map: str = "auto"
    batch_size: int | None = None
    engine: str = "transformers"

    def slots(self, weight_bytes: int) -> list[DeviceSlot]:
        """One for each copy of the model. UserError for more GPUs than there are, or a model that they do not hold."""
        import torch

        if self.processes < 1:
            raise UserError(f"{self.processes} processes answer nothing", where="--processes", fix="give 1 or more")
        num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        num = num_visible if self.gpus is None else self.gpus
        if num > num_visible:
            raise UserError(f"--gpus {num}, and torch sees {num_visible}", where="--gpus", fix="leave the option out")
        if num == 0:
            if self.device_map in ("balanced", "sequential"):
                raise UserError("layers are divided over GPUs, and there are none", where="--device-map")
            threads = None if self.processes == 1 else max(1, count_cores() // self.processes)
            return [DeviceSlot(threads=threads) for _ in range(self.processes)]
        if self.processes != 1:
            raise UserError(
                "--processes is for the CPU", where="--processes", why=f"{num} GPUs are used", fix="--gpus N"
            )
        size = num if self.device_map in ("balanced", "sequential") else 1
        if self.device_map == "auto":
            size = group_size(weight_bytes, _free_bytes(num), num)
        return [DeviceSlot(tuple(range(start, start + size))) for start in range(0, num - size + 1, size)]


ALL_GPUS = Placement()


def _free_bytes(num_gpus: int) -> int:
    """Of the first GPUs the least that is free, from the driver: torch would start CUDA on each of them here."""
    import torch

    from manyhands.facts.host import read_host_facts

    gpus = read_host_facts().gpus
    if len(gpus) < num_gpus:  # no NVML
        return min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(num_gpus))
    return min(gpu.free_bytes for gpu in gpus[:num_gpus])


def group_size(weight_bytes: int, free_bytes: int, num_gpus: int) -> int:
    """The fewest GPUs that hold the weights with room for the cache. UserError where all of them do not."""
    size = max(1, -(-weight_bytes // int(WEIGHTS_SHARE * free_bytes)))
    if size > num_gpus:
        raise UserError(
            f"the model's weights do not fit on {num_gpus} GPU{'s' if num_gpus > 1 else ''}",
            why=f"they have {weight_bytes / 2**30:.1f} GiB, and a GPU has {free_bytes / 2**30:.1f} GiB free",
            fix=f"use {size} GPUs of this size",
        )
    return size


def count_weight_bytes(folder: Path) -> int:
    """Of a model folder's weights as they are computed with: those stored in 4 bits take four times their file."""
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    config = read_json(folder / "config.json") or {}
    return stored * (4 if "quantization_config" in config else 1)
