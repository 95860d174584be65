"""A real server in a child process, a real Chromium, and a watch over everything the page must never do.

Every test's page is watched: a Content-Security-Policy violation, an error on the console, an exception, or a
request to another origin fails the test, unless the test said that it expects one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from app.bootstrap import CHROMIUMS

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
FAST = "ttft_ms=60,step_ms=12,speculative.step_ms=16"
SLOW = "ttft_ms=100,step_ms=60,speculative.step_ms=70"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@dataclass(frozen=True)
class Site:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:  # noqa: S310  (loopback)
            return json.load(answer)

    def post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(  # noqa: S310  (loopback)
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            return json.load(answer)

    def answers(self, path: str) -> bool:
        try:
            self.get(path)
        except OSError:
            return False
        return True

    def record(self, run_id: str) -> dict[str, Any]:
        record: dict[str, Any] = self.get(f"/api/runs/{run_id}")
        return record

    def last_record(self) -> dict[str, Any]:
        """The record of the newest run, ended or not."""
        state = self.get("/api/state")
        return self.record((state["active_run"] or state["last_run"])["run_id"])

    def wait_idle(self) -> None:
        wait_until(lambda: self.get("/api/state")["active_run"] is None, "the active run to end")


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s in vain for {what}")
        time.sleep(0.05)


@contextmanager
def serving(scripted: str, wait_for: str = "/readyz", port: int | None = None) -> Iterator[Site]:
    """A server with scripted lanes, up when ``wait_for`` answers 200; on a free port unless one is given."""
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    command = [sys.executable, "-m", "app", "serve", "--pair", "scripted", "--port", str(port), "--scripted", scripted]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    site = Site(f"http://127.0.0.1:{port}", process)
    try:
        wait_until(lambda: process.poll() is not None or site.answers(wait_for), f"{wait_for} to answer", 60)
        assert process.poll() is None, (process.stderr.read() if process.stderr else b"").decode()
        yield site
    finally:
        process.terminate()
        process.communicate(timeout=15)


@pytest.fixture(scope="package")
def servers() -> Iterator[Callable[[str], Site]]:
    """Servers by their scripted options, each started once and shared."""
    with ExitStack() as stack:
        running: dict[str, Site] = {}

        def server(scripted: str) -> Site:
            if scripted not in running:
                running[scripted] = stack.enter_context(serving(scripted))
            running[scripted].wait_idle()
            return running[scripted]

        yield server


@pytest.fixture
def start() -> Iterator[Callable[..., Site]]:
    """Servers of one test's own, for those that break them."""
    with ExitStack() as stack:
        yield lambda *given, **named: stack.enter_context(serving(*given, **named))


@pytest.fixture
def fast(servers: Callable[[str], Site]) -> Site:
    """About 80 tok/s: runs end within a second or two."""
    return servers(FAST)


@pytest.fixture
def slow(servers: Callable[[str], Site]) -> Site:
    """Slow enough that a test can act while it runs."""
    return servers(SLOW)


def chromium_path() -> str:
    chosen = os.environ.get("SPECDUEL_CHROMIUM")
    found = chosen or next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if not found or not Path(found).exists():
        pytest.fail(
            f"The browser tests need Chromium: none of {', '.join(CHROMIUMS)} is on the PATH. "
            "Install it (Debian: apt-get install chromium), or set SPECDUEL_CHROMIUM to its path."
        )
    return found


# Package scope, not session: Playwright's loop must be gone before tests of other folders run theirs.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    path = chromium_path()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_FLAGS))
        yield chromium
        chromium.close()


@dataclass
class Watch:
    """What a page did that it must not do. ``expected`` are patterns of messages that a test provokes."""

    origin: str = ""
    messages: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    @property
    def unexpected(self) -> list[str]:
        return [m for m in self.messages if not any(re.search(pattern, m) for pattern in self.expected)]

    def follow(self, page: Page) -> None:
        page.on("console", lambda m: self.messages.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.messages.append(f"exception: {error}"))
        page.on("request", lambda request: self._request(request.url))

    def _request(self, url: str) -> None:
        if not url.startswith((self.origin + "/", "data:", "blob:", "about:")):
            self.foreign.append(url)


class Open:
    """Opens watched pages: ``page = open_page(site)``."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.watch = Watch()
        self.contexts: list[BrowserContext] = []

    def __call__(self, site: Site, width: int = 1920, height: int = 1080, *, go: bool = True, **options: Any) -> Page:
        context = self.browser.new_context(viewport={"width": width, "height": height}, **options)
        self.contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        self.watch.origin = site.url
        self.watch.follow(page)
        if go:
            page.goto(site.url, wait_until="load")
        return page


@pytest.fixture
def open_page(browser: Browser, start: Callable[..., Site]) -> Iterator[Open]:
    """Pages close before the test's own servers (hence ``start``): their polls would fail otherwise."""
    opener = Open(browser)
    yield opener
    for context in opener.contexts:
        context.close()
    assert opener.watch.unexpected == []
    assert opener.watch.foreign == []
