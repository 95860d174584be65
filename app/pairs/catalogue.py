"""Pair files: TOML to :class:`~app.pairs.pair.Pair`.

A file's keys are the fields of ``Pair``; its name is the pair's name::

    title = "Qwen3 8B, drafted by Qwen3 0.6B"
    method = "draft_model"               # "ngram", "draft_model" or "eagle3"
    num_speculative_tokens = 4
    devices = ["cuda"]                   # default: "cpu" and "cuda"
    notes = "A sentence for the page."

    [target]                             # one of: hub, path, built
    hub = "Qwen/Qwen3-8B"
    revision = "main"                    # optional
    licence_url = "https://…"            # optional: where a gated model's licence is accepted

    [draft]                              # like [target]; not with "ngram"
    hub = "Qwen/Qwen3-0.6B"

    [speculative_config]                 # optional: more keys of vLLM's speculative_config
    [engine]                             # optional: vLLM engine arguments of both lanes …
    [baseline_engine]                    # … of one lane only
    [speculative_engine]

A ``path`` is relative to the file.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from app import resources
from app.errors import PairError
from app.pairs.pair import METHODS, Method, ModelRef, Pair

DEFAULTS: Mapping[str, str] = {"cpu": "embedded", "cuda": "qwen3-8b"}

DEVICES = ("cpu", "cuda")
SOURCES: tuple[Literal["built", "path", "hub"], ...] = ("built", "path", "hub")
TOP_KEYS = tuple(field.name for field in dataclasses.fields(Pair) if field.name != "name")
MODEL_KEYS = (*SOURCES, "revision", "licence_url")
MAX_SPECULATIVE_TOKENS = 32

# What the fields of a pair already say; given twice, the two could disagree.
RESERVED_ENGINE: Mapping[str, str] = {
    "model": "[target]",
    "revision": "[target]",
    "speculative_config": "[speculative_config]",
}
RESERVED_SPECULATIVE: Mapping[str, str] = {
    "method": "the key method",
    "model": "[draft]",
    "revision": "[draft]",
    "num_speculative_tokens": "the key num_speculative_tokens",
}

NGRAM_CONFIG: Mapping[str, Any] = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""What an n-gram lookup matches unless a pair says otherwise: the last 4 tokens, then 3, then 2."""


def names() -> tuple[str, ...]:
    """The names of the pairs that ship with specduel, sorted."""
    return tuple(sorted(path.stem for path in resources.pairs().glob("*.toml")))


def default_name(device: Literal["cpu", "cuda"]) -> str:
    """The pair that runs where nothing else was asked for."""
    return DEFAULTS[device]


def load(name_or_path: str) -> Pair:
    """The pair of that name, or of that TOML file (anything that ends in ``.toml`` or holds a slash).

    Raises:
        PairError: no such pair or file, or a mistake in it; the message names the file and the key.
    """
    if name_or_path.endswith(".toml") or "/" in name_or_path:
        return read(Path(name_or_path).expanduser())
    if name_or_path not in names():
        raise PairError(
            f"There is no pair {name_or_path!r}{_nearest(name_or_path, names())}. "
            f"The pairs are: {', '.join(names())}. Your own: --pair path/to/file.toml."
        )
    return read(resources.pairs() / f"{name_or_path}.toml")


