"""The prompt library: Markdown files with YAML front matter, read once at start and checked whole.

A file's front matter holds the fields of docs/prompts.md, its body is the prompt. Anything that doesn't fit
is refused at start with the file's name, so that no prompt fails on stage.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import frontmatter
import jsonschema
import yaml

from app.errors import BadRequestError, StartError

Group = Literal["structured", "creative", "prefill"]
GROUPS: tuple[Group, ...] = get_args(Group)

# The order of the picker. Other categories are allowed and follow these, by name.
CATEGORIES = (
    "json",
    "sql",
    "code",
    "code_editing",
    "table",
    "extraction",
    "poem",
    "story",
    "brainstorm",
    "roleplay",
    "question_answering",
    "summary",
    "retrieval",
)

SCHEMAS_FOLDER = "schemas"

_REQUIRED = ("id", "title", "category", "group", "expect", "settings")
_ALLOWED = (*_REQUIRED, "json_schema")
_SETTINGS = ("temperature", "top_p", "max_tokens", "seed")
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_CATEGORY = re.compile(r"[a-z][a-z0-9_]*")
_SEED_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """Suggested sampling settings; ``max_tokens`` counts output tokens."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the library. ``expect`` says in one line what speculation will do with it, and why."""

    id: str
    title: str
    category: str
    group: Group
    prompt: str
    expect: str
    settings: PromptSettings
    json_schema: Mapping[str, Any] | None = None

    @property
    def words(self) -> int:
        """Length of the prompt in words. Tokens depend on the pair's tokenizer; words don't."""
        return len(self.prompt.split())

    def as_dict(self) -> dict[str, Any]:
        """The prompt as it stands in ``GET /api/prompts``."""
        return {
            "id": self.id,
            "title": self.title,
            "category": self.category,
            "group": self.group,
            "prompt": self.prompt,
            "expect": self.expect,
            "settings": asdict(self.settings),
            "json_schema": None if self.json_schema is None else copy.deepcopy(dict(self.json_schema)),
            "words": self.words,
        }


@dataclass(frozen=True, slots=True)
class PromptLibrary:
    """All prompts, by group, then category, then id."""

    prompts: tuple[Prompt, ...]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    def get(self, prompt_id: str) -> Prompt:
        """The prompt with this id.

        Raises:
            BadRequestError: there is none; the message names near ids, or where to find all of them.
        """
        for prompt in self.prompts:
            if prompt.id == prompt_id:
                return prompt
        near = difflib.get_close_matches(prompt_id, [prompt.id for prompt in self.prompts], n=3)
        hint = f"Did you mean {_listed(near, 'or')}?" if near else "GET /api/prompts lists all ids."
        raise BadRequestError(f"No prompt has the id {_shown(prompt_id)}. {hint}", param="prompt_id")

    def as_dict(self) -> dict[str, Any]:
        """The body of ``GET /api/prompts``."""
        return {"prompts": [prompt.as_dict() for prompt in self.prompts]}


def load(folder: Path, *, max_tokens: int = 4096) -> PromptLibrary:
    """Read every ``*.md`` file in ``folder`` and below it.

    ``max_tokens`` is the most output tokens that a prompt may suggest; pass the server's own limit.

    Raises:
        StartError: the folder is missing or holds no prompt, or a file is not as docs/prompts.md says. The
            message names the file, what is wrong in it, and what is allowed.
    """
    if not folder.is_dir():
        raise StartError(f"The prompt folder {folder} does not exist. Give a folder of *.md prompt files.")
    found: dict[str, tuple[Path, Prompt]] = {}
    for path in sorted(folder.rglob("*.md")):
        name = path.relative_to(folder).as_posix()
        prompt = _read(path, name, folder / SCHEMAS_FOLDER, max_tokens)
        if prompt.id in found:
            first = found[prompt.id][0].relative_to(folder).as_posix()
            raise _bad(name, f"the id {_shown(prompt.id)} is taken by {first}. Ids are unique: rename one of the files")
        found[prompt.id] = (path, prompt)
    if not found:
        raise StartError(f"The prompt folder {folder} holds no *.md file. Add one as docs/prompts.md says.")
    return PromptLibrary(tuple(sorted((prompt for _, prompt in found.values()), key=_order)))


def _order(prompt: Prompt) -> tuple[int, int, str, str]:
    known = CATEGORIES.index(prompt.category) if prompt.category in CATEGORIES else len(CATEGORIES)
    return GROUPS.index(prompt.group), known, prompt.category, prompt.id


def _read(path: Path, name: str, schemas: Path, max_tokens: int) -> Prompt:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _bad(name, f"it is not UTF-8 (byte {error.start}). Save it as UTF-8") from None
    except OSError as error:
        raise _bad(name, f"it can't be read ({error.strerror}). Make it readable or remove it") from None
    try:
        post = frontmatter.loads(text)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise _bad(
            name, f"its front matter is not valid YAML ({problem}). Quote values that hold ': ' or '#'"
        ) from None
    fields: dict[str, Any] = dict(post.metadata)
    if not fields:
        raise _bad(
            name, f"it has no front matter. Begin with a line '---', then {_listed(_REQUIRED, 'and')}, then '---'"
        )

    _check_keys(name, fields, required=_REQUIRED, allowed=_ALLOWED, where="front matter")
    body = post.content.strip()
    if not body:
        raise _bad(name, "it has no prompt. Write it below the front matter")
    if "\0" in body:
        raise _bad(name, "its prompt holds a NUL character. Remove it")
    return Prompt(
        id=_prompt_id(name, fields["id"], path.stem),
        title=_line(name, "title", fields["title"]),
        category=_category(name, fields["category"]),
        group=_group(name, fields["group"]),
        prompt=body,
        expect=_line(name, "expect", fields["expect"]),
        settings=_settings(name, fields["settings"], max_tokens),
        json_schema=None if fields.get("json_schema") is None else _schema(name, fields["json_schema"], schemas),
    )


