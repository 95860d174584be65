"""Built models on disk: where they lie, how they get there in one piece, and how damage is found.

A built model is a folder with a ``manifest.json``: the SHA-256 and size of every other file. It is written
under a temporary name and renamed, so a folder that exists is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from app.errors import PairError

MANIFEST = "manifest.json"


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of built models: ``$SPECDUEL_CACHE``, or ``specduel`` under the user's cache folder."""
    env = os.environ if environ is None else environ
    if own := env.get("SPECDUEL_CACHE"):
        return Path(own).expanduser().absolute()
    # The specification of XDG_CACHE_HOME says that a relative path is to be ignored.
    shared = env.get("XDG_CACHE_HOME", "")
    base = Path(shared) if shared.startswith("/") else Path(env.get("HOME") or Path.home()) / ".cache"
    return base / "specduel"


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex. Reads it in pieces, at the disk's speed."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def locked(cache: Path, name: str) -> Iterator[None]:
    """Hold the lock of one built model: a second process waits instead of building it again.

    Raises:
        PairError: the cache folder can't be written.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        stream = (cache / f".{name}.lock").open("w")
    except OSError as error:
        raise PairError(
            f"The cache folder {cache} can't be written ({error.strerror}). Set SPECDUEL_CACHE to a folder that can."
        ) from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of ``folder`` when the block ends well, and vanishes when not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = Path(mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)  # mkdtemp makes it private, and safetensors its files
        for path in partial.iterdir():
            path.chmod(0o644)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_space(folder: Path, need: int, name: str) -> None:
    """Check for room before something big is written.

    Raises:
        PairError: there is less than ``need`` bytes.
    """
    free = shutil.disk_usage(folder).free
    if free < need:
        raise PairError(
            f"Building {name} takes {need / 1e9:.1f} GB of disk; {folder} has {free / 1e9:.1f} GB. "
            "Free some space, or set SPECDUEL_CACHE to another folder."
        )


def write_manifest(folder: Path, about: Mapping[str, Any]) -> None:
    """Write ``manifest.json``: ``about`` (where the model came from), and each file's SHA-256 and size in bytes."""
    files = {
        path.name: {"sha256": sha256(path), "bytes": path.stat().st_size}
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    text = json.dumps({**about, "files": files}, indent=2, sort_keys=True)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def check_manifest(folder: Path, about: Mapping[str, Any], *, remedy: str, hashes: bool = True) -> None:
    """Check that every file of a built model is there, whole, and made by this version's builder.

    Args:
        folder: the built model.
        about: what the builder would write into the manifest now.
        remedy: the sentence that says what to do, for the error.
        hashes: read every byte; else compare the sizes only.

    Raises:
        PairError: something is missing, damaged or outdated; one line that names it.
    """
    if not folder.is_dir():
        raise PairError(f"The model folder {folder} isn't there. {remedy}")
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (entry["sha256"], entry["bytes"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise PairError(f"{folder / MANIFEST} is missing or damaged. {remedy}") from error
    for key, value in about.items():
        if manifest.get(key) != value:
            raise PairError(
                f"{folder} was built for another version of specduel ({key} is {manifest.get(key)!r}, "
                f"this version needs {value!r}). {remedy}"
            )
    for name, (digest, size) in files.items():
        path = folder / name
        if not path.is_file():
            raise PairError(f"{path} is missing. {remedy}")
        if path.stat().st_size != size:
            raise PairError(f"{path} is damaged: {path.stat().st_size} bytes instead of {size}. {remedy}")
        if hashes and (found := sha256(path)) != digest:
            raise PairError(f"{path} is damaged: its SHA-256 is {found[:12]}… instead of {digest[:12]}…. {remedy}")
