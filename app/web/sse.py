"""Server-sent events: a run's log over one connection, for any number of viewers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response

from app.race.run import Run

PING_S = 15
SEND_TIMEOUT_S = 20.0
"""A viewer that takes nothing for this long is dropped; it can come back with its Last-Event-ID."""

RETRY_MS = 1000
PADDING = " " * 2048
"""A comment this long fills the first buffer of proxies that hold short answers back."""

HEADERS = {"cache-control": "no-store, no-transform", "x-accel-buffering": "no"}
CHECK_EVENTS = 5
CHECK_EVERY_S = 0.2


def run_stream(run: Run, after: int) -> Response:
    """The events of a run after sequence number ``after``; 204 when it has ended and all of them were had."""
    if run.log.closed and after >= len(run.log):
        return Response(status_code=204)
    return _stream(_events(run, after))


def check_stream() -> Response:
    """Five events, 200 ms apart, by which a page finds out whether a proxy on the way holds events back."""
    return _stream(_checks())


async def _events(run: Run, after: int) -> AsyncGenerator[ServerSentEvent]:
    with run.viewing() as log:
        async for event in log.read(after):
            yield ServerSentEvent(event.data, event=event.type, id=str(event.seq), sep="\n")


async def _checks() -> AsyncGenerator[ServerSentEvent]:
    for number in range(CHECK_EVENTS):
        yield ServerSentEvent(str(number), event="check", sep="\n")
        await asyncio.sleep(CHECK_EVERY_S)
    yield ServerSentEvent("", event="end", sep="\n")


def _stream(events: AsyncGenerator[ServerSentEvent]) -> EventSourceResponse:
    return EventSourceResponse(_padded(events), ping=PING_S, send_timeout=SEND_TIMEOUT_S, headers=HEADERS, sep="\n")


async def _padded(events: AsyncGenerator[ServerSentEvent]) -> AsyncGenerator[ServerSentEvent]:
    yield ServerSentEvent(comment=PADDING, retry=RETRY_MS, sep="\n")
    async with aclosing(events):
        async for event in events:
            yield event
