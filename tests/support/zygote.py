"""``python -m MODULE`` as a fork of a process that has imported torch and transformers already.

A rank imports for six seconds of processor time and then trains a tiny model for one. Within ``forking()``, every
process that is started as ``sys.executable [-u] -m MODULE``, ``-c CODE`` or ``FILE.py``, by tests or by the product
itself, comes from a server that has imported what it will need, and has computed nothing. It is otherwise a process as
any: a child of the one that has started it, with its own arguments, environment, folder, signals, session and open
files, and runs as ``__main__``; where PYTHONPATH is its own, ``manyhands`` is imported anew. Launchers and ranks get a
server of their own, for the processes that they start.

What a fork cannot show, that a fresh interpreter finds all it needs, is left to tests that start one: those of
``tests/docs`` and ``tests/api``, and those that start by make or a shell; with MANYHANDS_TESTS_FORK=0 none is one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import itertools
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil

HASH_SEED = "42"  # of ranks, by their plan
IMPORTED = (
    *(f"manyhands.worker.{name}" for name in ("run", "stages", "training", "export_stages")),
    *("manyhands.cli.main", "manyhands.data.tokenize.parallel", "manyhands.export.verify", "torch.distributed.run"),
    *("transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto"),
    *("transformers.models.auto.tokenization_auto", "bitsandbytes"),
)
# Launchers, ranks and copies of a model's first process, which start processes themselves.
START_OTHERS = (
    *("accelerate.commands.launch", "manyhands", "manyhands.api.launcher", "manyhands.infer", "manyhands.worker"),
    "torch.distributed.run",
)
# Read by the interpreter and by packages when they start: a process whose values differ is not forked.
READ_EARLY = (
    *("BNB_", "DS_", "HF_", "HUGGINGFACE_", "LD_", "MKL_", "OMP_WAIT", "TORCHDYNAMO_", "TORCHINDUCTOR_"),
    *("TORCH_COMPILE", "TORCH_LOGS", "TRANSFORMERS_", "TRITON_", "XDG_"),
    *("PYTHONHASHSEED", "PYTHONHOME", "PYTHONIOENCODING", "PYTHONOPTIMIZE", "PYTHONUTF8", "PYTHONWARNINGS"),
)
OF_RANKS = {"PYTHONHASHSEED": HASH_SEED}  # all forks have it
ENDS_OF_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")  # of a Popen
NAME = "zygote"  # in place of a command line, of the server of a launcher or a rank
PADDING = 1 << 16  # bytes of arguments and environment that /proc can show of a fork
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
_parameters = inspect.signature(_execute)
_lock = threading.Lock()
Early = frozenset[tuple[str, str]]
_servers: dict[tuple[int, Early], socket.socket] = {}  # of the process with this id
_kept: list[types.ModuleType] = []  # this module, where it is not __main__ any more
_forked: set[Early] = set()  # what processes are forked with


@contextlib.contextmanager
def forking(environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Within, processes are forked where they can be, in a test; what measures outside of tests starts real ones.
    ``environment``: of such processes, as far as packages read it when they are imported. Beside a GPU none is forked:
    what is imported touches it, and CUDA works in no fork of a process that has.
    """
    is_off = os.environ.get("MANYHANDS_TESTS_FORK") == "0" or any(Path("/dev").glob("nvidia[0-9]*"))
    if "PYTEST_CURRENT_TEST" not in os.environ or is_off:
        yield
        return
    early = _early(environment)
    is_new = early not in _forked
    _forked.add(early)
    try:
        with _starting_by(_fork_or_execute, _fork_or_spawn):
            yield
    finally:
        if is_new:
            _forked.remove(early)


@contextlib.contextmanager
def _starting_by(execute: Any, spawn: Any) -> Iterator[None]:
    kept = subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
    subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds = execute, spawn  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds = kept  # type: ignore[attr-defined]


