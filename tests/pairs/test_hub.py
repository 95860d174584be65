"""The hub's answers, from a small server on this machine that speaks as the hub does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from app.errors import PairError
from app.pairs import hub
from app.pairs.pair import ModelRef
from tests.pairs.checkpoints import write_model

constants = pytest.importorskip("huggingface_hub.constants")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Serves owner/open; owner/gated needs a token named "member"; anything else isn't there."""

    files: ClassVar[dict[str, bytes]] = {"config.json": b'{"vocab_size": 5}', "tokenizer.json": b"{}"}

    def do_HEAD(self) -> None:
        owner_name, _, rest = self.path.lstrip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if owner_name == "owner/gated" and token != "member":
            self.refuse(403 if token else 401, "GatedRepo")
        elif owner_name not in ("owner/open", "owner/gated", "owner/empty"):
            self.refuse(404, "RepoNotFound")
        elif revision not in ("main", COMMIT):
            self.refuse(404, "RevisionNotFound")
        elif owner_name == "owner/empty" or name not in self.files:
            self.refuse(404, "EntryNotFound")
        else:
            self.send_response(200)
            self.send_header("ETag", f'"{name}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(self.files[name])))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(self.files[name])

    do_GET = do_HEAD

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_small_files_arrive(endpoint: str) -> None:
    folder = hub.small_files(ModelRef("hub", "owner/open"), endpoint=endpoint)
    assert (folder / "config.json").read_bytes() == Hub.files["config.json"]
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / "tokenizer.model").exists()


def test_small_files_alone_are_no_cached_model(endpoint: str) -> None:
    ref = ModelRef("hub", "owner/open")
    assert hub.cached(ref) is None
    folder = hub.small_files(ref, endpoint=endpoint)
    assert hub.cached(ref) is None
    write_model(folder)
    found = hub.cached(ref)
    assert found is not None and found.samefile(folder)


@pytest.mark.parametrize(
    ("ref", "token", "message"),
    [
        (
            ModelRef("hub", "owner/gated", licence_url="https://licence.example/page"),
            None,
            r"owner/gated is gated\. Accept its licence at https://licence\.example/page, then set",
        ),
        (ModelRef("hub", "owner/gated"), None, r"licence at https://huggingface\.co/owner/gated"),
        (ModelRef("hub", "owner/gated"), "stranger", "the account of your token has no access"),
        (ModelRef("hub", "owner/nothing"), None, "The hub has no repository 'owner/nothing', or it is private"),
        (ModelRef("hub", "owner/open", revision="v9"), None, "owner/open has no revision 'v9'"),
        (ModelRef("hub", "owner/empty"), None, r"owner/empty has no config\.json"),
        (ModelRef("hub", "owner/a b"), None, "'owner/a b' is not a repository id"),
    ],
)
def test_refusals_are_one_line(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, ref: ModelRef, token: str | None, message: str
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(PairError, match=message) as caught:
        hub.small_files(ref, endpoint=endpoint)
    assert "\n" not in str(caught.value)


def test_a_token_with_access_opens_a_gated_repository(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "member")
    assert (hub.small_files(ModelRef("hub", "owner/gated"), endpoint=endpoint) / "config.json").is_file()


def test_no_hub_is_told_at_once() -> None:
    with pytest.raises(
        PairError, match=r"owner/open is not in the local cache.*`hf download owner/open`.*--pair embedded"
    ):
        hub.small_files(ModelRef("hub", "owner/open"), endpoint="http://127.0.0.1:9")


def test_offline_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PairError, match="HF_HUB_OFFLINE is set"):
        hub.small_files(ModelRef("hub", "owner/open"))