def read(path: Path) -> Pair:
    """Read one pair file.

    Raises:
        PairError: it can't be read, or has a mistake.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PairError(f"The pair file {path} can't be read: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PairError(f"{path} is not valid TOML: {error}.") from error
    return parse(data, path)


def parse(data: Mapping[str, Any], path: Path) -> Pair:
    """A pair from a file's parsed TOML; ``path`` gives its name, and the folder of relative paths.

    Raises:
        PairError: an unknown, missing or wrong key; the message names it and what is allowed.
    """
    table = _Table(path, "", data, TOP_KEYS)
    method = _method(table.text("method"), str(path))
    target = _model(table.table("target", MODEL_KEYS), path)
    draft = _model(table.table("draft", MODEL_KEYS), path) if "draft" in data else None
    if method == "ngram" and draft is not None:
        raise table.mistake("draft", 'the method "ngram" drafts from the prompt and takes no [draft]; remove it')
    if method != "ngram" and draft is None:
        raise table.mistake("draft", f'the method "{method}" needs a [draft] table with hub, path or built')
    return Pair(
        name=path.stem,
        title=table.text("title"),
        target=target,
        method=method,
        num_speculative_tokens=table.integer("num_speculative_tokens", 1, MAX_SPECULATIVE_TOKENS),
        draft=draft,
        devices=table.choices("devices", DEVICES),
        stand_in=table.flag("stand_in"),
        notes=table.text("notes", ""),
        engine=table.free("engine", RESERVED_ENGINE),
        baseline_engine=table.free("baseline_engine", RESERVED_ENGINE),
        speculative_engine=table.free("speculative_engine", RESERVED_ENGINE),
        speculative_config=table.free("speculative_config", RESERVED_SPECULATIVE),
    )


def override(pair: Pair, *, method: str | None = None, num_speculative_tokens: int | None = None) -> Pair:
    """The pair with another method or number of drafted tokens, as the command line or the page asks for.

    n-gram works for any target. Another method is taken from the shipped pair with the same target that uses it,
    with that pair's draft and number of drafted tokens.

    Raises:
        PairError: an unknown method, a number out of range, or no pair has a draft of that kind for this target.
    """
    if method is not None and _method(method, "--method") != pair.method:
        pair = _with_method(pair, _method(method, "--method"))
    if num_speculative_tokens is not None:
        if not 1 <= num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise PairError(
                f"--num-speculative-tokens is {num_speculative_tokens}; it must be 1 to {MAX_SPECULATIVE_TOKENS}."
            )
        pair = dataclasses.replace(pair, num_speculative_tokens=num_speculative_tokens)
    return pair


def methods(pair: Pair) -> tuple[Method, ...]:
    """The methods that :func:`override` can give this pair, its own included, in the order of METHODS."""
    known = {pair.method, "ngram", *(sibling.method for sibling in _siblings(pair))}
    return tuple(method for method in METHODS if method in known)


def _with_method(pair: Pair, method: Method) -> Pair:
    for sibling in _siblings(pair):
        if sibling.method == method:
            return dataclasses.replace(
                pair,
                title=sibling.title,
                method=method,
                num_speculative_tokens=sibling.num_speculative_tokens,
                draft=sibling.draft,
                notes=sibling.notes,
                speculative_engine=sibling.speculative_engine,
                speculative_config=sibling.speculative_config,
            )
    if method != "ngram":
        raise PairError(
            f"The pair {pair.name!r} has no draft for the method {method!r}; it can use {', '.join(methods(pair))}. "
            "For a draft of your own, write a pair file and give it to --pair."
        )
    return dataclasses.replace(
        pair,
        title=f"{pair.title.partition(',')[0]}, n-gram lookup",
        method=method,
        draft=None,
        notes="",
        speculative_engine={},
        speculative_config=NGRAM_CONFIG,
    )


def _siblings(pair: Pair) -> Iterable[Pair]:
    return (
        other
        for other in map(load, names())
        if other.name != pair.name
        and (other.target.source, other.target.name) == (pair.target.source, pair.target.name)
    )


def _method(text: str, where: str) -> Method:
    if text not in METHODS:
        raise PairError(
            f"{where}: the method {text!r} is unknown{_nearest(text, METHODS)}. It must be one of {', '.join(METHODS)}."
        )
    return text


def _model(table: _Table, path: Path) -> ModelRef:
    given = [source for source in SOURCES if source in table.data]
    if len(given) != 1:
        raise table.mistake(None, "give exactly one of hub, path or built")
    source = given[0]
    name = table.text(source)
    if source == "path":
        name = str((path.absolute().parent / Path(name).expanduser()).resolve())
    if source == "hub" and (name.count("/") != 1 or not all(name.split("/"))):
        raise table.mistake("hub", f'{name!r} is not a repository id; it must look like "owner/name"')
    return ModelRef(
        source=source,
        name=name,
        revision=table.text("revision", None),
        licence_url=table.text("licence_url", None),
    )


def _nearest(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


_MISSING: Any = object()


@dataclasses.dataclass(frozen=True)
class _Table:
    """A TOML table being read: every mistake names the file and the key."""

    path: Path
    prefix: str
    data: Mapping[str, Any]
    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        for key in self.data:
            if key not in self.keys:
                raise self.mistake(key, f"unknown key{_nearest(key, self.keys)}. The keys are: {', '.join(self.keys)}")

    def mistake(self, key: str | None, what: str) -> PairError:
        where = ".".join(part for part in (self.prefix, key) if part)
        return PairError(f"{self.path}: {where}: {what}.")

    def value(self, key: str, kind: type, name: str, default: Any = _MISSING) -> Any:
        if key not in self.data:
            if default is _MISSING:
                raise self.mistake(key, f"missing; it must be {name}")
            return default
        value = self.data[key]
        # bool is a subclass of int, and `true` is no number of tokens.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.mistake(key, f"{value!r} is of the wrong type; it must be {name}")
        return value

    def text(self, key: str, default: Any = _MISSING) -> Any:
        value = self.value(key, str, "a string", default)
        if value is not default and not value.strip():
            raise self.mistake(key, "it must not be empty")
        return value

    def integer(self, key: str, low: int, high: int) -> int:
        value: int = self.value(key, int, f"a whole number from {low} to {high}")
        if not low <= value <= high:
            raise self.mistake(key, f"{value} is out of range; it must be {low} to {high}")
        return value

    def flag(self, key: str) -> bool:
        value: bool = self.value(key, bool, "true or false", False)
        return value

    def choices(self, key: str, allowed: tuple[Any, ...]) -> tuple[Any, ...]:
        name = f"a list of {' and '.join(map(repr, allowed))}"
        values = self.value(key, list, name, list(allowed))
        if not values or any(value not in allowed for value in values):
            raise self.mistake(key, f"{values!r} is not allowed; it must be {name}, not empty")
        return tuple(value for value in allowed if value in values)

    def table(self, key: str, keys: tuple[str, ...]) -> _Table:
        data = self.value(key, dict, f"a table [{key}]")
        return _Table(self.path, f"{self.prefix}.{key}".lstrip("."), data, keys)

    def free(self, key: str, reserved: Mapping[str, str]) -> Mapping[str, Any]:
        data: Mapping[str, Any] = self.value(key, dict, f"a table [{key}]", {})
        for name, place in reserved.items():
            if name in data:
                raise self.mistake(f"{key}.{name}", f"this is said by {place}; remove it here")
        return data
