"""Pictures of the page for the documentation, from a real run on a running server.

    python -m app.screenshots --url http://127.0.0.1:8000 --out docs/images

Drives Chromium through one run and writes ``desktop-running.png`` (1920 x 1080, both lanes writing),
``desktop.png`` (1920 x 1080, the fair figure of the same prompt in turn) and ``phone.png`` (390 x 844, a viewer).
Needs the ``test`` extra (Playwright) and a Chromium on the PATH, or at ``SPECDUEL_CHROMIUM``.
The last line of the output is JSON: the files, and what the run measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.bootstrap import CHROMIUMS
from app.errors import SpecduelError, StartError

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
)
DESKTOP = {"width": 1920, "height": 1080}
PHONE = {"width": 390, "height": 844}
READY_S = 600
RUN_S = 600
RUNNING_TOKENS = 24
"""How many tokens both lanes have written when the picture of the running page is taken."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m app.screenshots", description="Pictures of a real run.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a running server (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder to write to (%(default)s)")
    parser.add_argument("--prompt-id", help="a prompt of the library (default: what the page starts with)")
    parser.add_argument("--max-tokens", type=int, help="token budget of the run (default: the prompt's)")
    options = parser.parse_args(arguments)
    try:
        result = take(options.url.rstrip("/"), options.out, prompt_id=options.prompt_id, max_tokens=options.max_tokens)
    except SpecduelError as error:
        sys.stderr.write(f"screenshots: {error.message}\n")
        return 1
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def chromium() -> str:
    """The path of a Chromium.

    Raises:
        StartError: there is none.
    """
    path = os.environ.get("SPECDUEL_CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if not path or not Path(path).exists():
        raise StartError(
            f"No Chromium found: none of {', '.join(CHROMIUMS)} is on the PATH. "
            "Install one, or set SPECDUEL_CHROMIUM to its path."
        )
    return path


def take(url: str, out: Path, *, prompt_id: str | None = None, max_tokens: int | None = None) -> dict[str, Any]:
    """Take the pictures; returns their paths and what the run in turn measured.

    Raises:
        StartError: Playwright, Chromium or the server isn't there, or the run did not complete.
    """
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError as error:
        raise StartError("Playwright is missing. Install it: pip install 'specduel[test]'.") from error
    path = chromium()
    known = [prompt["id"] for prompt in fetch(f"{url}/api/prompts")["prompts"]]
    if prompt_id and prompt_id not in known:
        raise StartError(f"The server's library has no prompt {prompt_id!r}. It has: {', '.join(known)}.")
    out.mkdir(parents=True, exist_ok=True)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_FLAGS))
            try:
                return photograph(browser, url, out, prompt_id, max_tokens)
            finally:
                browser.close()
    except Error as error:
        raise StartError(f"The page could not be driven: {error.message.splitlines()[0]}") from error


def photograph(browser: Browser, url: str, out: Path, prompt_id: str | None, max_tokens: int | None) -> dict[str, Any]:
    """One run together and the same prompt in turn, photographed from two desktop moments and one phone."""
    desktop = browser.new_page(viewport=DESKTOP, reduced_motion="reduce")  # type: ignore[arg-type]
    desktop.set_default_timeout(1000 * RUN_S)  # engines on a busy machine take their time
    desktop.goto(url, wait_until="load")
    desktop.locator("#run:enabled").wait_for(timeout=1000 * READY_S)
    if prompt_id:
        desktop.locator("#open-library").click()
        desktop.locator(f'[data-pick="{prompt_id}"]').click()
        desktop.locator(f'#prompt-form[data-prompt-id="{prompt_id}"]').wait_for(state="attached")
    if max_tokens:
        desktop.locator("#f-max_tokens").fill(str(max_tokens))
    desktop.locator("#run").click()
    desktop.locator("html.is-active").wait_for(state="attached")
    written(desktop, RUNNING_TOKENS)
    pictures = [shot(desktop, out / "desktop-running.png")]
    finished(desktop)
    if desktop.locator("#fair").is_visible():
        desktop.locator("body").press("f")
        desktop.locator("html.is-active").wait_for(state="attached")
        finished(desktop)
    desktop.locator("#record").wait_for()
    pictures.append(shot(desktop, out / "desktop.png"))
    record = fetch(url + str(desktop.locator("#record").get_attribute("href")))
    if record["status"] != "completed":
        raise StartError(f"The run ended as {record['status']}; the server's log says why.")

    phone = browser.new_page(viewport=PHONE, device_scale_factor=2, has_touch=True)  # type: ignore[arg-type]
    phone.goto(url, wait_until="load")
    phone.set_default_timeout(1000 * RUN_S)
    phone.locator(".lane-speculative [data-figure=output_tokens]:not(:text-is('—'))").wait_for()
    pictures.append(shot(phone, out / "phone.png"))
    return {
        "pictures": [str(picture) for picture in pictures],
        "run_id": record["run_id"],
        "source": record["source"],
        "mode": record["mode"],
        "decode_speedup": record["comparison"]["decode_speedup"],
        "tokens": record["comparison"]["tokens"],
    }


def written(page: Page, tokens: int) -> None:
    """Wait until every lane has written ``tokens`` tokens, or the run is over."""
    many = "".join(f":not(:text-is('{count}'))" for count in ("—", *range(tokens)))
    for lane in ("baseline", "speculative"):
        page.locator(f".lane-{lane} [data-figure=output_tokens]{many}, html:not(.is-active)").first.wait_for(
            state="attached", timeout=1000 * RUN_S
        )


def finished(page: Page) -> None:
    page.locator("html:not(.is-active)").wait_for(state="attached", timeout=1000 * RUN_S)


def shot(page: Page, path: Path) -> Path:
    page.wait_for_timeout(500)  # charts are drawn a few times a second
    page.screenshot(path=path)
    return path


def fetch(url: str) -> Any:
    """The JSON at a URL.

    Raises:
        StartError: nobody answers there.
    """
    if not url.startswith(("http://", "https://")):
        raise StartError(f"{url!r} is no URL of a server. Give one like http://127.0.0.1:8000.")
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310  (scheme checked above)
            return json.load(answer)
    except OSError as error:
        raise StartError(f"No server answers at {url}: {error}. Start one with `specduel serve`.") from error


if __name__ == "__main__":
    sys.exit(main())
