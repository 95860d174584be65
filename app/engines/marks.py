"""Marks from an engine's processes: which phase of the start-up begins, and what went wrong.

A file of JSON lines, appended by the engine's processes and read by the server. Each line is one write of less
than a page in append mode, so lines of several processes never mix.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MARKS = "SPECDUEL_MARKS"  # the file of marks
LOG = "SPECDUEL_ENGINE_LOG"  # the file that takes the engine's output
OWNER = "SPECDUEL_OWNER"  # the server's process id: the plugin runs there as well, and must do nothing

# How vLLM's own messages tell the phases apart. A message that matches none is ignored.
PHASES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"Starting to load model"), "Loading the weights"),
    (re.compile(r"Loading drafter model"), "Loading the draft"),
    (re.compile(r"torch\.compile|Dynamo bytecode|Compiling|Warming up model for the compilation"), "Compiling"),
    (
        re.compile(r"for KV cache on node|KV cache size|Available KV cache memory|reserved .* memory for KV"),
        "Allocating the KV cache",
    ),
    (re.compile(r"Profiling CUDA graph|Capturing CUDA graph|Graph capturing"), "Capturing CUDA graphs"),
)
LONGEST = 2000


@dataclass(frozen=True, slots=True)
class Mark:
    """``kind`` "phase": ``text`` names the phase that begins. "error": ``text`` is one line about what went wrong."""

    kind: Literal["phase", "error"]
    text: str
    pid: int


class Writer:
    """Appends marks to a file."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def phase(self, name: str) -> None:
        self._write("phase", name)

    def error(self, text: str) -> None:
        self._write("error", text)

    def _write(self, kind: str, text: str) -> None:
        line = json.dumps({"kind": kind, "text": text[:LONGEST], "pid": os.getpid()}) + "\n"
        try:
            os.write(self._file, line.encode())
        except OSError:
            pass  # a full disk must not stop an engine


class MarkHandler(logging.Handler):
    """Turns vLLM's log records into marks."""

    def __init__(self, writer: Writer) -> None:
        super().__init__(logging.INFO)
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if record.levelno >= logging.ERROR:
                error = record.exc_info[1] if record.exc_info else None
                if error is not None:
                    self._writer.error(one_line(error))
                return
            if record.levelno > logging.INFO:  # a warning that compiling is off is no phase
                return
            message = record.getMessage()
            for pattern, phase in PHASES:
                if pattern.search(message):
                    self._writer.phase(phase)
                    return
        except Exception:  # a log message must never harm the engine
            self.handleError(record)


def one_line(error: BaseException) -> str:
    """An exception as one line: its type, and the first lines of its message, from the innermost cause."""
    seen = {id(error)}
    while (inner := error.__cause__) is not None and id(inner) not in seen:
        error = inner
        seen.add(id(error))
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def read(path: Path, start: int = 0) -> Iterator[tuple[Mark, int]]:
    """The whole lines of a file of marks from byte ``start``, each with the offset behind it."""
    try:
        with path.open("rb") as stream:
            stream.seek(start)
            data = stream.read()
    except OSError:
        return
    end = start
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            return
        end += len(line)
        try:
            fields = json.loads(line)
            yield Mark(fields["kind"], str(fields["text"]), int(fields["pid"])), end
        except (ValueError, KeyError, TypeError):
            continue


def redirect_output(path: str) -> None:
    """Send this process's standard output and error to a file, what C++ code writes included."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
