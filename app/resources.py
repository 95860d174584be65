"""Where the files outside the package lie: templates, static files, prompts, Swagger UI.

In a checkout they are the top-level folders; a wheel carries them as ``app/_bundled``.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

ResourceName = Literal["templates", "static", "prompts"]

_PACKAGE = Path(__file__).resolve().parent


def folder(name: ResourceName) -> Path:
    """The folder ``name``.

    Raises:
        FileNotFoundError: neither place has it; the installation is incomplete.
    """
    places = (_PACKAGE.parent / name, _PACKAGE / "_bundled" / name)
    # An installed package's parent is site-packages, where a folder called "static" could be anyone's.
    if not (_PACKAGE.parent / "pyproject.toml").is_file():
        places = places[::-1]
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"The folder {name!r} is neither at {places[0]} nor at {places[1]}. Install specduel again with `make setup`."
    )


def templates() -> Path:
    """Jinja2 templates."""
    return folder("templates")


def static() -> Path:
    """Style sheets, ES modules and vendored scripts."""
    return folder("static")


def prompts() -> Path:
    """The prompt library, one file a prompt."""
    return folder("prompts")


def pairs() -> Path:
    """The pair files that ship with specduel."""
    return _PACKAGE / "pairs"


def swagger_ui() -> Path:
    """The folder with ``swagger-ui-bundle.js``, ``swagger-ui.css`` and ``favicon.png``.

    They come from the package fastapi-offline, of which nothing else is used (and nothing is imported).

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = find_spec("fastapi_offline")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("The package fastapi-offline is not installed. Install it with `make setup`.")
    return Path(spec.origin).parent / "static"
