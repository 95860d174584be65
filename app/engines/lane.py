"""What a lane is: an engine that turns a request into a stream of steps.

One *step* is one verify pass of the target for one request. It yields the accepted draft tokens
and one token of the target's own. In the baseline lane it yields one token.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from app.pairs.pair import ResolvedPair

LaneName = Literal["baseline", "speculative"]
LANES: tuple[LaneName, LaneName] = ("baseline", "speculative")

LaneState = Literal["waiting", "starting", "warming", "ready", "failed", "stopped"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Step:
    """One verify pass of the target for one request.

    ``t_ms`` is the time since the request was handed to this lane's engine, on the process's
    monotonic clock. ``ids`` are the output token ids of the step in order: first the accepted
    drafts, then the target's own token. ``text`` is the engine's text delta; it can be empty
    while a character is incomplete. A step that ends the output can be cut short (end of
    sequence, token budget): then ``accepted`` can exceed ``len(ids) - 1``. ``pieces`` is the text
    of each id, together exactly ``text``; None where they can't be told apart.
    """

    t_ms: float
    ids: tuple[int, ...]
    text: str
    accepted: int
    drafted: int
    pieces: tuple[str, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The step as it stands in events and records."""
        fields: dict[str, Any] = {
            "t_ms": round(self.t_ms, 3),
            "ids": list(self.ids),
            "text": self.text,
            "accepted": self.accepted,
            "drafted": self.drafted,
        }
        if self.pieces is not None:
            fields["pieces"] = list(self.pieces)
        return fields


@dataclass(frozen=True, slots=True)
class Finish:
    """The last item of a generation.

    ``steps`` replaces the live steps where the engine's own per-request counts correct them;
    ``None`` means that the live steps stand. ``reconciled`` is True when the engine's counts
    and the live steps agree (or were made to), False when they could not be brought together
    (``note`` says how they differ), None when the engine keeps no counts (a baseline).
    """

    reason: FinishReason
    steps: tuple[Step, ...] | None = None
    reconciled: bool | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings, the same for both lanes."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    json_schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class LaneRequest:
    """One generation: prompt token ids (special tokens included) and how to sample."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a lane's start-up. ``elapsed_s`` runs while ``done`` is False."""

    name: str
    elapsed_s: float
    done: bool


@dataclass(frozen=True, slots=True)
class LaneMemory:
    """Where a lane's bytes are. ``None``: can't be read here; ``reasons`` says why, by field.

    ``process_bytes`` is the engine's processes together: device memory where there is a GPU
    (``kind`` "vram"), else resident memory ("ram"). ``kv_allocated_bytes`` covers target and
    draft; ``draft_kv_bytes_per_token`` is the draft's share of ``kv_bytes_per_token``.
    """

    kind: Literal["vram", "ram"]
    process_bytes: int | None = None
    target_weights_bytes: int | None = None
    draft_weights_bytes: int | None = None
    kv_allocated_bytes: int | None = None
    kv_used_bytes: int | None = None
    kv_tokens: int | None = None
    kv_bytes_per_token: int | None = None
    draft_kv_bytes_per_token: int | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def rest_bytes(self) -> int | None:
        """Process bytes that are neither weights nor KV cache: activations, graphs, libraries."""
        if self.process_bytes is None or self.target_weights_bytes is None or self.kv_allocated_bytes is None:
            return None
        named = self.target_weights_bytes + (self.draft_weights_bytes or 0) + self.kv_allocated_bytes
        return max(0, self.process_bytes - named)

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "process_bytes": self.process_bytes,
            "target_weights_bytes": self.target_weights_bytes,
            "draft_weights_bytes": self.draft_weights_bytes,
            "kv_allocated_bytes": self.kv_allocated_bytes,
            "kv_used_bytes": self.kv_used_bytes,
            "kv_tokens": self.kv_tokens,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "draft_kv_bytes_per_token": self.draft_kv_bytes_per_token,
            "rest_bytes": self.rest_bytes,
            "reasons": dict(self.reasons),
        }


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The target's log-probability (nats) of one given token, and of its own first choice there."""

    token_id: int
    logprob: float
    best_id: int
    best_logprob: float


class Lane(Protocol):
    """One engine. All methods run on the server's event loop and never block it."""

    name: LaneName

    @property
    def state(self) -> LaneState: ...

    @property
    def error(self) -> str | None:
        """Why the lane failed, in one line; None unless ``state`` is "failed"."""
        ...

    @property
    def phases(self) -> Sequence[Phase]:
        """The start-up so far, in order."""
        ...

    @property
    def engine(self) -> Mapping[str, Any]:
        """The resolved engine settings (empty until known). Keys are those of docs/http-api.md."""
        ...

    @property
    def special_tokens(self) -> frozenset[str]:
        """The tokenizer's special tokens, which a prompt may not contain."""
        ...

    async def start(self) -> None:
        """Load the engine and warm it up.

        Raises:
            EngineError: it failed to load; ``state`` is then "failed".
        """
        ...

    async def stop(self) -> None:
        """Free the engine and end its processes. Safe to call in any state, more than once."""
        ...

    def encode(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of a chat, through the model's chat template, ready for generation.

        A model without a chat template gets the contents joined by blank lines.

        Raises:
            BadRequestError: the template refuses the roles.
        """
        ...

    def check_schema(self, schema: Mapping[str, Any]) -> None:
        """Check that the engine's grammar backend can decode under a JSON schema.

        Raises:
            BadRequestError: it can't; the message names what is not supported.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; for naming single tokens in a comparison, never for output."""
        ...

    def generate(self, request: LaneRequest) -> AsyncIterator[Step | Finish]:
        """Generate. Yields every step, then one ``Finish``.

        Closing the iterator, or cancelling the task that iterates it, frees the engine.

        Raises:
            EngineError: the engine died or refused the request.
        """
        ...

    async def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[TokenScore]:
        """Score ``output_ids`` as the continuation of ``prompt_ids`` at temperature 1.

        One entry for each output token. Uses prompt log-probabilities: one prefill, no decoding.
        """
        ...

    async def memory(self) -> LaneMemory: ...

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever ``state``, ``error`` or ``phases`` change."""
        ...


@dataclass(frozen=True, slots=True)
class Device:
    """What the lanes run on. ``shared``: both lanes use the same one, so together they contend."""

    kind: Literal["cuda", "cpu"]
    name: str
    shared: bool


class Fleet(Protocol):
    """Both lanes, and how they start: in which order, on which device."""

    @property
    def lanes(self) -> Mapping[LaneName, Lane]: ...

    @property
    def device(self) -> Device: ...

    @property
    def source(self) -> Literal["live", "scripted"]: ...

    @property
    def versions(self) -> Mapping[str, str | None]:
        """Versions of what generates: ``vllm``, ``torch``, ``gpu`` (None where there is none)."""
        ...

    @property
    def settle_s(self) -> float:
        """How long an engine still takes part of the device after its last step, in seconds."""
        ...

    async def start(self) -> None:
        """Start both lanes. A lane that fails is left failed; the other goes on."""
        ...

    async def restart(self, name: LaneName) -> None:
        """Stop a lane and start it again."""
        ...

    async def switch(self, resolved: ResolvedPair) -> None:
        """Replace the speculative lane by one that speculates as ``resolved`` says, and start it.

        Raises:
            EngineError: these lanes can't switch.
            PairError: the pair can't be planned.
        """
        ...

    async def stop(self) -> None: ...
