"""A run's events: an append-only log that any number of viewers read at their own pace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One event. ``seq`` counts from 1; ``data`` is one line of JSON."""

    seq: int
    type: str
    data: str


class EventLog:
    """The events of one run, in order.

    A viewer holds an index into the log and nothing else, so a stalled viewer costs no memory and
    slows nobody down. The log is as long as its run, which the token budget bounds.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.closed = False
        self._events: list[Event] = []
        self._grown = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    def append(self, type: str, **data: Any) -> None:
        """Add an event. After the ``end`` event the log is closed, and late ones are dropped."""
        if self.closed:
            return
        text = json.dumps({"run_id": self.run_id, **data}, ensure_ascii=False, separators=(",", ":"))
        self._events.append(Event(len(self._events) + 1, type, text))
        self.closed = type == "end"
        self._grown.set()
        self._grown = asyncio.Event()

    async def read(self, after: int = 0) -> AsyncIterator[Event]:
        """Yield the events after sequence number ``after``, past and coming, until the log is closed."""
        position = max(0, after)
        while True:
            while position < len(self._events):
                yield self._events[position]
                position += 1
            if self.closed:
                return
            await self._grown.wait()
