"""A real server on a free port of this machine, in this process: disconnects need a socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import pytest
import uvicorn

from app.cli import bind, build_fleet
from app.engines.scripted import ScriptedFleet
from app.settings import Settings
from app.web.duel import Duel
from app.web.factory import create_app


class Site:
    """A running server and a client for it."""

    def __init__(self, duel: Duel, port: int, client: httpx2.AsyncClient) -> None:
        self.duel, self.port, self.client = duel, port, client

    @property
    def fleet(self) -> ScriptedFleet:
        assert isinstance(self.duel.fleet, ScriptedFleet)
        return self.duel.fleet

    async def ready(self) -> None:
        for _ in range(200):
            if (await self.client.get("/readyz")).status_code == 200:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the lanes did not become ready")

    async def post(self, **body: Any) -> httpx2.Response:
        return await self.client.post("/api/runs", json={"prompt": "Say something.", "max_tokens": 30, **body})

    async def events(self, url: str, **headers: str) -> list[tuple[int, str, dict[str, Any]]]:
        """All events of a stream until it closes: (seq, type, data)."""
        found = []
        async with self.client.stream("GET", url, headers=headers) as response:
            assert response.status_code == 200
            async for event in parse_events(response):
                found.append(event)
        return found


async def parse_events(response: httpx2.Response) -> AsyncIterator[tuple[int, str, dict[str, Any]]]:
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield int(fields.get("id", 0)), fields["event"], json.loads(fields["data"])
            fields = {}


MakeSite = Callable[..., Awaitable[Site]]


@pytest.fixture
async def make_site() -> AsyncIterator[MakeSite]:
    async with AsyncExitStack() as stack:

        async def make(scripted: str = "ttft_ms=5,step_ms=2", *, ready: bool = True, **settings: Any) -> Site:
            chosen = Settings(pair="scripted", scripted=scripted, port=0, **settings)
            fleet, pair = build_fleet(chosen)
            app = create_app(chosen, fleet, pair)
            listener: socket.socket = bind(chosen.host, chosen.port)
            port = listener.getsockname()[1]
            server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2))
            task = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:  # noqa: ASYNC110  (uvicorn has no event for it)
                await asyncio.sleep(0.01)

            async def stop() -> None:
                server.should_exit = True
                await task
                listener.close()

            stack.push_async_callback(stop)
            client = await stack.enter_async_context(
                httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10)
            )
            site = Site(app.state.duel, port, client)
            if ready:
                await site.ready()
            return site

        yield make
