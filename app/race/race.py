"""Running races: one at a time, cancellable, each lane on its own.

How a run ends, in every way it can:

* both lanes finish: outputs are compared, ``comparison`` and ``end`` follow;
* one lane fails: ``lane_failed``; the other goes on to its end;
* it is cancelled (by a call, at shutdown, or because its last viewer left and nobody came back): closing
  each lane's iterator frees the engines, the unfinished lanes get ``lane_finished`` with "cancelled";
* whatever happens, ``end`` is the last event, and the next run can start.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from app.engines.lane import Finish, Fleet, LaneMemory, LaneName, LaneRequest, Step
from app.errors import LaneNotReadyError, NotFoundError, RunActiveError, SpecduelError
from app.measure.memory import MemorySample, memory_tax
from app.measure.metrics import compare, recent_tok_s
from app.race.comparison import NOT_COMPARABLE, OutputComparison, compare_greedy, compare_sampled
from app.race.request import RunRequest, encode
from app.race.run import LaneRun, Run, failure

log = logging.getLogger(__name__)

STEP_EVENTS_PER_S = 30
STATS_EVENTS_PER_S = 5
MEMORY_EVERY_S = 1.0
CANCEL_WAIT_S = 5.0


class Observer(Protocol):
    """What hears about races beside the viewers: the Prometheus metrics."""

    def run_ended(self, run: Run) -> None: ...

    def step(self, lane: LaneName, step: Step, previous: Step | None) -> None: ...

    def lane_ended(self, name: LaneName, lane: LaneRun) -> None: ...


class Races:
    """Starts, keeps and ends runs on one fleet.

    Args:
        fleet: both lanes.
        sample_memory: takes a memory sample; its figures go into ``memory`` events.
        observer: hears of every step.
        pair: tells the pair as the record carries it.
        context_tokens: tells the smaller context of target and draft.
        specduel_version: goes into the record.
        keep_runs: how many ended runs stay readable.
        abandon_after_s: a run that had viewers is cancelled after this long without any; None: never.
        score_tokens: texts of sampled runs are scored while prompt and output are at most this long.
        price_per_hour: what the device costs an hour, for ``cost_per_million_tokens``.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        sample_memory: Callable[[], Any],
        observer: Observer,
        pair: Callable[[], Mapping[str, Any]],
        context_tokens: Callable[[], int],
        specduel_version: str,
        keep_runs: int = 32,
        abandon_after_s: float | None = 60.0,
        score_tokens: int = 4096,
        price_per_hour: float | None = None,
    ) -> None:
        self._fleet = fleet
        self._sample_memory = sample_memory
        self._observer = observer
        self._pair = pair
        self._context_tokens = context_tokens
        self._specduel_version = specduel_version
        self._keep_runs = keep_runs
        self._abandon_after_s = abandon_after_s
        self._score_tokens = score_tokens
        self._price_per_hour = price_per_hour
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self.active: Run | None = None

    @property
    def last(self) -> Run | None:
        """The newest run that has ended."""
        return next((run for run in reversed(self._runs.values()) if run.status != "active"), None)

    def get(self, run_id: str) -> Run:
        """The run of that id.

        Raises:
            NotFoundError: there is none, or it was so long ago that it is forgotten.
        """
        try:
            return self._runs[run_id]
        except KeyError:
            raise NotFoundError(
                f"There is no run {run_id!r}. The last {self._keep_runs} runs are kept while the server runs.",
                param="run_id",
            ) from None

    def start(self, request: RunRequest) -> Run:
        """Accept a run and start it.

        Raises:
            RunActiveError: another run is active.
            LaneNotReadyError: a lane that the run needs is not ready.
            BadRequestError: the request does not fit the engines.
        """
        if self.active is not None:
            raise RunActiveError(
                f"Run {self.active.run_id} is active; one runs at a time. "
                f"Wait for its end, or DELETE /api/runs/{self.active.run_id}.",
                param=self.active.run_id,
            )
        for name in request.lanes:
            lane = self._fleet.lanes[name]
            if lane.state != "ready":
                why = f": {lane.error}" if lane.error else ""
                raise LaneNotReadyError(
                    f"The {name} lane is {lane.state}{why}. Runs are possible when GET /readyz answers 200.",
                    param=name,
                )
        prompt_ids = encode(request, self._fleet.lanes[request.lanes[0]], context_tokens=self._context_tokens())
        lanes = {}
        for name in request.lanes:
            lane = self._fleet.lanes[name]
            lanes[name] = LaneRun(
                lane,
                len(prompt_ids),
                dict(lane.engine),
                draft_length=lane.engine.get("num_speculative_tokens"),
                price_per_hour=self._price_per_hour,
            )
        run = Run(
            secrets.token_hex(6),
            request,
            lanes,
            source=self._fleet.source,
            contended=request.mode == "together" and self._fleet.device.shared and len(lanes) > 1,
            pair=self._pair(),
            versions={"specduel": self._specduel_version, **self._fleet.versions},
        )
        self._runs[run.run_id] = run
        while len(self._runs) > self._keep_runs:
            self._runs.popitem(last=False)
        self.active = run
        run.task = asyncio.create_task(self._run(run, prompt_ids), name=f"run {run.run_id}")
        return run

    async def cancel(self, run_id: str) -> tuple[Run, bool]:
        """Cancel a run; returns it and whether it was active. Its engines are free when this returns.

        Raises:
            NotFoundError: there is no such run.
        """
        run = self.get(run_id)
        if run.task is None or run.task.done():
            return run, False
        await asyncio.sleep(0)  # a task cancelled before its first step would never reach its own clean-up
        run.task.cancel()
        await asyncio.wait([run.task], timeout=CANCEL_WAIT_S)
        return run, True

    async def close(self) -> None:
        """Cancel what is active, at shutdown."""
        if self.active is not None:
            await self.cancel(self.active.run_id)

    async def _run(self, run: Run, prompt_ids: tuple[int, ...]) -> None:
        request = run.request
        run.log.append(
            "run",
            mode=request.mode,
            contended=run.contended,
            source=run.source,
            pair=run.pair,
            request=request.as_dict(),
            prompt_tokens=len(prompt_ids),
            order=list(run.lanes),
        )
        memory = asyncio.create_task(self._watch_memory(run), name=f"memory of run {run.run_id}")
        watch = asyncio.create_task(self._watch_viewers(run), name=f"viewers of run {run.run_id}")
        try:
            if request.mode == "together":
                await asyncio.gather(*(self._race(run, name, prompt_ids) for name in run.lanes))
            else:
                for place, name in enumerate(run.lanes):
                    if place:
                        await asyncio.sleep(self._fleet.settle_s)
                    await self._race(run, name, prompt_ids)
            run.comparison = await self._compare(run, prompt_ids)
            run.status = "completed" if any(lane.completed for lane in run.lanes.values()) else "failed"
        except asyncio.CancelledError:
            run.status = "cancelled"
            raise
        except Exception:
            log.exception("run %s broke", run.run_id)
            run.status = "failed"
        finally:
            memory.cancel()
            watch.cancel()
            for name, lane in run.lanes.items():
                if lane.finish_reason is None and lane.error is None:
                    lane.finish_reason = "cancelled"
                    self._lane_finished(run, name)
            if run.comparison is None:
                run.comparison = not_compared()
            run.log.append("comparison", comparison=run.comparison)
            self.active = None
            self._observer.run_ended(run)
            run.log.append("end", status=run.status)

    async def _race(self, run: Run, name: LaneName, prompt_ids: tuple[int, ...]) -> None:
        """Let one lane run to its end. Its failure ends here."""
        lane = run.lanes[name]
        outbox = StepOutbox(run, name)
        lane.started_ms = run.elapsed_ms()
        run.log.append("lane_started", lane=name, t_ms=round(lane.started_ms, 3))
        request = LaneRequest(f"{run.run_id}-{name}", prompt_ids, run.request.sampling())
        try:
            async with aclosing(lane.lane.generate(request)) as items:  # type: ignore[type-var]
                async for item in items:
                    if isinstance(item, Finish):
                        lane.reconciled, lane.note = item.reconciled, item.note
                        if item.steps is not None:
                            lane.steps = list(item.steps)
                        lane.finish_reason = item.reason
                        break
                    self._observer.step(name, item, lane.steps[-1] if lane.steps else None)
                    lane.steps.append(item)
                    outbox.put(item)
        except Exception as error:
            if not isinstance(error, SpecduelError):
                log.exception("the %s lane broke", name)
            outbox.flush()
            lane.error = failure(error)
            run.log.append("lane_failed", lane=name, t_ms=round(run.elapsed_ms(), 3), error=lane.error)
            self._observer.lane_ended(name, lane)
            return
        finally:
            outbox.flush()
        self._lane_finished(run, name)

    def _lane_finished(self, run: Run, name: LaneName) -> None:
        lane = run.lanes[name]
        run.log.append(
            "lane_finished",
            lane=name,
            t_ms=round(run.elapsed_ms(), 3),
            finish_reason=lane.finish_reason,
            metrics=lane.metrics().as_dict(),
            text=lane.text,
        )
        self._observer.lane_ended(name, lane)

    async def _compare(self, run: Run, prompt_ids: tuple[int, ...]) -> dict[str, Any]:
        base, spec = run.lanes.get("baseline"), run.lanes.get("speculative")
        if base is None or spec is None or not (base.completed and spec.completed):
            return not_compared()
        longest = len(prompt_ids) + max(len(base.ids), len(spec.ids))
        outputs = NOT_COMPARABLE
        try:
            if run.request.temperature == 0:
                outputs = await compare_greedy(base.lane, prompt_ids, base.ids, spec.ids)
            elif longest <= self._score_tokens:
                outputs = await compare_sampled(base.lane, prompt_ids, base.ids, spec.ids)
            else:
                outputs = OutputComparison(
                    tokens="not_comparable",
                    consistency_note=f"Not scored: {longest} tokens, over the {self._score_tokens} that are scored.",
                )
        except SpecduelError as error:
            outputs = OutputComparison(tokens="not_comparable", consistency_note=f"Not scored: {error.message}")
        ratios = compare(base.steps, spec.steps, alone=not run.contended)
        return {
            **outputs.as_dict(),
            "decode_speedup": ratios.decode_speedup,
            "step_cost_ratio": ratios.step_cost_ratio,
            "total_speedup": ratios.total_speedup,
            "break_even_tokens_per_step": ratios.break_even_tokens_per_step,
            "memory_tax": await self._memory_tax(),
        }

    async def _memory_tax(self) -> dict[str, Any] | None:
        sample: MemorySample = await self._sample_memory()
        lanes: Mapping[LaneName, LaneMemory] = sample.lanes
        if not {"baseline", "speculative"} <= set(lanes):
            return None
        return memory_tax(lanes["baseline"], lanes["speculative"])

    async def _watch_memory(self, run: Run) -> None:
        while True:
            sample: MemorySample = await self._sample_memory()
            run.log.append("memory", t_ms=round(run.elapsed_ms(), 3), memory=sample.as_dict())
            await asyncio.sleep(MEMORY_EVERY_S)

    async def _watch_viewers(self, run: Run) -> None:
        """Cancel a run that its viewers have left. A run that nobody ever watched goes on to its end."""
        if self._abandon_after_s is None:
            return
        while True:
            await asyncio.sleep(min(1.0, self._abandon_after_s / 4))
            if run.unwatched_since is None or run.task is None:
                continue
            if time.monotonic() - run.unwatched_since >= self._abandon_after_s:
                log.info("run %s: nobody watched for %g s; cancelled", run.run_id, self._abandon_after_s)
                run.task.cancel()
                return


