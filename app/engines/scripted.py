"""The scripted lanes: engines that follow a script instead of running a model.

For tests and for work on the page. They keep time, accept drafts and fail as told, so that everything above
the seam can be tried without a model. Their figures mean nothing, and everything that shows them says
SCRIPTED. A scripted lane echoes the prompt and goes on with a fixed passage; both lanes write the same text
(unless ``differ_at`` says otherwise). It does not decode under a JSON schema.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import random
import re
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from app.engines.lane import (
    LANES,
    Device,
    Finish,
    LaneMemory,
    LaneName,
    LaneRequest,
    LaneState,
    Phase,
    Step,
    TokenScore,
)
from app.errors import EngineError, StartError

if TYPE_CHECKING:
    from app.pairs.pair import ResolvedPair

PASSAGE = (
    "\n\nA small model runs ahead and guesses the next few words. The large one reads all the guesses at once, "
    "keeps those it would have written itself, and adds one word of its own. Where the text is predictable, "
    "most guesses hold, and a single pass yields several words. Where it is not, the guesses are wasted, "
    "and their cost remains. "
)
SPECIAL_TOKENS = frozenset({"<|im_start|>", "<|im_end|>", "<|endoftext|>"})
CONTEXT_TOKENS = 8192
PIECES = re.compile(r" ?\w{1,6}|\s|[^\w\s]")


@dataclasses.dataclass(frozen=True, slots=True)
class ScriptedLaneOptions:
    """One lane's script. Times in ms unless the name says seconds; indices count steps from 0.

    ``acceptance`` is the chance that a draft token is accepted, given that those before it were; it is
    drawn from the request's seed. ``pattern`` ("3-0-2"), accepted drafts by step in a cycle, replaces it.
    ``jitter`` varies step times by that fraction. ``differ_at`` changes the output token at that index.
    ``fail_start`` makes the start fail, ``fail_at_step`` the run; ``die_at_step`` the engine.
    """

    ttft_ms: float = 120.0
    step_ms: float = 40.0
    jitter: float = 0.0
    acceptance: float = 0.7
    pattern: str = ""
    k: int = 4
    start_s: float = 0.0
    differ_at: int = -1
    stop_at: int = -1
    fail_start: bool = False
    fail_at_step: int = -1
    die_at_step: int = -1

    @property
    def cycle(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.pattern.split("-")) if self.pattern else ()


@dataclasses.dataclass(frozen=True, slots=True)
class ScriptedOptions:
    """Both lanes' scripts. The default: a speculative step costs 1.25 of the baseline's."""

    baseline: ScriptedLaneOptions = ScriptedLaneOptions(acceptance=0.0, k=0)
    speculative: ScriptedLaneOptions = ScriptedLaneOptions(step_ms=50.0)


def parse_options(text: str) -> ScriptedOptions:
    """Read "step_ms=20,speculative.acceptance=0.5": without a lane's name an option sets both lanes.

    Raises:
        StartError: an unknown option (the nearest known one is named) or a value of the wrong type.
    """
    options = {"baseline": ScriptedOptions().baseline, "speculative": ScriptedOptions().speculative}
    fields = {field.name: field for field in dataclasses.fields(ScriptedLaneOptions)}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        lane, dot, name = key.partition(".")
        lanes = [lane] if dot else list(options)
        name = name if dot else lane
        if not equals or name not in fields or any(lane not in options for lane in lanes):
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise StartError(
                f"--scripted: {item!r} is not an option.{hint} "
                f"Write [baseline.|speculative.]NAME=VALUE; names: {', '.join(fields)}."
            )
        kind = type(getattr(options["baseline"], name))
        try:
            parsed: Any = value.lower() in ("1", "true", "yes") if kind is bool else kind(value)
        except ValueError:
            raise StartError(f"--scripted: {name} takes a value of type {kind.__name__}, not {value!r}.") from None
        for target in lanes:
            if target == "baseline" and not dot and name in ("acceptance", "pattern", "k", "differ_at"):
                continue
            options[target] = dataclasses.replace(options[target], **{name: parsed})
    return ScriptedOptions(**options)


class ScriptedTokenizer:
    """Token ids for pieces of text, made up as they come. Both lanes share one, as real lanes do."""

    def __init__(self) -> None:
        self._pieces: dict[int, str] = {}

    def token(self, piece: str) -> int:
        token = zlib.crc32(piece.encode("utf-8", "surrogatepass")) & 0xFFFFF
        while self._pieces.setdefault(token, piece) != piece:
            token += 1
        return token

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.token(piece) for piece in PIECES.findall(text))

    def piece(self, token: int) -> str:
        return self._pieces.get(token, "\N{REPLACEMENT CHARACTER}")


class ScriptedLane:
    """A lane that follows a script. Implements the Lane protocol."""

    def __init__(self, name: LaneName, options: ScriptedLaneOptions, tokenizer: ScriptedTokenizer) -> None:
        self.name: LaneName = name
        self.options = options
        self._tokenizer = tokenizer
        self._state: LaneState = "waiting"
        self._error: str | None = None
        self._phases: list[Phase] = []
        self._callbacks: list[Callable[[], None]] = []
        self._live_tokens = 0
        self.unfinished = 0

    @property
    def state(self) -> LaneState:
        return self._state

    @property
    def error(self) -> str | None:
        return self._error

    @property
    def phases(self) -> Sequence[Phase]:
        return tuple(self._phases)

    @property
    def engine(self) -> Mapping[str, Any]:
        speculative = self.name == "speculative"
        return {
            "model": "scripted",
            "method": "scripted" if speculative else None,
            "num_speculative_tokens": self.options.k if speculative else None,
            "dtype": "none",
            "context_tokens": CONTEXT_TOKENS,
            "kv_tokens": 2 * CONTEXT_TOKENS,
            "max_sequences": 1,
            "prefix_caching": False,
            "async_scheduling": False,
            "execution": "scripted",
            "vllm": None,
        }

    @property
    def special_tokens(self) -> frozenset[str]:
        return SPECIAL_TOKENS

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def _become(self, state: LaneState, error: str | None = None) -> None:
        self._state, self._error = state, error
        for callback in self._callbacks:
            callback()

    async def start(self) -> None:
        self._become("starting")
        self._phases = []
        began = time.monotonic()
        for phase in ("read the script", "learn it by heart"):
            self._phases.append(Phase(phase, 0.0, done=False))
            await asyncio.sleep(self.options.start_s / 2)
            self._phases[-1] = Phase(phase, time.monotonic() - began, done=True)
        if self.options.fail_start:
            message = "the script says that this lane fails to start"
            self._become("failed", message)
            raise EngineError(message)
        self._become("ready")

    async def stop(self) -> None:
        self._become("stopped")

    def encode(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        return self._tokenizer.encode("\n".join(message["content"] for message in messages))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(self._tokenizer.piece, ids))

    def check_schema(self, schema: Mapping[str, Any]) -> None:
        """A scripted lane takes any schema, and ignores it."""

    async def generate(self, request: LaneRequest) -> AsyncIterator[Step | Finish]:
        if self._state != "ready":
            raise EngineError(f"the {self.name} lane is {self._state}")
        self.unfinished += 1
        try:
            async for item in self._generate(request):
                yield item
        finally:
            self.unfinished -= 1
            self._live_tokens = 0

    async def _generate(self, request: LaneRequest) -> AsyncIterator[Step | Finish]:
        options, chance = self.options, random.Random(request.sampling.seed)  # noqa: S311  (a script, not a secret)
        passage = self._tokenizer.encode(PASSAGE)
        budget = request.sampling.max_tokens
        stop = 0 <= options.stop_at < budget
        length = options.stop_at if stop else budget
        echo = list(request.prompt_ids)
        ids = [echo[i] if i < len(echo) else passage[(i - len(echo)) % len(passage)] for i in range(length)]
        if 0 <= options.differ_at < length:
            ids[options.differ_at] = self._tokenizer.token(" otherwise")
        began = time.monotonic()
        due_ms, position, index = options.ttft_ms, 0, 0
        while position < length:
            delay = due_ms / 1000 - (time.monotonic() - began)
            await asyncio.sleep(max(0.0, delay))
            if index == options.die_at_step:
                self._become("failed", "the script says that this engine dies")
                raise EngineError("the engine died: the script says so")
            if index == options.fail_at_step:
                raise EngineError("the script says that this run fails")
            drafted = accepted = 0
            if index > 0 and options.k:
                drafted = options.k
                accepted = self._accepted(index, chance)
            chunk = tuple(ids[position : position + accepted + 1])
            pieces = tuple(map(self._tokenizer.piece, chunk))
            position += len(chunk)
            self._live_tokens = len(request.prompt_ids) + position
            yield Step((time.monotonic() - began) * 1000, chunk, "".join(pieces), accepted, drafted, pieces)
            due_ms += options.step_ms * (1 + options.jitter * (2 * chance.random() - 1))
            index += 1
        yield Finish("stop" if stop else "length", reconciled=True if options.k else None)

    def _accepted(self, index: int, chance: random.Random) -> int:
        options = self.options
        if options.cycle:
            return min(options.k, options.cycle[(index - 1) % len(options.cycle)])
        accepted = 0
        while accepted < options.k and chance.random() < options.acceptance:
            accepted += 1
        return accepted

    async def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[TokenScore]:
        """Scores that favour the script's own tokens; " otherwise" scores badly."""
        wrong = self._tokenizer.token(" otherwise")
        scores = []
        for token in output_ids:
            logprob = -6.0 if token == wrong else -0.5 - (token % 7) / 10
            scores.append(TokenScore(token, logprob, token if token != wrong else 0, max(logprob, -0.5)))
        return scores

    async def memory(self) -> LaneMemory:
        mib = 1 << 20
        draft = self.name == "speculative" and self.options.k > 0
        return LaneMemory(
            kind="ram",
            process_bytes=(1300 if draft else 1200) * mib,
            target_weights_bytes=512 * mib,
            draft_weights_bytes=48 * mib if draft else 0,
            kv_allocated_bytes=256 * mib,
            kv_used_bytes=self._live_tokens * 16384,
            kv_tokens=2 * CONTEXT_TOKENS,
            kv_bytes_per_token=16384,
            draft_kv_bytes_per_token=1024 if draft else 0,
        )


class ScriptedFleet:
    """Both scripted lanes. Implements the Fleet protocol."""

    source: Literal["live", "scripted"] = "scripted"

    def __init__(self, options: ScriptedOptions, *, shared: bool = True) -> None:
        tokenizer = ScriptedTokenizer()
        self._lanes = {name: ScriptedLane(name, getattr(options, name), tokenizer) for name in LANES}
        self._device = Device("cpu", "scripted", shared)

    @property
    def lanes(self) -> Mapping[LaneName, ScriptedLane]:
        return self._lanes

    @property
    def device(self) -> Device:
        return self._device

    @property
    def settle_s(self) -> float:
        return 0.0

    @property
    def versions(self) -> Mapping[str, str | None]:
        return {"vllm": None, "torch": None, "gpu": None}

    async def start(self) -> None:
        for lane in self._lanes.values():
            try:
                await lane.start()
            except EngineError:
                continue

    async def restart(self, name: LaneName) -> None:
        await self._lanes[name].stop()
        await self._lanes[name].start()

    async def switch(self, resolved: ResolvedPair) -> None:
        raise EngineError("Scripted lanes follow their script; they have no other method.")

    async def stop(self) -> None:
        for lane in self._lanes.values():
            await lane.stop()
