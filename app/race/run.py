"""One run: its lanes, its state, its record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from app.engines.lane import Lane, LaneName, Step
from app.errors import SpecduelError
from app.measure.metrics import LaneMetrics, lane_metrics
from app.race.events import EventLog
from app.race.request import RunRequest

RECORD_SCHEMA = "specduel-run/1"

Status = Literal["active", "completed", "cancelled", "failed"]


@dataclass(slots=True)
class LaneRun:
    """One lane's part in a run, as it grows. ``started_ms`` counts from the start of the run."""

    lane: Lane
    prompt_tokens: int
    engine: Mapping[str, Any]
    draft_length: int | None
    price_per_hour: float | None = None
    started_ms: float | None = None
    steps: list[Step] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "cancelled"] | None = None
    reconciled: bool | None = None
    note: str | None = None
    error: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps)

    @property
    def ids(self) -> list[int]:
        return [token for step in self.steps for token in step.ids]

    @property
    def completed(self) -> bool:
        return self.finish_reason in ("stop", "length")

    def metrics(self) -> LaneMetrics:
        return lane_metrics(
            self.steps,
            prompt_tokens=self.prompt_tokens,
            draft_length=self.draft_length,
            price_per_hour=self.price_per_hour,
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "engine": dict(self.engine),
            "prompt_tokens": self.prompt_tokens,
            "started_ms": self.started_ms,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "steps": [step.as_dict() for step in self.steps],
            "metrics": self.metrics().as_dict(),
            "reconciled": self.reconciled,
            "note": self.note,
            "error": self.error,
        }


class Run:
    """A run's state, from the moment it is accepted.

    ``contended`` says that both lanes share a device at the same time, which distorts their ratio.
    """

    def __init__(
        self,
        run_id: str,
        request: RunRequest,
        lanes: Mapping[LaneName, LaneRun],
        *,
        source: Literal["live", "scripted"],
        contended: bool,
        pair: Mapping[str, Any],
        versions: Mapping[str, str | None],
    ) -> None:
        self.run_id = run_id
        self.request = request
        self.lanes = dict(lanes)
        self.source = source
        self.contended = contended
        self.pair = dict(pair)
        self.versions = dict(versions)
        self.created_at = datetime.now(UTC)
        self.status: Status = "active"
        self.comparison: dict[str, Any] | None = None
        self.log = EventLog(run_id)
        self.task: asyncio.Task[None] | None = None
        self.viewers = 0
        self.unwatched_since: float | None = None
        self._started = time.monotonic()

    @property
    def events_url(self) -> str:
        return f"/api/runs/{self.run_id}/events"

    def elapsed_ms(self) -> float:
        """Time since the run was accepted, in ms."""
        return 1000 * (time.monotonic() - self._started)

    @contextmanager
    def viewing(self) -> Iterator[EventLog]:
        """Count a viewer while the block runs, and hand out the log."""
        self.viewers += 1
        self.unwatched_since = None
        try:
            yield self.log
        finally:
            self.viewers -= 1
            if self.viewers == 0:
                self.unwatched_since = time.monotonic()

    def reference(self) -> dict[str, str]:
        """How another viewer finds this run."""
        return {"run_id": self.run_id, "events_url": self.events_url}

    def record(self) -> dict[str, Any]:
        """The run as data, in the recording's schema. Complete once ``status`` is not "active"."""
        return {
            "schema": RECORD_SCHEMA,
            "run_id": self.run_id,
            "created_at": self.created_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "source": self.source,
            "status": self.status,
            "mode": self.request.mode,
            "contended": self.contended,
            "pair": self.pair,
            "request": self.request.as_dict(),
            "versions": self.versions,
            "lanes": {name: lane.as_dict() for name, lane in self.lanes.items()},
            "comparison": self.comparison,
        }


def failure(error: Exception) -> dict[str, Any]:
    """An exception as an event's and a record's ``error``: its type's name and one line."""
    if isinstance(error, SpecduelError):
        return {"type": error.type, "message": error.message}
    return {"type": "internal_error", "message": f"{type(error).__name__}: {error}"}