class StepOutbox:
    """Coalesces a lane's steps into events: the first at once, then at most 30 events a second.

    Nothing is dropped; what is held back goes out when its time comes, or at ``flush``.
    """

    def __init__(self, run: Run, name: LaneName) -> None:
        self._run, self._name = run, name
        self._held: list[Step] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = self._stats_at = float("-inf")

    def put(self, step: Step) -> None:
        self._held.append(step)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            wait = self._sent_at + 1 / STEP_EVENTS_PER_S - loop.time()
            if wait <= 0:
                self.flush()
            else:
                self._timer = loop.call_later(wait, self.flush)

    def flush(self) -> None:
        """Send what is held back now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._held:
            return
        now = asyncio.get_running_loop().time()
        held, self._held = self._held, []
        self._run.log.append("steps", lane=self._name, steps=[step.as_dict() for step in held])
        self._sent_at = now
        if now - self._stats_at >= 1 / STATS_EVENTS_PER_S:
            self._stats_at = now
            self._run.log.append("lane_stats", **lane_stats(self._run, self._name))


def not_compared() -> dict[str, Any]:
    """The comparison of a run in which not both lanes finished."""
    ratios = dict.fromkeys(("decode_speedup", "step_cost_ratio", "total_speedup", "break_even_tokens_per_step"))
    return {**NOT_COMPARABLE.as_dict(), **ratios, "memory_tax": None}


def lane_stats(run: Run, name: LaneName) -> dict[str, Any]:
    """A lane's live figures, as the ``lane_stats`` event carries them."""
    lane = run.lanes[name]
    metrics = lane.metrics()
    since_start_ms = run.elapsed_ms() - (lane.started_ms or 0.0)
    return {
        "lane": name,
        "t_ms": round(run.elapsed_ms(), 3),
        "output_tokens": metrics.output_tokens,
        "steps": metrics.steps,
        "recent_tok_s": recent_tok_s(lane.steps, now_ms=since_start_ms),
        "ttft_ms": metrics.ttft_ms,
        "decode_tok_s": metrics.decode_tok_s,
        "tokens_per_step": metrics.tokens_per_step,
        "acceptance_rate": metrics.acceptance_rate,
        "acceptance_by_position": list(metrics.acceptance_by_position) if metrics.acceptance_by_position else None,
    }
