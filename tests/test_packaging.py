"""What the package promises: its wheel, its pins, its imports, its Makefile."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import app
from app import resources

ROOT = Path(app.__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "app").rglob("*.py"))
CONSTRAINTS = {kind: ROOT / f"constraints-{kind}.txt" for kind in ("cpu", "gpu")}

# Heavy packages, and the only parts of the program that may import them.
ALLOWED_IMPORTS = {
    "vllm": ("app/engines/",),
    "torch": ("app/engines/", "app/drafters/", "app/pairs/"),
    "transformers": ("app/engines/", "app/drafters/", "app/pairs/"),
}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_carries_what_the_checkout_has(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {path.relative_to(ROOT).as_posix() for path in SOURCES} <= names
    assert {f"app/pairs/{path.name}" for path in resources.pairs().glob("*.toml")} <= names
    for folder in ("templates", "static", "prompts"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert files, f"{folder} is empty"
        assert {f"app/_bundled/{path.relative_to(ROOT).as_posix()}" for path in files} <= names
    assert not any(name.startswith(("tests/", "docs/", ".")) for name in names)


def test_the_wheels_metadata(wheel: zipfile.ZipFile) -> None:
    prefix = f"specduel-{app.__version__}.dist-info"
    metadata = wheel.read(f"{prefix}/METADATA").decode()
    assert f"Version: {app.__version__}\n" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Dist: fastapi==0.136.3" in metadata
    assert f"{prefix}/licenses/LICENSE" in wheel.namelist()
    scripts = wheel.read(f"{prefix}/entry_points.txt").decode()
    assert "specduel = app.cli:main" in scripts
    assert "[vllm.general_plugins]\nspecduel = app.engines.plugin:register" in scripts


def test_an_unpacked_wheel_finds_its_resources(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Beside a folder named static that isn't its own, as site-packages can have one."""
    wheel.extractall(tmp_path)
    (tmp_path / "static").mkdir()
    program = "from app import resources as r; print(r.templates(), r.static(), r.prompts(), r.pairs(), sep='\\n')"
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    bundled = tmp_path / "app" / "_bundled"
    expected = [bundled / "templates", bundled / "static", bundled / "prompts", tmp_path / "app" / "pairs"]
    assert [Path(line) for line in done.stdout.splitlines()] == expected


def test_a_checkout_finds_its_resources() -> None:
    assert resources.templates() == ROOT / "templates"
    assert resources.static() == ROOT / "static"
    assert resources.prompts() == ROOT / "prompts"


def test_a_missing_folder_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "app")
    with pytest.raises(FileNotFoundError, match="make setup"):
        resources.templates()


def test_swagger_ui_is_at_hand_without_internet() -> None:
    folder = resources.swagger_ui()
    for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"):
        assert (folder / name).stat().st_size > 0


def test_the_entry_points_load() -> None:
    found = {point.name: point for point in entry_points(group="vllm.general_plugins")}
    assert callable(found["specduel"].load())
    assert callable({point.name: point for point in entry_points(group="console_scripts")}["specduel"].load())


def pins(requirements: list[str]) -> dict[str, str]:
    split = [re.split(r"\s*==\s*", requirement) for requirement in requirements]
    assert all(len(parts) == 2 for parts in split), f"not pinned: {requirements}"
    return {normal(name): version for name, version in split}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(kind: str) -> dict[str, str]:
    lines = CONSTRAINTS[kind].read_text().splitlines()
    return pins([line for line in lines if line and not line.startswith("#")])


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_what_is_pinned_is_what_is_locked(project: dict[str, Any], kind: str) -> None:
    extras = project["project"]["optional-dependencies"]
    wanted = pins([*project["project"]["dependencies"], *extras[kind], *extras["test"], *extras["lint"]])
    lock = locked(kind)
    assert {name: lock.get(name) for name in wanted} == wanted


def test_both_locks_stay_below_the_fastapi_that_vllm_refuses() -> None:
    for kind in CONSTRAINTS:
        major, minor, _ = locked(kind)["fastapi"].split(".")
        assert (int(major), int(minor)) < (0, 137)


