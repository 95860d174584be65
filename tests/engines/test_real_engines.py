"""Two real vLLM engines on the CPU.

The order matters at the end: the last tests kill an engine, interrupt its start, and start it again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import time
from contextlib import aclosing

import jsonschema
import psutil
import pytest

from app.engines.fairness import fairness
from app.engines.fleet import VllmFleet
from app.engines.lane import LaneRequest, Sampling, Step
from app.engines.vllm_lane import VllmLane
from app.errors import BadRequestError, EngineError
from app.measure.metrics import compare, lane_metrics
from app.race.comparison import compare_sampled
from tests.engines.conftest import generate, left, until

# What vLLM and torch warn about is theirs.
pytestmark = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore"),
]

PROMPTS = [
    "Write a JSON array of three planets, each with a name and a number of moons.",
    "Write an SQL statement that creates a table of library books.",
    "Write a Python function that reverses a string.",
    "Repeat this list three times: apple, pear, plum.",
    "Write a short poem about rain.",
    "Explain in one sentence why the sky is blue. Add a bicycle emoji: 🚲",
]
CODE = "Write a Python class for a bank account with deposit and withdraw methods."
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "wheels": {"type": "integer"}},
    "required": ["name", "wheels"],
    "additionalProperties": False,
}
LONG = "Summarize: " + "the river runs past the mill and the mill grinds the corn; " * 350


def lane(fleet: VllmFleet, name: str) -> VllmLane:
    found = fleet.lanes[name]  # type: ignore[index]
    assert isinstance(found, VllmLane)
    return found


async def test_greedy_outputs_are_identical_and_every_step_is_accounted_for(fleet: VllmFleet) -> None:
    drafted = 0
    for prompt in PROMPTS:
        base, spec = await asyncio.gather(*(generate(lane, prompt) for lane in fleet.lanes.values()))
        assert base.ids == spec.ids, prompt
        assert base.text == spec.text
        for one in (base, spec):
            assert len(one.ids) <= 32
            assert one.steps[0].drafted == 0  # a prefill
            assert len(one.steps[0].ids) == 1
            assert [step.t_ms for step in one.steps] == sorted(step.t_ms for step in one.steps)
            for step in one.steps[:-1]:
                assert len(step.ids) == step.accepted + 1
            for step in one.steps:
                assert step.pieces is not None
                assert "".join(step.pieces) == step.text
                assert len(step.pieces) == len(step.ids)
            assert one.text == fleet.lanes["baseline"].decode(one.ids).removesuffix("<|im_end|>")
        assert all(step.drafted == 0 for step in base.steps)
        assert base.finish.reconciled is None
        assert (spec.finish.reconciled, spec.finish.note) == (True, None)
        drafted += sum(step.drafted for step in spec.steps)
    assert drafted > 0


async def test_in_turn_the_speedup_is_tokens_per_step_over_cost_per_step(fleet: VllmFleet) -> None:
    base = await generate(fleet.lanes["baseline"], CODE, max_tokens=48)
    spec = await generate(fleet.lanes["speculative"], CODE, max_tokens=48)
    both = compare(base.steps, spec.steps, alone=True)
    figures = lane_metrics(spec.steps, prompt_tokens=len(spec.prompt_ids))
    assert figures.output_tokens == len(spec.ids) == len(base.ids)
    assert figures.tokens_per_step is not None
    assert figures.tokens_per_step > 1
    assert both.step_cost_ratio is not None
    assert both.decode_speedup == pytest.approx(figures.tokens_per_step / both.step_cost_ratio)


async def test_text_sampled_at_temperature_1_is_the_targets(fleet: VllmFleet) -> None:
    baseline = fleet.lanes["baseline"]
    base, spec = await asyncio.gather(
        *(generate(lane, CODE, temperature=1.0, max_tokens=64, seed=7) for lane in fleet.lanes.values())
    )
    assert sum(step.drafted for step in spec.steps) > 0
    result = await compare_sampled(baseline, base.prompt_ids, base.ids, spec.ids)
    assert result.consistent is True, result.consistency_note
    # What the sampler without the mend writes, any token at any time, does not pass for it.
    noise = [(token * 7919 + 13) % 40000 + 100 for token in range(64)]
    assert (await compare_sampled(baseline, base.prompt_ids, base.ids, noise)).consistent is False


async def test_the_sampler_says_whether_it_was_mended(fleet: VllmFleet) -> None:
    assert fleet.lanes["speculative"].engine["rejection_sampler"] in ("vLLM's", "mended")
    assert fleet.lanes["baseline"].engine["rejection_sampler"] is None


async def test_scores_of_a_greedy_text_are_the_best_tokens(fleet: VllmFleet) -> None:
    base = await generate(fleet.lanes["baseline"], PROMPTS[2], max_tokens=16)
    scores = await fleet.lanes["baseline"].score(base.prompt_ids, base.ids)
    assert [score.token_id for score in scores] == base.ids
    assert all(score.best_logprob - score.logprob < 1e-3 for score in scores)
    assert all(score.logprob <= 0 for score in scores)


async def test_structured_output_parses_in_both_lanes(fleet: VllmFleet) -> None:
    prompt = "Describe a tricycle as JSON."
    both = await asyncio.gather(
        *(generate(lane, prompt, json_schema=SCHEMA, max_tokens=64) for lane in fleet.lanes.values())
    )
    for one in both:
        jsonschema.validate(json.loads(one.text), SCHEMA)
        assert one.finish.reason == "stop"
        assert one.finish.reconciled is not False
    assert both[0].ids == both[1].ids


async def test_a_schema_that_no_grammar_can_follow_is_refused(fleet: VllmFleet) -> None:
    baseline = fleet.lanes["baseline"]
    baseline.check_schema(SCHEMA)
    with pytest.raises(BadRequestError) as refused:
        baseline.check_schema({"type": "no such type"})
    assert refused.value.param == "json_schema"


async def test_messages_that_the_template_refuses_or_not(fleet: VllmFleet) -> None:
    baseline = fleet.lanes["baseline"]
    assert "<|im_start|>" in baseline.special_tokens
    assert "<|im_end|>" in baseline.special_tokens
    ids = baseline.encode([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert baseline.decode(ids).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("when", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_leaving_frees_both_engines_within_a_second(fleet: VllmFleet, when: str, how: str) -> None:
    prompt = LONG if when == "prefill" else CODE
    streams = []
    for engine in fleet.lanes.values():
        ids = engine.encode([{"role": "user", "content": prompt}])
        streams.append(engine.generate(LaneRequest(f"left-{engine.name}", ids, Sampling(0.0, 1.0, 400, 0))))
    seen: list[Step] = []

    async def read(stream) -> None:  # type: ignore[no-untyped-def]
        async with aclosing(stream):
            async for item in stream:
                seen.append(item)
                if how == "close" and when == "decode":
                    return

    readers = [asyncio.create_task(read(stream)) for stream in streams]
    if when == "prefill":
        await asyncio.sleep(1.0)
        assert not seen, "the prompt is too short to be left during its prefill"
    else:
        await until(lambda: seen, 30)
    begin, computed = time.monotonic(), cpu_seconds(fleet)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    for name in fleet.lanes:
        await lane(fleet, name).idle()
    elapsed = time.monotonic() - begin
    # On a machine that is busy with other work, what counts is how long the engines went on computing.
    longest = max(after - before for before, after in zip(computed, cpu_seconds(fleet), strict=True))
    assert min(elapsed, longest) < 1.0, f"{elapsed:.1f} s, {longest:.1f} s of them computing"
    counted = len(seen)
    await asyncio.sleep(1.5)  # a worker of vLLM watches for more work for a second before it sleeps
    before = cpu_seconds(fleet)
    await asyncio.sleep(0.5)
    idle = [after - earlier for earlier, after in zip(before, cpu_seconds(fleet), strict=True)]
    assert max(idle) < 0.15, "an engine still computes"
    assert len(seen) == counted
    assert (await fleet.lanes["speculative"].memory()).kv_used_bytes == 0


def cpu_seconds(fleet: VllmFleet) -> list[float]:
    """CPU time that each engine's processes have used so far."""
    return [
        sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in lane(fleet, name).process_ids) for name in fleet.lanes
    ]


