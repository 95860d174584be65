"""The models that specduel builds itself, by the name that a pair's ``built`` key gives them.

A builder is a module, or an object in one, with :class:`Builder`'s functions. It is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from app.errors import PairError

MODULES: Mapping[str, str] = {
    "embedded": "app.pairs.embedded",
    "embedded-eagle3": "app.pairs.derived:EAGLE3",
    "embedded-draft": "app.pairs.derived:DRAFT",
    "stand-in": "app.pairs.derived:STAND_IN",
    "stand-in-eagle3": "app.pairs.derived:STAND_IN_EAGLE3",
}


class Builder(Protocol):
    """What a builder's module offers."""

    def path(self, cache_dir: Path) -> Path:
        """Where the model lies, or would lie, in a cache folder."""
        ...

    def about(self) -> Mapping[str, Any]:
        """What decides the model's bytes; its manifest says it."""
        ...

    def check(self, folder: Path) -> None:
        """Check a built model, every byte of it. Raises PairError: one line, with what to do."""
        ...

    def build(self, cache_dir: Path, *, report: Callable[[str], None], source: Path | None = None) -> Path:
        """Build the model unless a whole one is there. Raises PairError: one line, with what to do."""
        ...


def names() -> tuple[str, ...]:
    """The models that can be built, in the order in which they depend on each other."""
    return tuple(MODULES)


def builder(name: str) -> Builder:
    """The builder of a model.

    Raises:
        PairError: there is none of that name, or it needs a package that isn't installed.
    """
    if name not in MODULES:
        raise PairError(f"There is no built model {name!r}; specduel can build {', '.join(MODULES)}.")
    try:
        module, _, attribute = MODULES[name].partition(":")
        found = import_module(module)
        return cast("Builder", getattr(found, attribute) if attribute else found)
    except ImportError as error:
        raise PairError(f"Building {name} needs the package {error.name}. Run `make setup`.") from error
