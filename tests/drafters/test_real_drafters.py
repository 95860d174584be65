"""The shipped drafters in real vLLM on the CPU: loaded, accepted, and without effect on greedy output."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import aclosing
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from app.engines import boot  # noqa: E402
from app.engines.fleet import VllmFleet  # noqa: E402
from app.engines.lane import Finish, Lane, LaneRequest, Sampling  # noqa: E402
from app.errors import PairError  # noqa: E402
from app.pairs import builders, cache, catalogue  # noqa: E402
from app.pairs.pair import Pair  # noqa: E402
from app.pairs.resolve import resolve  # noqa: E402

# What vLLM and torch warn about is theirs.
pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]

PROMPTS = (
    "Write a JSON array of three boats, each with name, length and port.",
    "Write a SQL table for a chess club with five columns.",
    "Write a Python function that returns the larger of two numbers.",
)
TOKENS = 48


def pair_file(folder: Path, method: str, draft: str) -> Pair:
    path = folder / f"{method}.toml"
    path.write_text(
        f'title = "{method}"\nmethod = "{method}"\nnum_speculative_tokens = 3\n'
        f'[target]\nbuilt = "embedded"\n[draft]\n{draft}\n',
        encoding="utf-8",
    )
    return catalogue.load(str(path))


async def run(lane: Lane, prompt: str) -> tuple[list[int], int, int]:
    """Greedy output ids, accepted drafts, drafted tokens."""
    ids = lane.encode([{"role": "user", "content": prompt}])
    request = LaneRequest(f"{lane.name}-{len(prompt)}", ids, Sampling(0.0, 1.0, TOKENS, 0))
    steps = []
    async with aclosing(lane.generate(request)) as items:  # type: ignore[type-var]
        async for item in items:
            if isinstance(item, Finish):
                steps = list(item.steps) if item.steps is not None else steps
            else:
                steps.append(item)
    return [i for s in steps for i in s.ids], sum(s.accepted for s in steps), sum(s.drafted for s in steps)


def at_random(head: Path, folder: Path) -> Path:
    """The same head, its trained matrices replaced by random ones."""
    shutil.copytree(head, folder)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(str(head / "model.safetensors"))
    fresh = {
        name: torch.randn(tensor.shape, generator=generator) * 0.02 if tensor.dim() == 2 else tensor
        for name, tensor in tensors.items()
    }
    save_file(fresh, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def test_shipped_drafters_are_accepted_and_change_no_greedy_token(tmp_path: Path) -> None:
    if boot.vllm_version() is None:
        pytest.skip("vLLM is not installed")
    built = cache.cache_dir()
    try:
        for name in ("embedded-eagle3", "embedded-draft"):
            builders.builder(name).build(built, report=lambda line: None)
    except PairError as error:
        pytest.skip(error.message)
    head = builders.builder("embedded-eagle3").path(built)
    random_head = at_random(head, tmp_path / "random")
    pairs = {
        "eagle3": pair_file(tmp_path, "eagle3", 'built = "embedded-eagle3"'),
        "random": pair_file(tmp_path, "eagle3", f'path = "{random_head}"'),
        "draft_model": pair_file(tmp_path, "draft_model", 'built = "embedded-draft"'),
    }

    async def measure() -> dict[str, float]:
        resolved = {name: resolve(pair, cache_dir=built, device="cpu") for name, pair in pairs.items()}
        fleet = VllmFleet(resolved["eagle3"])
        rates: dict[str, float] = {}
        try:
            await fleet.start()
            assert {lane.state for lane in fleet.lanes.values()} == {"ready"}, [
                lane.error for lane in fleet.lanes.values()
            ]
            baseline = [(await run(fleet.lanes["baseline"], prompt))[0] for prompt in PROMPTS]
            for name in pairs:
                if name != "eagle3":
                    await fleet.switch(resolved[name])
                lane = fleet.lanes["speculative"]
                assert lane.state == "ready", lane.error
                outputs = [await run(lane, prompt) for prompt in PROMPTS]
                assert [ids for ids, _, _ in outputs] == baseline, name
                rates[name] = sum(accepted for _, accepted, _ in outputs) / sum(drafted for _, _, drafted in outputs)
        finally:
            await fleet.stop()
        return rates

    rates = asyncio.run(measure())
    assert rates["random"] < 0.1
    assert rates["eagle3"] > 0.5
    assert rates["draft_model"] > 0.4