def _fork_or_execute(self: Any, *arguments: Any) -> None:
    """``Popen._execute_child``: sets ``pid``."""
    given = _parameters.bind(self, *arguments).arguments
    command, environment = given["args"], given["env"]
    environment = dict(os.environ) if environment is None else dict(environment)
    alone = [given[name] for name in ("preexec_fn", "shell", "gid", "gids", "uid", "executable")]
    if any(value not in (None, False) for value in alone) or not _is_forked(command, environment):
        return _execute(self, *arguments)
    handles = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
    files = [number if handle == -1 else handle for number, handle in enumerate(handles)]
    command, folder = [os.fspath(word) for word in command], os.path.join(os.getcwd(), given["cwd"] or "")
    own = {"session": given["start_new_session"], "group": given["process_group"], "umask": given["umask"]}
    self.pid = _ask(_Asked(command, environment, folder, **own), files, given["pass_fds"])
    self._child_created = True
    self._close_pipe_fds(*(given[name] for name in ENDS_OF_PIPES))
    return None


def _fork_or_spawn(path: Any, arguments: Sequence[Any], passed: Sequence[int]) -> int:
    """``spawnv_passfds`` of multiprocessing, which has servers of its own too: the process id of a new child."""
    command, environment = [os.fsdecode(word) for word in arguments], dict(os.environ)
    if "spawn_main" not in command[-2] or not _is_forked(command, environment):
        return int(_spawn(path, arguments, passed))
    return _ask(_Asked(command, environment, os.getcwd()), [0, 1, 2], passed)


def _is_forked(command: Any, environment: dict[str, str]) -> bool:
    if isinstance(command, (str, bytes, os.PathLike)) or command[0] != sys.executable:
        return False
    words = _after_flags(command)
    return bool(words) and (words[0] in ("-m", "-c") or words[0].endswith(".py")) and _early(environment) in _forked


def _after_flags(command: Sequence[Any]) -> list[str]:
    """What follows the interpreter and flags that a fork can have too."""
    return [os.fspath(word) for word in itertools.dropwhile(lambda word: word in ("-u", "-B"), command[1:])]


def _early(environment: Mapping[str, str]) -> Early:
    early = {name: value for name, value in environment.items() if name.startswith(READ_EARLY)}
    return frozenset(
        (early | OF_RANKS).items() if early.get("PYTHONHASHSEED", HASH_SEED) == HASH_SEED else early.items()
    )


@dataclass
class _Asked:
    """A process to be made, as ``Popen`` names its features."""

    command: list[str]
    environment: dict[str, str]
    folder: str
    session: bool = False
    group: int | None = None
    umask: int = -1
    passed: list[int] = field(default_factory=list)
    blocked: list[int] = field(default_factory=list)
    ignored: list[int] = field(default_factory=list)


def _ask(asked: _Asked, files: Sequence[int], passed: Sequence[int]) -> int:
    """The process id of a new child of this process. ``files``: its input, output and errors."""
    asked.passed = sorted(map(int, passed))
    asked.blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    asked.ignored = [number for number in TERMINAL_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    key = (os.getpid(), _early(asked.environment))
    with _lock:
        if key not in _servers:
            _servers[key] = _start_server(asked.environment)
        pipe = _servers[key]
        text = pickle.dumps(asdict(asked))
        _adopt_orphans(True)
        try:
            socket.send_fds(pipe, [struct.pack("I", len(text))], [*files, *asked.passed])
            pipe.sendall(text)
            answer = pipe.recv(4)
        finally:
            _adopt_orphans(False)
    if len(answer) != 4:
        raise RuntimeError("the server of forks has ended")
    return int(struct.unpack("I", answer)[0])


def _adopt_orphans(on: bool) -> None:
    """Whether orphans among this process's descendants become its children."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on))


def _start_server(environment: Mapping[str, str]) -> socket.socket:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen.__new__(subprocess.Popen)
    with _starting_by(_execute, _spawn):
        process.__init__(  # type: ignore[misc]
            [sys.executable, __file__, str(theirs.fileno()), "-" * PADDING],
            pass_fds=[theirs.fileno()],
            env={**environment, **OF_RANKS, "PYTHONPATH": os.environ["PYTHONPATH"], "PADDING": "-" * PADDING},
            stdin=subprocess.DEVNULL,
        )
    theirs.close()
    atexit.register(_end_server, process, ours)
    return ours


def is_server(process: psutil.Process) -> bool:
    """Whether it is the server of a launcher or a rank, which ends soon after that."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()[:1] == [NAME]
    return False


def _end_server(process: subprocess.Popen[bytes], pipe: socket.socket) -> None:
    pipe.close()
    process.wait()


# In the server.


def serve(pipe: socket.socket) -> NoReturn:
    """Until the process that asks is gone."""
    for number in TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    while True:
        head, files, _, _ = socket.recv_fds(pipe, 4, 64)
        if len(head) < 4:
            os._exit(0)
        asked = _Asked(**pickle.loads(pipe.recv(struct.unpack("I", head)[0], socket.MSG_WAITALL)))
        answers, answering = os.pipe()
        going, go = os.pipe()
        between = os.fork()
        if between == 0:  # its child becomes an orphan, and thereby a child of the process that asks
            child = os.fork()
            if child:
                os.write(answering, struct.pack("I", child))
                os._exit(0)
            os.close(go)
            os.read(going, 1)
            _become(asked, files)
        os.waitpid(between, 0)
        pipe.sendall(os.read(answers, 4))
        os.close(go)
        for number in (answers, answering, going, *files):
            os.close(number)


def _become(asked: _Asked, files: list[int]) -> NoReturn:
    """The process that ``asked`` describes, to its end."""
    code = 1
    try:
        _take_files(files, asked.passed)
        os.chdir(asked.folder)
        if asked.session:
            os.setsid()
        elif asked.group is not None and asked.group >= 0:
            os.setpgid(0, asked.group)
        if asked.umask >= 0:
            os.umask(asked.umask)
        _take_environment(asked.command, asked.environment)
        words = _after_flags(asked.command)
        if words[0] not in ("-m", "-c") or words[1] in START_OTHERS:
            _serve_from_here()
        for number in TERMINAL_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in asked.ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, asked.blocked)
        code = _run(words)
        _leave()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _take_files(files: list[int], passed: list[int]) -> None:
    """Standard input, output and errors, then ``passed``, under their numbers; all others are closed."""
    import fcntl

    highest = max([3, *files, *passed])
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, highest + 1) for number in files]
    for number, wanted in zip(moved, [0, 1, 2, *passed], strict=True):
        os.dup2(number, wanted, inheritable=True)
    begin = 3
    for kept in [*passed, os.sysconf("SC_OPEN_MAX")]:
        os.closerange(begin, kept)
        begin = kept + 1


