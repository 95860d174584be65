"""What does the app cost? Tokens a second as an SSE client sees them, against a bare engine loop.

Both use the same engines in the same process, one lane at a time, in turn: app, bare, app, bare … The app's side goes
all the way: request, race, events, HTTP over a socket, and a client that parses what it gets (in this process too, so
its cost counts against the app). The bare side iterates the engine and counts. Both are timed by the client's clock:
tokens after the first event, over the time from the first event to the last.

The last line of the output is JSON. ``ratio`` is app / bare, of medians; the app should keep 0.97 or more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.engines.lane import LANES, Fleet, Lane, LaneName, LaneRequest, Sampling, Step
from app.errors import EngineError, SpecduelError
from app.settings import Settings

PROMPT = "Write a JSON array of twelve cities. Give each a name, a country and a population."
LAG_EVERY_S = 0.005


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When tokens arrived, in seconds on the monotonic clock, and how many at once."""

    times_s: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def tok_s(self) -> float | None:
        """Tokens after the first arrival, over the time since; None for a single arrival."""
        if len(self.times_s) < 2 or self.times_s[-1] <= self.times_s[0]:
            return None
        return sum(self.tokens[1:]) / (self.times_s[-1] - self.times_s[0])


@dataclass(slots=True)
class LagMeter:
    """How late the event loop runs a timer, in ms. ``worst_ms`` is of the time that the meter was on."""

    lags_ms: list[float] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def on(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self) -> None:
        while True:
            begin = time.monotonic()
            await asyncio.sleep(LAG_EVERY_S)
            self.lags_ms.append(1e3 * (time.monotonic() - begin - LAG_EVERY_S))

    def as_dict(self) -> dict[str, float | None]:
        ordered = sorted(self.lags_ms)
        return {
            "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 2) if ordered else None,
            "worst": round(ordered[-1], 2) if ordered else None,
        }


