"""The benchmark, on scripted lanes behind a real server on a socket."""

from __future__ import annotations

import json

import pytest

from app import bench, cli
from app.bench import Arrivals
from app.errors import EngineError
from app.settings import Settings


def test_a_rate_counts_what_came_after_the_first_arrival() -> None:
    assert Arrivals((1.0, 1.5, 3.0), (4, 2, 6)).tok_s == pytest.approx(8 / 2)


@pytest.mark.parametrize("times", [(), (1.0,), (1.0, 1.0)])
def test_a_rate_of_a_single_moment_is_none(times: tuple[float, ...]) -> None:
    assert Arrivals(times, (1,) * len(times)).tok_s is None


def test_the_result_is_the_last_line_and_compares_equal_work(capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(pair="scripted", scripted="ttft_ms=5,step_ms=2,speculative.step_ms=3")
    fleet, speculation = cli.build_fleet(settings)
    assert bench.run(settings, fleet, speculation, rounds=2, max_tokens=48) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["source"] == "scripted"
    assert result["rounds"] == 2
    for lane in result["lanes"].values():
        assert lane["app_tok_s"] > 0
        assert lane["bare_tok_s"] > 0
        assert lane["ratio"] == pytest.approx(lane["app_tok_s"] / lane["bare_tok_s"], rel=1e-3)
    assert result["event_loop_lag_ms"]["worst"] >= result["event_loop_lag_ms"]["p99"]


def test_an_engine_that_does_not_start_ends_the_benchmark() -> None:
    settings = Settings(pair="scripted", scripted="speculative.fail_start=true")
    fleet, speculation = cli.build_fleet(settings)
    with pytest.raises(EngineError, match="speculative"):
        bench.run(settings, fleet, speculation, rounds=1, max_tokens=8)
