"""A lane on vLLM: one ``AsyncLLM``, its core in processes of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from app.engines import boot, cpu_mend, engine_memory, marks, processes, resolved
from app.engines.lane import (
    Finish,
    LaneMemory,
    LaneName,
    LaneRequest,
    LaneState,
    Phase,
    Sampling,
    Step,
    TokenScore,
)
from app.engines.plan import LaneSpec
from app.engines.reconcile import reconcile
from app.engines.stats import Pieces, Recorder, steps_of
from app.errors import BadRequestError, EngineError

POLL_S = 0.05
WATCH_S = 0.2
GRACE_S = 5.0
DYING_S = 1.0
MARKS_FILE = "marks"
# A repeating prompt, so that n-gram speculation has something to propose.
WARM_UP_TEXT = "Repeat: red green blue, red green blue, red green blue, red green"
WARM_UP_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
WARM_UPS = (
    Sampling(temperature=0.0, top_p=1.0, max_tokens=16, seed=0),
    Sampling(temperature=1.0, top_p=0.9, max_tokens=6, seed=0),
    Sampling(temperature=0.0, top_p=1.0, max_tokens=6, seed=0, json_schema=WARM_UP_SCHEMA),
)


class VllmLane:
    """A lane on a vLLM engine; see :class:`app.engines.lane.Lane` for what each method does.

    ``log_dir`` takes the output of the engine's processes, one file a start; None: a temporary folder, which is
    removed when the lane stops, unless it failed. ``engine_logs``: leave their output on the terminal.
    """

    def __init__(self, spec: LaneSpec, *, log_dir: Path | None = None, engine_logs: bool = False) -> None:
        self.name: LaneName = spec.name
        self.spec = spec
        self._engine_logs = engine_logs
        self._log_dir = log_dir
        self._scratch: Path | None = None
        self._state: LaneState = "waiting"
        self._error: str | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._phases: list[tuple[str, float]] = []
        self._phases_end: float | None = None
        self._boot: boot.Boot | None = None
        self._llm: Any = None
        self._tokenizer: Any = None
        self._special_tokens: frozenset[str] = frozenset()
        self._report: Mapping[str, Any] = {}
        self._engine: Mapping[str, Any] = {}
        self._recorder = Recorder()
        self._cores: list[processes.Core] = []
        self._members: list[psutil.Process] = []
        self._marks_read = 0
        self._first_error: str | None = None
        self._watch: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._requests: set[str] = set()

    # What can be seen

    @property
    def state(self) -> LaneState:
        return self._state

    @property
    def error(self) -> str | None:
        return self._error

    @property
    def engine(self) -> Mapping[str, Any]:
        return self._engine

    @property
    def special_tokens(self) -> frozenset[str]:
        return self._special_tokens

    @property
    def phases(self) -> tuple[Phase, ...]:
        over = self._phases_end is not None
        end = self._phases_end if self._phases_end is not None else time.monotonic()
        ends = [*(start for _, start in self._phases[1:]), end]
        return tuple(
            Phase(name, ends[index] - start, over or index < len(self._phases) - 1)
            for index, (name, start) in enumerate(self._phases)
        )

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The engine's core process and its children, as far as they run."""
        return tuple(member.pid for member in processes.tree(self._cores) if processes.running(member))

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def _changed(self) -> None:
        for callback in self._callbacks:
            callback()

    def _enter(self, state: LaneState, error: str | None = None) -> None:
        self._state, self._error = state, error
        if state in ("ready", "failed", "stopped") and self._phases and self._phases_end is None:
            self._phases_end = time.monotonic()
        self._changed()

    def _begin_phase(self, name: str) -> None:
        if all(name != known for known, _ in self._phases):
            self._phases.append((name, time.monotonic()))
            self._changed()

    # Start and stop

    async def start(self) -> None:
        if self._state in ("starting", "warming", "ready"):
            return
        self._scratch = self._reset()
        self._enter("starting")
        try:
            self._llm = await self._boot_engine(self._scratch)
            self._adopt()
            await self._inspect()
            self._enter("warming")
            await self._warm_up()
        except EngineError as error:
            await self._fail(error.message)
            raise
        except asyncio.CancelledError:
            await self._uncancelled(self.stop())
            raise
        except Exception as error:
            message = self._cause() or boot.describe(error)
            await self._fail(message)
            raise EngineError(message) from error
        self._members = await asyncio.to_thread(processes.tree, self._cores)
        self._enter("ready")
        self._watch = asyncio.create_task(self._watch_engine())

    def _reset(self) -> Path:
        """Forget the last start. Returns a new folder for this one's files."""
        self._phases, self._phases_end = [], None
        self._first_error, self._marks_read = None, 0
        self._engine, self._report = {}, {}
        self._recorder = Recorder()
        self._cores = []
        self._remove_scratch()
        return Path(tempfile.mkdtemp(prefix=f"specduel-{self.name}-"))

    async def _boot_engine(self, scratch: Path) -> Any:
        log = None if self._engine_logs else str((self._log_dir or scratch) / f"{self.name}.log")
        self._boot = boot.Boot(self.spec, self._recorder, marks_path=str(scratch / MARKS_FILE), log_path=log)
        self._boot.begin()
        while not self._boot.done:
            self._follow()
            await asyncio.sleep(POLL_S)
        self._follow()
        self._cores = self._boot.cores
        try:
            return self._boot.result()
        except EngineError as error:
            raise EngineError(self._cause() or error.message) from error

    @property
    def log_path(self) -> Path | None:
        """The file with the engine's own output; None where it goes to the terminal, or is gone."""
        folder = self._log_dir or self._scratch
        path = folder / f"{self.name}.log" if folder is not None and not self._engine_logs else None
        return path if path is not None and path.exists() else None

    def _follow(self) -> None:
        """Take over what this process and the engine's have reported since the last call."""
        if self._boot is not None:
            for name in self._boot.phases:
                self._begin_phase(name)
            self._cores = self._boot.cores
        if self._scratch is None:
            return
        for mark, offset in marks.read(self._scratch / MARKS_FILE, self._marks_read):
            self._marks_read = offset
            if mark.kind == "phase":
                if self._state == "starting":
                    self._begin_phase(mark.text)
            elif self._first_error is None:
                self._first_error = boot.tidy(mark.text)

    def _cause(self) -> str | None:
        """Why the engine's processes failed, as they reported it or as their exit shows it."""
        self._follow()
        if self._first_error is not None:
            return self._first_error
        return next(filter(None, map(processes.exit_cause, self._cores)), None)

    def _adopt(self) -> None:
        """Read what a new engine resolved on this side: tokenizer and configuration."""
        self._tokenizer = self._llm.get_tokenizer()
        self._special_tokens = special_tokens(self._tokenizer)

    async def _inspect(self) -> None:
        """Read what only the worker knows."""
        reports = await self._llm.collective_rpc("specduel_report")
        self._report = reports[0] if reports else {}
        self._engine = resolved.settings(self._llm.vllm_config, self._report, self.spec, boot.vllm_version())
        if self._report.get("rejection_sampler") == "broken" and os.environ.get(cpu_mend.SWITCH) != "off":
            raise EngineError(
                f"vLLM {boot.vllm_version()} samples wrongly on this CPU while speculating, and the mend did not take. "
                "Install the version that `make setup` picks."
            )

    async def _warm_up(self) -> None:
        self._begin_phase("Warming up")
        prompt = self.encode([{"role": "user", "content": WARM_UP_TEXT}])
        for number in range(self.spec.warmups):
            for index, sampling in enumerate(WARM_UPS):
                request = LaneRequest(f"warm-up-{number}-{index}", prompt, sampling)
                async for _ in self._run(request):
                    pass
        if not self.spec.speculates:
            await self._score(prompt, prompt[-2:])

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            if self._state != "ready":
                return
            if self._dead():
                await self._await_end()
                await self._fail(f"The engine died: {self._cause() or 'it gave no reason'}.")
                return

    def _dead(self) -> bool:
        return bool(getattr(self._llm, "errored", False)) or not all(
            processes.running(core.process) for core in self._cores
        )

    async def _await_end(self) -> None:
        """Give a dying engine's core process a moment to be gone: how it ended can be told only then."""
        await asyncio.to_thread(processes.wait_gone, [core.process for core in self._cores], DYING_S)

    async def _fail(self, message: str) -> None:
        """Become failed, with what is left of the engine cleared away."""
        if self._state == "failed":
            return
        if (log := self.log_path) is not None:
            message = f"{message.rstrip('.')}. The engine's log: {log}"
        self._enter("failed", message)
        await self._uncancelled(self._clear())

    async def stop(self) -> None:
        if self._watch is not None and self._watch is not asyncio.current_task():
            self._watch.cancel()
        self._watch = None
        failed = self._state == "failed"
        if self._state != "stopped":
            self._enter("stopped")
        await self._uncancelled(self._clear())
        if not failed or self.log_path is None:
            self._remove_scratch()

    async def _clear(self) -> None:
        """End the engine's processes: in order, then by force. Returns when none is left."""
        starting, self._boot = self._boot, None
        llm, self._llm = self._llm, None
        cores, self._cores = self._cores, []
        # Children of a core that was killed are nobody's children: they are known from before.
        tree = [*self._members, *await asyncio.to_thread(processes.tree, cores)]
        self._members = []
        if llm is not None:
            with contextlib.suppress(Exception):  # a dead engine has told its requests already
                await llm.abort(list(self._requests))
            if (handler := getattr(llm, "output_handler", None)) is not None:
                handler.cancel()  # it would take the end of the engine for a failure
            await asyncio.to_thread(_shut_down, llm)
        elif starting is not None:
            await asyncio.to_thread(starting.abort)
            if starting.spawned:
                await asyncio.to_thread(starting.join, GRACE_S)
        await asyncio.to_thread(processes.end, tree)

    async def _uncancelled(self, work: Coroutine[Any, Any, None]) -> None:
        """Run clean-up to its end, even if this task is cancelled (again) meanwhile."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        cancelled = False
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                cancelled = True
        task.result()
        if cancelled:
            raise asyncio.CancelledError

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    # Text and tokens

    def encode(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise EngineError(f"The {self.name} lane has no tokenizer before it has started.")
        if getattr(tokenizer, "chat_template", None) is None:
            text = "\n\n".join(message["content"] for message in messages)
            return tuple(tokenizer.encode(text))
        try:
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # jinja's errors, and whatever a template raises
            raise BadRequestError(
                f"The model's chat template refuses these messages ({marks.one_line(error)}). "
                "Most templates want an optional system message first, then user and assistant in turn.",
                param="messages",
            ) from error
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            raise EngineError(f"The {self.name} lane has no tokenizer before it has started.")
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def check_schema(self, schema: Mapping[str, Any]) -> None:
        if self._llm is None:
            return
        config = self._llm.vllm_config
        params = sampling_params(Sampling(0.0, 1.0, 1, 0, schema))
        try:
            params.verify(
                config.model_config, config.speculative_config, config.structured_outputs_config, self._tokenizer
            )
        except Exception as error:
            if not is_refusal(error):
                return  # this vLLM checks in another way; the request itself will tell
            raise BadRequestError(
                f"The engine can't decode under this JSON schema: {boot.describe(error)}", param="json_schema"
            ) from error

    # Generation

    def generate(self, request: LaneRequest) -> AsyncIterator[Step | Finish]:
        if self._state != "ready":
            raise EngineError(f"The {self.name} lane is {self._state}; it generates when it is ready.")
        return self._run(request)

    async def _run(self, request: LaneRequest) -> AsyncIterator[Step | Finish]:
        llm = self._llm
        params = sampling_params(request.sampling)
        pieces = Pieces(self._tokenizer, request.prompt_ids)
        recorder = self._recorder
        live: list[Step] = []
        unsplit: set[int] = set()
        reason: str | None = None
        counts: Any = None
        recorder.open()
        self._requests.add(request.request_id)
        started = time.monotonic()
        outputs = llm.generate(tokens_prompt(request.prompt_ids), params, request.request_id)
        try:
            async for output in outputs:
                completion = output.outputs[0]
                reason = completion.finish_reason
                counts = getattr(completion, "spec_decode_metrics", None)
                ids = list(completion.token_ids)
                if not ids:
                    continue
                parts = pieces.of(
                    ids, completion.text, ends_in_stop=reason == "stop" and completion.stop_reason is None
                )
                iterations = recorder.take(len(ids))
                steps = steps_of(ids, completion.text, parts, iterations, started_s=started, now_s=time.monotonic())
                if iterations is None and len(ids) > 1:
                    unsplit.add(len(live))
                live += steps
                for step in steps:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            raise await self._request_error(error) from error
        finally:
            self._requests.discard(request.request_id)
            recorder.close()
            await outputs.aclose()
        if reason not in ("stop", "length"):
            raise EngineError(self._error or f"The engine ended the request early ({reason or 'no reason given'}).")
        yield finish_of(live, reason, counts, frozenset(unsplit), speculates=self.spec.speculates)

    async def _request_error(self, error: Exception) -> EngineError | BadRequestError:
        """What a failed request is to its caller. An engine that died makes the lane fail at once."""
        if self._llm is None or self._dead():
            await self._await_end()
            message = f"The engine died: {self._cause() or boot.describe(error)}."
            if self._state == "ready":
                await self._fail(message)
            return EngineError(self._error or message)
        if is_refusal(error):
            return BadRequestError(f"The engine refuses the request: {boot.describe(error)}")
        return EngineError(f"The request failed in the engine: {self._cause() or boot.describe(error)}")

    async def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[TokenScore]:
        if self._state != "ready":
            raise EngineError(f"The {self.name} lane is {self._state}; it scores when it is ready.")
        return await self._score(prompt_ids, output_ids)

    async def _score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[TokenScore]:
        if not output_ids:
            return []
        from vllm import SamplingParams

        ids = [*prompt_ids, *output_ids]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        self._recorder.open()
        outputs = self._llm.generate(tokens_prompt(ids), params, f"score-{time.monotonic_ns()}")
        found: Any = None
        try:
            async for output in outputs:
                found = output.prompt_logprobs or found
        except Exception as error:
            raise await self._request_error(error) from error
        finally:
            self._recorder.close()
            await outputs.aclose()
        if found is None or len(found) != len(ids):
            raise EngineError("The engine returned no prompt log-probabilities.")
        return [token_score(token, entry) for token, entry in zip(output_ids, found[len(prompt_ids) :], strict=True)]

    async def memory(self) -> LaneMemory:
        config = getattr(self._llm, "vllm_config", None)
        usage = self._recorder.kv_usage if self._recorder.active else 0.0
        return await asyncio.to_thread(engine_memory.read, self.spec, self._report, config, list(self._cores), usage)

    async def bare(self, request: LaneRequest) -> AsyncIterator[int]:
        """The engine's own outputs, as token counts, with nothing of a lane in between. For benchmarks."""
        params = sampling_params(request.sampling)
        async for output in self._llm.generate(tokens_prompt(request.prompt_ids), params, request.request_id):
            yield len(output.outputs[0].token_ids)

    async def idle(self) -> None:
        """Return when the engine is between two steps, with what was aborted before this call gone."""
        await self._llm.collective_rpc("specduel_ping")


