"""The processes of an engine: finding them, ending them, and why one ended."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

import psutil

POLL_S = 0.02
PATIENCE_S = 3.0


@dataclass(frozen=True, slots=True)
class Core:
    """An engine's core process, as multiprocessing and as psutil know it."""

    handle: BaseProcess
    process: psutil.Process


def running(process: psutil.Process) -> bool:
    """False for a process that has ended, also while nobody has asked for its exit code."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def tree(cores: Iterable[Core]) -> list[psutil.Process]:
    """Core processes with all of their children, children first."""
    members: list[psutil.Process] = []
    for core in cores:
        with contextlib.suppress(psutil.Error):
            members += core.process.children(recursive=True)
        members.append(core.process)
    return members


def wait_gone(members: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait for processes to end; returns those that still run.

    psutil's own wait would take exit codes away from multiprocessing, which then believes they run for ever.
    """
    deadline = time.monotonic() + timeout_s
    alive = [member for member in members if running(member)]
    while alive and time.monotonic() < deadline:
        time.sleep(POLL_S)
        alive = [member for member in alive if running(member)]
    multiprocessing.active_children()  # collects the exit codes
    return alive


def end(members: Sequence[psutil.Process]) -> None:
    """Wait a moment for processes that were asked to end; terminate, then kill what is left."""
    alive = wait_gone(members, 1.0)
    for action in ("terminate", "kill"):
        for member in alive:
            with contextlib.suppress(psutil.Error):  # psutil never signals a reused id
                getattr(member, action)()
        alive = wait_gone(alive, PATIENCE_S)


def kill(cores: Sequence[Core]) -> None:
    """Kill engines with all their processes, at once."""
    members = tree(cores)
    for member in members:
        with contextlib.suppress(psutil.Error):
            member.kill()
    wait_gone(members, PATIENCE_S)


def exit_cause(core: Core) -> str | None:
    """How a core process ended, as a clause; None while it runs, or when it ended well."""
    code = core.handle.exitcode
    if not code:
        return None
    if code > 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; too little memory is the usual reason" if -code == signal.SIGKILL else ""
    return f"its process was ended by {name}{hint}"
