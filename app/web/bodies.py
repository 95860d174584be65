"""Request bodies as pydantic models: types and ranges, and the OpenAPI schema that goes with them.

What needs an engine (tokens, special tokens, grammar) is checked in app.race.request.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from app.engines.lane import LANES, LaneName
from app.errors import BadRequestError
from app.prompts import PromptLibrary
from app.race.request import Message, RunRequest


class MessageBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "user", "assistant"]
    content: str


class RunBody(BaseModel):
    """What to run. One of ``prompt``, ``messages`` and ``prompt_id`` is needed."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [{"prompt": "Write a JSON object describing a bicycle.", "mode": "in_turn", "max_tokens": 64}]
        },
    )

    prompt: str | None = Field(None, description="Wrapped as one user message.")
    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=64)] | None = None
    mode: Literal["together", "in_turn"] = "together"
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] = 128
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    json_schema: dict[str, Any] | None = Field(None, description="Both lanes decode under it.")
    prompt_id: str | None = Field(None, description="An id of the prompt library.")
    lanes: Annotated[list[LaneName], Field(min_length=1, max_length=2)] | None = Field(
        None, description="One lane alone, or both (the default)."
    )

    def to_request(self, library: PromptLibrary, *, max_tokens: int, prompt_chars: int) -> RunRequest:
        """The domain's request.

        Raises:
            BadRequestError: no prompt or more than one, an unknown id, or over a limit of this server.
        """
        if self.prompt is not None and self.messages is not None:
            raise BadRequestError("Send either prompt or messages, not both.", param="messages")
        known = library.get(self.prompt_id) if self.prompt_id is not None else None
        if self.messages is not None:
            messages = tuple(Message(message.role, message.content) for message in self.messages)
        elif self.prompt is not None:
            messages = (Message("user", self.prompt),)
        elif known is not None:
            messages = (Message("user", known.prompt),)
        else:
            raise BadRequestError("The run needs a prompt, messages, or a prompt_id of the library.", param="prompt")
        length = sum(len(message.content) for message in messages)
        if length > prompt_chars:
            raise BadRequestError(
                f"The prompt has {length} characters; at most {prompt_chars} are allowed.",
                param="messages" if self.messages is not None else "prompt",
            )
        if self.max_tokens > max_tokens:
            raise BadRequestError(
                f"max_tokens is {self.max_tokens}; it must be between 1 and {max_tokens}.", param="max_tokens"
            )
        lanes = tuple(name for name in LANES if self.lanes is None or name in self.lanes)
        return RunRequest(
            messages=messages,
            mode=self.mode,
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            max_tokens=self.max_tokens,
            seed=self.seed,
            json_schema=self.json_schema,
            prompt_id=self.prompt_id,
            lanes=lanes,
        )


class MethodBody(BaseModel):
    """How the speculative lane is to speculate. What is left out stays as the method's pair file has it."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"method": "ngram", "num_speculative_tokens": 4}]},
    )

    method: str = Field(description="One of the state's pair.methods.")
    num_speculative_tokens: Annotated[int, Field(ge=1)] | None = None


def first_error(error: RequestValidationError) -> BadRequestError:
    """The first of a body's validation errors, in this API's words."""
    found = error.errors()[0]
    kind, location = found["type"], [part for part in found["loc"] if part != "body"]
    param = str(location[0]) if location and isinstance(location[0], str) else None
    where = ".".join(str(part) for part in location)
    if kind == "json_invalid":
        return BadRequestError(f"The body is not valid JSON: {found.get('ctx', {}).get('error', 'it does not parse')}.")
    if kind == "missing" and not location:
        return BadRequestError("The body is empty. Send a JSON object with a prompt.")
    if kind == "missing":
        return BadRequestError(f"{where} is missing.", param=param)
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(str(location[-1]), RunBody.model_fields, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else f" Known fields: {', '.join(RunBody.model_fields)}."
        return BadRequestError(f"{where!r} is not a field of this call.{hint}", param=param)
    if kind == "string_unicode":
        return BadRequestError(
            f"{where or 'The text'} holds a lone surrogate, half of a character. Send whole Unicode characters.",
            param=param,
        )
    message = str(found["msg"]).replace("Input", where or "The body", 1).replace("should be", "must be")
    value = found.get("input")
    if isinstance(value, int | float | bool) or (isinstance(value, str) and len(value) <= 40):
        message += f"; got {value!r}"
    return BadRequestError(message + ".", param=param)