async def test_memory_is_read_from_the_engine(fleet: VllmFleet) -> None:
    base, spec = [await fleet.lanes[name].memory() for name in fleet.lanes]
    for one in (base, spec):
        assert one.kind == "ram"
        assert one.target_weights_bytes == pytest.approx(538e6, rel=0.01)
        assert one.kv_bytes_per_token == 2 * 30 * 3 * 64 * 4
        assert one.kv_allocated_bytes == one.kv_tokens * one.kv_bytes_per_token  # type: ignore[operator]
        assert one.process_bytes is not None
        assert one.process_bytes > one.target_weights_bytes
        assert one.draft_weights_bytes == 0  # n-gram lookup has no weights, and that is known
    reading = fleet.lanes["baseline"].generate(
        LaneRequest(
            "reading", fleet.lanes["baseline"].encode([{"role": "user", "content": CODE}]), Sampling(0, 1, 8, 0)
        )
    )
    async with aclosing(reading) as items:  # type: ignore[type-var]
        await anext(items)
        used = (await fleet.lanes["baseline"].memory()).kv_used_bytes
    assert used is not None
    assert used > 0


async def test_the_lanes_run_with_the_same_settings(fleet: VllmFleet) -> None:
    rows = fairness(fleet.lanes["baseline"].engine, fleet.lanes["speculative"].engine)
    assert [row for row in rows if row["differs"] and not row["forced_by"]] == []
    engine = fleet.lanes["speculative"].engine
    assert engine["dtype"] == "float32"
    assert engine["method"] == "ngram"
    assert engine["execution"] == "eager"
    assert engine["threads"] >= 1
    assert engine["context_tokens"] == 8192