def _take_environment(command: list[str], environment: dict[str, str]) -> None:
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ.clear()
    os.environ.update(environment)
    _show(command, environment)
    first = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    ours = () if first == before else ("manyhands", "sitecustomize")  # a test may plant code into our modules
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    sys.path[:] = [os.getcwd(), *first, *(path for path in sys.path[1:] if path not in before)]
    sys.orig_argv = command
    unbuffered = "-u" in command[:3] or bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        file: Any = open(number, "wb", 0 if unbuffered else -1, closefd=False)
        line_buffered = number == 2 or os.isatty(number)
        text = io.TextIOWrapper(file, "utf-8", errors, line_buffering=line_buffered, write_through=unbuffered)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")


def _show(command: list[str], environment: dict[str, str]) -> None:
    """What /proc shows of this process: the kernel reads it where the server's own arguments and environment lie."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end, of_environment, its_end = map(int, fields[45:49])
    variables = "\0".join(f"{name}={value}" for name, value in environment.items())
    for text, place, size in (
        (" ".join(command), begin, end - begin),
        (variables, of_environment, its_end - of_environment),
    ):
        shown = os.fsencode(text)[: size - 1].ljust(size - 1, b"\0") + (b"-" if place == begin else b"\0")
        ctypes.memmove(place, shown, size)


def _serve_from_here() -> None:
    """A server that this process's own requests go to, forked before it has done anything."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _show([NAME], {})
        serve(theirs)
    theirs.close()
    [early] = _forked
    _servers[os.getpid(), early] = ours
    subprocess.Popen._execute_child = _fork_or_execute  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _fork_or_spawn  # type: ignore[attr-defined]


def _run(words: list[str]) -> int:
    """The exit code of ``python WORDS``."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        if words[0] == "-m":
            sys.argv = ["-m", *words[2:]]
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        elif words[0] != "-c":
            sys.argv, sys.path[0], main.__file__ = list(words), str(Path(words[0]).resolve().parent), words[0]
            exec(compile(Path(words[0]).read_text(), words[0], "exec"), main.__dict__)
        else:
            sys.argv, sys.path[0] = ["-c", *words[2:]], ""
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        return 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        _leave()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _leave() -> None:
    """What an interpreter does at its end."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            file.flush()


def main() -> NoReturn:
    _forked.add(_early(os.environ))
    sys.path[0] = os.getcwd()
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _kept.append(sys.modules["__main__"])
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
