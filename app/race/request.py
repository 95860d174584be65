"""What a run is asked to do, checked against what the engines can do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema

from app.engines.lane import LANES, Lane, LaneName, Sampling
from app.errors import BadRequestError

Mode = Literal["together", "in_turn"]

SCHEMA_CHARS = 32_768
"""The longest JSON schema accepted, in characters of its compact JSON."""

SCHEMA_DEPTH = 32
"""The deepest nesting of a JSON schema accepted."""


@dataclass(frozen=True, slots=True)
class Message:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run's request. ``max_tokens`` is a budget: both lanes stop there at the latest."""

    messages: tuple[Message, ...]
    mode: Mode = "together"
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 128
    seed: int = 0
    json_schema: Mapping[str, Any] | None = None
    prompt_id: str | None = None
    lanes: tuple[LaneName, ...] = LANES

    def as_dict(self) -> dict[str, Any]:
        """The request as it stands in events and records."""
        return {
            "messages": [{"role": message.role, "content": message.content} for message in self.messages],
            "prompt_id": self.prompt_id,
            "mode": self.mode,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "json_schema": dict(self.json_schema) if self.json_schema is not None else None,
            "lanes": list(self.lanes),
        }

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            seed=self.seed,
            json_schema=self.json_schema,
        )


def encode(request: RunRequest, lane: Lane, *, context_tokens: int) -> tuple[int, ...]:
    """Check a request against an engine, and return its prompt's token ids.

    Args:
        request: the request; its own fields are in range.
        lane: a lane whose tokenizer is both lanes' (the target's).
        context_tokens: the smaller context of target and draft.

    Raises:
        BadRequestError: with the field in ``param`` and what is allowed in the message.
    """
    if not request.messages or request.messages[-1].role != "user":
        raise BadRequestError("The last message must be the user's.", param="messages")
    for message in request.messages:
        check_text(message.content, lane.special_tokens)
    if request.json_schema is not None:
        check_schema(request.json_schema)
        lane.check_schema(request.json_schema)
    ids = lane.encode([{"role": message.role, "content": message.content} for message in request.messages])
    if len(ids) + request.max_tokens > context_tokens:
        left = context_tokens - len(ids)
        advice = (
            f"Lower max_tokens to {left} or less, or shorten the prompt."
            if left > 0
            else f"Shorten the prompt by at least {1 - left} tokens."
        )
        raise BadRequestError(
            f"The prompt has {len(ids)} tokens and max_tokens is {request.max_tokens}: together "
            f"{len(ids) + request.max_tokens}, over the context of {context_tokens} tokens "
            f"(the smaller one of target and draft). {advice}",
            param="max_tokens" if left > 0 else "prompt",
        )
    return ids


def check_text(text: str, special_tokens: Sequence[str] | frozenset[str]) -> None:
    """Refuse text that can't be a prompt.

    Raises:
        BadRequestError: it is blank, holds NUL or a lone surrogate, or one of ``special_tokens``.
    """
    if not text.strip():
        raise BadRequestError("The prompt is empty. Write at least one character that is not a space.", param="prompt")
    if "\x00" in text:
        raise BadRequestError("The prompt holds a NUL character, which is not allowed. Remove it.", param="prompt")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise BadRequestError(
            "The prompt holds a lone surrogate, half of a character. Send whole Unicode characters.", param="prompt"
        )
    found = sorted(token for token in special_tokens if token in text)
    if found:
        raise BadRequestError(
            f"The prompt holds {', '.join(found)}, which the chat template reserves to mark roles and ends. "
            "Remove it; the template is added for you.",
            param="prompt",
        )


def check_schema(schema: Mapping[str, Any]) -> None:
    """Check that a JSON schema is one.

    Raises:
        BadRequestError: it is not valid by its own dialect, too long, too deep, or refers outside itself.
    """
    if _depth(schema) > SCHEMA_DEPTH:
        raise BadRequestError(
            f"json_schema is nested more than {SCHEMA_DEPTH} levels deep. Flatten it.", param="json_schema"
        )
    text = json.dumps(schema, separators=(",", ":"))
    if len(text) > SCHEMA_CHARS:
        raise BadRequestError(
            f"The JSON schema has {len(text)} characters; at most {SCHEMA_CHARS} are allowed.", param="json_schema"
        )
    try:
        jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(dict(schema))
    except jsonschema.SchemaError as error:
        where = "/".join(str(part) for part in error.path) or "its top level"
        raise BadRequestError(
            f"json_schema is not a valid JSON schema, at {where}: {error.message}.", param="json_schema"
        ) from error
    outside = [target for target in _references(schema) if not target.startswith("#")]
    if outside:
        raise BadRequestError(
            f'json_schema refers to another document, {outside[0]!r}. Only references inside it ("#/…") are allowed.',
            param="json_schema",
        )


def _depth(node: Any) -> int:
    """How many levels deep a JSON value is nested, counted level by level: no recursion to overflow."""
    depth, level = 0, [node]
    while level:
        containers = [value for value in level if isinstance(value, Mapping | list)]
        level = [child for value in containers for child in (value.values() if isinstance(value, Mapping) else value)]
        depth += bool(containers)
    return depth


def _references(node: Any) -> Iterator[str]:
    """Every ``$ref`` in a schema, at any depth."""
    if isinstance(node, Mapping):
        target = node.get("$ref")
        if isinstance(target, str):
            yield target
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)
