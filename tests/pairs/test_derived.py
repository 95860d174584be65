"""Models made from other built models, with a recipe of two small files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.errors import PairError
from app.pairs import builders, derived
from app.pairs.derived import Derived


class Parent:
    """A built model of one file."""

    def __init__(self) -> None:
        self.version = 1

    def about(self) -> dict[str, Any]:
        return {"version": self.version}

    def build(self, cache_dir: Path, *, report: Callable[[str], None], source: Path | None = None) -> Path:
        folder = cache_dir / "models" / "parent"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text(f"weights {self.version}")
        return folder


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Parent:
    made = Parent()
    monkeypatch.setattr(builders, "builder", lambda name: made)
    return made


def double(parent: Path, scratch: Path) -> Path:
    folder = scratch / "made"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "weights").write_text((parent / "weights").read_text() * 2)
    return folder


CHILD = Derived("child", "parent", double, lambda: {"recipe": "double"}, 1000)


def build(child: Derived, cache_dir: Path) -> tuple[Path, list[str]]:
    lines: list[str] = []
    return child.build(cache_dir, report=lines.append), lines


def test_the_recipe_makes_the_folder(parent: Parent, tmp_path: Path) -> None:
    folder, _ = build(CHILD, tmp_path)
    assert folder == CHILD.path(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "manifest.json", "weights"]
    assert (folder / "weights").read_text() == "weights 1weights 1"
    CHILD.check(folder)


def test_it_is_made_once(parent: Parent, tmp_path: Path) -> None:
    build(CHILD, tmp_path)
    folder, lines = build(CHILD, tmp_path)
    assert lines == [f"child: there and whole ({folder})"]


def test_another_parent_makes_another_child(parent: Parent, tmp_path: Path) -> None:
    folder, _ = build(CHILD, tmp_path)
    parent.version = 2
    with pytest.raises(PairError, match=r"another version of specduel.*`specduel pairs build child`"):
        CHILD.check(folder)
    build(CHILD, tmp_path)
    assert (folder / "weights").read_text() == "weights 2weights 2"


def test_damage_is_found(parent: Parent, tmp_path: Path) -> None:
    folder, _ = build(CHILD, tmp_path)
    (folder / "weights").write_text("weights 1weights 9")
    with pytest.raises(PairError, match="weights is damaged: its SHA-256"):
        CHILD.check(folder)
    sizes_only = Derived("child", "parent", double, CHILD.identity, 1000, hashed=False)
    sizes_only.check(folder)
    (folder / "weights").write_text("short")
    with pytest.raises(PairError, match="damaged: 5 bytes instead of 18"):
        sizes_only.check(folder)


def test_a_recipe_that_fails_leaves_nothing(parent: Parent, tmp_path: Path) -> None:
    def fail(parent: Path, scratch: Path) -> Path:
        (scratch / "half").touch()
        raise OSError(28, "No space left on device")

    with pytest.raises(PairError, match=r"child couldn't be written.*No space left"):
        build(Derived("child", "parent", fail, dict, 1000), tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["parent"]


def test_too_little_space_and_a_source_are_refused(parent: Parent, tmp_path: Path) -> None:
    with pytest.raises(PairError, match="Building child takes"):
        build(Derived("child", "parent", double, dict, 10**18), tmp_path)
    with pytest.raises(PairError, match="takes no --source"):
        CHILD.build(tmp_path, report=print, source=tmp_path)


def test_shipped_weights_are_read_from_their_manifest(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"eagle3": {"file": "x", "sha256": "abc"}}))
    assert derived.shipped_weights("eagle3", tmp_path) == {"weights_sha256": "abc"}
    with pytest.raises(PairError, match="no 'draft_model' drafter"):
        derived.shipped_weights("draft_model", tmp_path)


@pytest.mark.parametrize("name", builders.names())
def test_every_builder_has_a_name_and_a_place_of_its_own(name: str, tmp_path: Path) -> None:
    assert builders.builder(name).path(tmp_path) == tmp_path / "models" / name