def is_refusal(error: Exception) -> bool:
    """Whether vLLM blames the request, and not itself."""
    return isinstance(error, ValueError) or any(base.__name__ == "VLLMClientError" for base in type(error).__mro__)


def sampling_params(sampling: Sampling) -> Any:
    """vLLM's sampling parameters."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    schema = sampling.json_schema
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(json=dict(schema)) if schema is not None else None,
    )


def tokens_prompt(ids: Sequence[int]) -> Any:
    """A prompt of token ids, in the form that needs no rendering."""
    try:
        from vllm.inputs import tokens_input
    except ImportError:
        from vllm import TokensPrompt

        return TokensPrompt(prompt_token_ids=list(ids))
    return tokens_input(list(ids))


def special_tokens(tokenizer: Any) -> frozenset[str]:
    """The strings that a tokenizer turns into control tokens."""
    found = set(getattr(tokenizer, "all_special_tokens", ()))
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return frozenset(found | {str(getattr(token, "content", token)) for token in added.values() if _is_special(token)})


def _is_special(token: Any) -> bool:
    return bool(getattr(token, "special", True))


def token_score(token: int, entry: Mapping[int, Any]) -> TokenScore:
    """A prompt position's scores: the token that is there, and the most likely one."""
    best = max(entry, key=lambda candidate: entry[candidate].logprob)
    return TokenScore(token, float(entry[token].logprob), int(best), float(entry[best].logprob))


def finish_of(live: Sequence[Step], reason: str, counts: Any, unsplit: frozenset[int], *, speculates: bool) -> Finish:
    """The last item of a generation, with the live steps reconciled with the engine's counts."""
    ended = "stop" if reason == "stop" else "length"
    if not speculates:
        return Finish(ended)  # type: ignore[arg-type]
    if counts is None or (sum(counts.histogram) and not counts.per_step_drafted):
        complete = not unsplit
        note = None if complete else "this vLLM keeps no counts for a request, and some steps arrived merged"
        return Finish(ended, reconciled=None if complete else False, note=note)  # type: ignore[arg-type]
    result = reconcile(live, counts.per_step_accepted, counts.per_step_drafted, unsplit=unsplit)
    return Finish(ended, result.steps, result.agree, result.note)  # type: ignore[arg-type]


def _shut_down(llm: Any) -> None:
    """Ask an engine to end, in a thread: it waits for its processes."""
    with contextlib.suppress(Exception):  # whatever is left is ended by force
        llm.shutdown(timeout=GRACE_S)
    llm.shutdown = lambda *_, **__: None  # its __del__ would shut down again, in a half-gone interpreter