async def test_the_start_was_told_by_phase(fleet: VllmFleet) -> None:
    for engine in fleet.lanes.values():
        names = [phase.name for phase in engine.phases]
        assert names[0] == "Importing vLLM"
        assert names[-1] == "Warming up"
        assert "Loading the weights" in names
        assert all(phase.done for phase in engine.phases)


async def test_the_servers_environment_is_as_before(fleet: VllmFleet) -> None:
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ
    assert "SPECDUEL_MARKS" not in os.environ
    assert "tcmalloc" not in os.environ.get("LD_PRELOAD", "")


async def test_an_engine_that_dies_fails_its_lane_alone_and_starts_again(fleet: VllmFleet) -> None:
    """Killed while it generates; the restart is interrupted once, and leaves no process."""
    speculative = lane(fleet, "speculative")
    ids = set(speculative.process_ids)
    changes: list[str] = []
    speculative.on_change(lambda: changes.append(speculative.state))

    async def kill_soon() -> None:
        await asyncio.sleep(1.0)
        os.kill(speculative._cores[0].process.pid, signal.SIGKILL)

    killer = asyncio.create_task(kill_soon())
    with pytest.raises(EngineError, match="died"):
        await generate(speculative, CODE, max_tokens=400)
    await killer
    await until(lambda: speculative.state == "failed", 2.0)
    assert changes[-1] == "failed"
    assert speculative.error is not None
    assert "SIGKILL" in speculative.error
    assert "\n" not in speculative.error
    await until(lambda: left(ids) == [], 10.0)
    with pytest.raises(EngineError, match="failed"):
        speculative.generate(LaneRequest("late", (1,), Sampling(0.0, 1.0, 1, 0)))
    assert (await generate(fleet.lanes["baseline"], PROMPTS[3], max_tokens=8)).ids

    starting = asyncio.create_task(speculative.start())
    await until(lambda: speculative.process_ids, 120.0)
    ids = set(speculative.process_ids)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert speculative.state == "stopped"
    assert left(ids) == []

    await fleet.restart("speculative")
    assert speculative.state == "ready", speculative.error
    again = await generate(speculative, PROMPTS[3], max_tokens=16)
    base = await generate(fleet.lanes["baseline"], PROMPTS[3], max_tokens=16)
    assert again.ids == base.ids
    assert statistics.fmean(len(step.ids) for step in again.steps) >= 1