def test_importing_the_app_needs_no_heavy_package() -> None:
    program = """if True:
        import sys

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("torch", "vllm", "transformers", "numpy", "gguf"):
                    raise ImportError(f"{name} was imported")

        sys.meta_path.insert(0, Block())
        import importlib, pkgutil
        import app

        for module in pkgutil.iter_modules(app.__path__):
            found = importlib.import_module(f"app.{module.name}") if module.name != "__main__" else None
            if module.name in ("measure", "pairs", "race", "web"):
                for part in pkgutil.iter_modules(found.__path__):
                    importlib.import_module(f"app.{module.name}.{part.name}")
        import app.engines.lane
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def imports(tree: ast.Module) -> Iterator[str]:
    """The top-level packages that a module imports anywhere, those for type checkers only left out."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped.update(child for statement in node.body for child in ast.walk(statement))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_heavy_packages_are_imported_in_their_places_only(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    for package in imports(ast.parse(path.read_text())):
        allowed = ALLOWED_IMPORTS.get(package)
        assert allowed is None or name.startswith(allowed), f"{name} imports {package}"


MUTATORS = frozenset({
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update",
})  # fmt: skip


def mutable_globals(tree: ast.Module) -> Iterator[str]:
    """Module-level names that are rebound or mutated from a function, and lower-case module-level containers."""
    names: set[str] = set()
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name):
                names.add(target.id)
                container = isinstance(
                    node.value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
                )
                if container and not target.id.isupper() and not target.id.startswith("__"):
                    yield f"{target.id} (a lower-case module-level container)"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{', '.join(node.names)} (global statement)"
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        arguments = function.args
        local = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        local |= {
            node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        for node in ast.walk(function):
            changed: ast.expr | None = None
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                changed = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
                changed = node.func.value
            if isinstance(changed, ast.Name) and changed.id in names - local:
                yield f"{changed.id} (changed in {function.name})"


def test_mutable_globals_are_seen() -> None:
    source = (
        "A = {}\nB = []\nc = []\nD = {}\ndef f(B):\n    A[1] = 2\n    B.append(1)\n    global E\n    D.update(x=1)\n"
    )
    found = " ".join(mutable_globals(ast.parse(source)))
    assert "A (changed in f)" in found and "D (changed in f)" in found
    assert "c (a lower-case" in found and "E (global statement)" in found
    assert "B (" not in found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_module_has_mutable_globals(path: Path) -> None:
    assert list(mutable_globals(ast.parse(path.read_text()))) == []


def test_make_help_lists_every_target() -> None:
    done = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = set(re.findall(r"^  make ([a-z-]+)", done.stdout, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert listed == targets
    assert {"help", "setup", "demo", "test", "lint", "clean", "screenshots", "bench"} <= listed


def test_make_targets_do_what_they_say() -> None:
    """A dry run: `make demo` sets up, then serves; `make test` sets up, then tests."""

    def dry(target: str) -> str:
        command = ["make", "--dry-run", "--no-print-directory", target, "ARGS=--flag"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert re.fullmatch(r"\S+ -m app\.bootstrap\n\S+/specduel serve --flag\n", dry("demo"))
    assert re.fullmatch(r"\S+ -m app\.bootstrap --extra test --chromium\n\S+/python -m pytest --flag\n", dry("test"))


def test_the_modules_that_make_runs_exist() -> None:
    modules = set(re.findall(r"-m (app\.[\w.]+)", (ROOT / "Makefile").read_text()))
    assert {"app.bootstrap", "app.screenshots"} <= modules
    for module in modules:
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


def test_the_browser_comes_last() -> None:
    """The marks decide the order, not the folders' names."""
    from tests.conftest import pytest_collection_modifyitems

    class Item:
        def __init__(self, *marks: str) -> None:
            self.marks = marks

        def get_closest_marker(self, name: str) -> str | None:
            return name if name in self.marks else None

    browser, engines, plain, other = Item("browser"), Item("engines"), Item(), Item("asyncio")
    items = [browser, plain, engines, other]
    pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    assert items == [plain, other, engines, browser]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert script.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in script
    assert script.rstrip().splitlines()[-1] == "make test"
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