def _check_keys(
    name: str, fields: Mapping[Any, Any], *, required: Iterable[str], allowed: Iterable[str], where: str
) -> None:
    allowed = tuple(allowed)
    for key in fields:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"did you mean {_shown(near[0])}? " if near else ""
            raise _bad(name, f"unknown key {_shown(key)} in the {where}: {hint}Allowed are {_listed(allowed, 'and')}")
    missing = [key for key in required if key not in fields]
    if missing:
        raise _bad(name, f"the {where} lacks {_listed(missing, 'and')}. Add it; docs/prompts.md has an example")


def _prompt_id(name: str, value: object, stem: str) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise _bad(name, f"id is {_shown(value)}. Allowed are lower-case letters, digits and single hyphens")
    if value != stem:
        raise _bad(name, f"id is {_shown(value)}, the file is named {_shown(stem)}. Make them the same")
    return value


def _line(name: str, key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip() or "\n" in value.strip():
        raise _bad(name, f"{key} is {_shown(value)}. Allowed is one line of text")
    return value.strip()


def _category(name: str, value: object) -> str:
    if not isinstance(value, str) or not _CATEGORY.fullmatch(value):
        raise _bad(
            name, f"category is {_shown(value)}. Allowed is one lower-case word, such as {_listed(CATEGORIES, 'or')}"
        )
    return value


def _group(name: str, value: object) -> Group:
    for group in GROUPS:
        if value == group:
            return group
    raise _bad(name, f"group is {_shown(value)}. Allowed are {_listed(GROUPS, 'and')}")


def _settings(name: str, value: object, max_tokens: int) -> PromptSettings:
    if not isinstance(value, Mapping):
        raise _bad(name, f"settings is {_shown(value)}. Allowed is a mapping with {_listed(_SETTINGS, 'and')}")
    _check_keys(name, value, required=_SETTINGS, allowed=_SETTINGS, where="settings")
    return PromptSettings(
        temperature=_temperature(name, value["temperature"]),
        top_p=_top_p(name, value["top_p"]),
        max_tokens=_whole(name, "max_tokens", value["max_tokens"], 1, max_tokens),
        seed=_whole(name, "seed", value["seed"], 0, _SEED_MAX),
    )


def _temperature(name: str, value: object) -> float:
    number = _as_float(value)
    if number is None or not 0 <= number <= 2:
        raise _bad(name, f"temperature is {_shown(value)}. Allowed is a number from 0 to 2")
    return number


def _top_p(name: str, value: object) -> float:
    number = _as_float(value)
    if number is None or not 0 < number <= 1:
        raise _bad(name, f"top_p is {_shown(value)}. Allowed is a number over 0, up to 1")
    return number


def _as_float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(name: str, key: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _bad(name, f"{key} is {_shown(value)}. Allowed is a whole number from {low} to {high}")
    return value


def _schema(name: str, value: object, schemas: Path) -> dict[str, Any]:
    if isinstance(value, str):
        value = _schema_file(name, value, schemas)
    if not isinstance(value, Mapping):
        raise _bad(
            name, f"json_schema is {_shown(value)}. Allowed is a JSON Schema object, or a file in {schemas.name}/"
        )
    try:
        # YAML can hold what JSON can't: dates, sets, NaN.
        schema: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise _bad(name, f"json_schema holds a value that JSON has no form for ({error}). Quote it") from None
    try:
        jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise _bad(
            name, f"json_schema is not a valid JSON Schema: at {error.json_path}, {_clipped(error.message)}. Correct it"
        ) from None
    return schema


def _schema_file(name: str, value: str, schemas: Path) -> object:
    path = schemas.parent / value
    if path.suffix != ".json" or schemas.resolve() not in path.resolve().parents:
        raise _bad(name, f"json_schema is {_shown(value)}. Allowed is a *.json file in {schemas.name}/")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = sorted(f"{schemas.name}/{file.name}" for file in schemas.glob("*.json"))
        hint = f"There are {_listed(there, 'and')}" if there else f"There is no *.json file in {schemas.name}/"
        raise _bad(name, f"the json_schema file {_shown(value)} does not exist. {hint}") from None
    except OSError as error:
        raise _bad(name, f"the json_schema file {_shown(value)} can't be read ({error.strerror})") from None
    except ValueError as error:
        raise _bad(name, f"the json_schema file {_shown(value)} is not JSON in UTF-8 ({error}). Correct it") from None


def _bad(name: str, problem: str) -> StartError:
    return StartError(f"Prompt file {name}: {problem}.")


def _shown(value: object) -> str:
    return _clipped(repr(value))


def _clipped(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _listed(names: Iterable[str], last: str) -> str:
    *head, tail = names
    return f"{', '.join(head)} {last} {tail}" if head else tail
