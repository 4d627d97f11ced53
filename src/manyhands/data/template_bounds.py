"""What a chat template may cost. It is a program from outside: a loop, a recursion or a product of strings may never
end.

Two bounds, both of CPU time, so that a busy machine refuses nothing that an idle one takes. ``try_apart`` renders small
conversations in a forked process with limits of time and memory, before any row; ``limit_cpu`` ends the rendering of a
row that takes too long. What a template does with the content of rows is bounded in time only. Knows no tokens.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import psutil

from manyhands.core.errors import UserError

RENDER_CPU_S = 10.0  # of one call; a conversation takes a ten-thousandth of it
CPU_S_A_CONVERSATION = 0.05  # more, for calls with many
TRIAL_CPU_S = 20
TRIAL_BYTES = 1 << 30
TRIAL_WALL_S = 600.0  # the process hangs, it does not compute
MAX_CHARACTERS = 10_000_000  # of a trial's conversation of some hundred
TURN = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello there"})
TRIALS = (list(TURN), [{"role": "system", "content": "Be brief"}, *TURN], [*TURN, *TURN, TURN[0]], [*TURN] * 8)
TOO_MUCH_MEMORY, TOO_LONG_TEXT = 3, 4


class _TooSlow(BaseException):
    """No ``Exception``: templates' own errors are caught as such, by Jinja too."""


class _Limit:
    """The one limit of this process that is set; signals reach the main thread only."""

    def __init__(self) -> None:
        self.end_s, self.installed, self.active = 0.0, False, False

    def check(self, *_: Any) -> None:
        if not self.active:  # a signal that was under way when the rendering ended
            return
        left_s = self.end_s - time.thread_time()
        if left_s <= 0:
            raise _TooSlow
        signal.setitimer(signal.ITIMER_VIRTUAL, max(left_s, 0.01))  # the time was other threads'


_limit = _Limit()


@contextmanager
def limit_cpu(num_conversations: int = 1) -> Iterator[None]:
    """Raises UserError once rendering within it takes too long. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if not _limit.installed:
        signal.signal(signal.SIGVTALRM, _limit.check)
        _limit.installed = True
    seconds = RENDER_CPU_S + CPU_S_A_CONVERSATION * num_conversations
    _limit.end_s = time.thread_time() + seconds
    _limit.active = True
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    except _TooSlow:
        raise _refusal(f"more than {seconds:.0f} s for {num_conversations} conversation(s)") from None
    finally:
        _limit.active = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def try_apart(render: Callable[..., str]) -> None:
    """UserError where ``render(messages, add_generation_prompt=...)`` takes too much time or memory for small
    conversations.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: the child uses nothing of theirs
        child = os.fork()
    if child == 0:
        _try_and_exit(render)
    end = time.monotonic() + TRIAL_WALL_S
    pid, status = os.waitpid(child, os.WNOHANG)
    for wait_s in chain((0.001, 0.002, 0.005, 0.01, 0.02), iter(lambda: 0.05, None)):
        if pid or time.monotonic() > end:
            break
        time.sleep(wait_s)
        pid, status = os.waitpid(child, os.WNOHANG)
    if not pid:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise _refusal(f"no end within {TRIAL_WALL_S:.0f} s")
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        took = {
            TOO_MUCH_MEMORY: f"more than {TRIAL_BYTES >> 30} GiB of memory",
            TOO_LONG_TEXT: f"more than {MAX_CHARACTERS:,} characters",
            -signal.SIGXCPU: f"more than {TRIAL_CPU_S} s",
            -signal.SIGKILL: f"more than {TRIAL_CPU_S} s",
        }.get(code, f"the process that tried it ended with {code}")
        raise _refusal(f"{took} for a conversation of a few words")


def _try_and_exit(render: Callable[..., str]) -> None:
    """In the forked process: never returns."""
    code = 0
    try:
        bytes_now = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S + 1))
        resource.setrlimit(resource.RLIMIT_AS, (bytes_now + TRIAL_BYTES, bytes_now + TRIAL_BYTES))
        for messages in TRIALS:
            for generation in (False, True):
                try:
                    code = (
                        TOO_LONG_TEXT
                        if len(render(messages, add_generation_prompt=generation)) > MAX_CHARACTERS
                        else code
                    )
                except MemoryError:
                    code = TOO_MUCH_MEMORY
                except Exception:  # what a template refuses is said where rows are rendered
                    continue
    finally:
        os._exit(code)


def _refusal(took: str) -> UserError:
    return UserError(
        "the chat template takes too long, or too much memory",
        where="the tokenizer's chat template, or model.chat_template",
        why=f"it took {took}",
        fix="give another template with model.chat_template, by name (chatml, llama3, ...) or as a file",
    )