async def http(port: int, head: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request to the own server in HTTP/1.0, whose answers end with the connection; read past the headers.

    Raises:
        SpecduelError: the server answers with an error.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
    writer.write(f"{head} HTTP/1.0\r\nhost: 127.0.0.1:{port}\r\n{length}\r\n".encode() + body)
    await writer.drain()
    status = int((await reader.readline()).split()[1])
    while (await reader.readline()).strip():
        pass
    if status >= 400:
        answer = (await reader.read()).decode()
        writer.close()
        raise SpecduelError(f"{head.split()[1]} answered {status}: {answer[:500]}")
    return reader, writer


async def through_the_app(port: int, prompt: str, max_tokens: int) -> dict[LaneName, Arrivals]:
    """One in-turn run over HTTP: when each lane's tokens reached this client.

    Raises:
        SpecduelError: the run was refused, or a lane did not finish.
    """
    wanted = {"prompt": prompt, "mode": "in_turn", "temperature": 0, "max_tokens": max_tokens}
    reader, writer = await http(port, "POST /api/runs", json.dumps(wanted).encode())
    url = json.loads(await reader.read())["events_url"]
    writer.close()
    reader, writer = await http(port, f"GET {url}")
    seen: dict[LaneName, list[tuple[float, int]]] = {name: [] for name in LANES}
    finished: set[str] = set()
    kind, data = "message", ""
    try:
        while line := await reader.readline():
            text = line.decode().rstrip("\r\n")
            if text.startswith("event:"):
                kind = text[6:].strip()
            elif text.startswith("data:"):
                data = text[5:]
            elif not text and data:
                now = time.monotonic()
                event, data = json.loads(data), ""
                if kind == "steps":
                    tokens = sum(len(step["ids"]) for step in event["steps"])
                    seen[event["lane"]].append((now, tokens))
                elif kind == "lane_finished":
                    finished.add(event["lane"])
                elif kind == "end":
                    break
    finally:
        writer.close()
    if finished != set(LANES):
        raise SpecduelError("The benchmark's run did not finish in both lanes; see the server's messages.")
    return {
        name: Arrivals(tuple(at for at, _ in found), tuple(count for _, count in found)) for name, found in seen.items()
    }


async def bare(lane: Lane, prompt: str, max_tokens: int, number: int) -> Arrivals:
    """The same request to the engine itself. A lane without an engine of vLLM is iterated as it is."""
    prompt_ids = lane.encode([{"role": "user", "content": prompt}])
    request = LaneRequest(f"bare-{number}", prompt_ids, Sampling(0.0, 1.0, max_tokens, 0))
    outputs: Callable[[LaneRequest], AsyncIterator[int]] = getattr(lane, "bare", None) or _counts(lane)
    seen: list[tuple[float, int]] = []
    async for tokens in outputs(request):
        seen.append((time.monotonic(), tokens))
    return Arrivals(tuple(at for at, _ in seen), tuple(count for _, count in seen))


def _counts(lane: Lane) -> Callable[[LaneRequest], AsyncIterator[int]]:
    async def counts(request: LaneRequest) -> AsyncIterator[int]:
        async for item in lane.generate(request):
            if isinstance(item, Step):
                yield len(item.ids)

    return counts


async def measure(
    fleet: Fleet, port: int, *, rounds: int, max_tokens: int, prompt: str, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Run the benchmark on lanes that are ready behind a server on ``port``."""
    app: dict[LaneName, list[float]] = {name: [] for name in LANES}
    alone: dict[LaneName, list[float]] = {name: [] for name in LANES}
    lag = LagMeter()
    for number in range(rounds):
        async with lag.on():
            arrived = await through_the_app(port, prompt, max_tokens)
        for name, lane in fleet.lanes.items():
            engine = await bare(lane, prompt, max_tokens, number)
            if sum(engine.tokens) != sum(arrived[name].tokens):
                raise SpecduelError(
                    f"The {name} lane gave {sum(arrived[name].tokens)} tokens through the app and "
                    f"{sum(engine.tokens)} without; equal work is needed to compare."
                )
            for rates, found in ((app, arrived[name]), (alone, engine)):
                if found.tok_s is not None:
                    rates[name].append(found.tok_s)
        told = ", ".join(f"{name} {app[name][-1]:.2f} / {alone[name][-1]:.2f}" for name in LANES if app[name])
        tell(f"round {number + 1} of {rounds}, tok/s app / bare: {told}")
    return {
        "lanes": {name: _summary(app[name], alone[name]) for name in LANES},
        "event_loop_lag_ms": lag.as_dict(),
        "rounds": rounds,
        "max_tokens": max_tokens,
        "device": fleet.device.name,
        "source": fleet.source,
        "versions": dict(fleet.versions),
    }


def _summary(app: Sequence[float], alone: Sequence[float]) -> dict[str, float | None]:
    if not app or not alone:
        return {"app_tok_s": None, "bare_tok_s": None, "ratio": None}
    through, without = statistics.median(app), statistics.median(alone)
    return {"app_tok_s": round(through, 3), "bare_tok_s": round(without, 3), "ratio": round(through / without, 4)}


async def serve_and_measure(
    settings: Settings, fleet: Fleet, speculation: Any, *, rounds: int, max_tokens: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Start the app on a free port, wait for both lanes, measure, and stop everything.

    Raises:
        EngineError: a lane failed to start.
        SpecduelError: a run failed.
    """
    import socket

    import uvicorn

    from app.web.factory import create_app

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        app = create_app(settings, fleet, speculation)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", server_header=False))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            tell("starting both engines")
            while not server.started or {lane.state for lane in fleet.lanes.values()} != {"ready"}:
                for name, lane in fleet.lanes.items():
                    if lane.state == "failed":
                        raise EngineError(f"The {name} lane failed: {lane.error}")
                if serving.done():
                    raise SpecduelError("The server stopped before its engines were ready.")
                await asyncio.sleep(0.1)
            return await measure(fleet, port, rounds=rounds, max_tokens=max_tokens, prompt=PROMPT, tell=tell)
        finally:
            server.should_exit = True
            await serving


def run(settings: Settings, fleet: Fleet, speculation: Any, *, rounds: int = 5, max_tokens: int = 64) -> int:
    """``specduel bench``: progress on standard error, the result as one line of JSON on standard output.

    Raises:
        SpecduelError: an engine did not start, or a run failed.
    """

    def tell(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    result = asyncio.run(
        serve_and_measure(settings, fleet, speculation, rounds=rounds, max_tokens=max_tokens, tell=tell)
    )
    sys.stdout.write(json.dumps(result) + "\n")
    return 0
