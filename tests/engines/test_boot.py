"""How an engine is started, as far as that goes without one."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.engines import boot, marks, processes, resolved
from app.engines.lane import Step
from app.engines.plan import LaneSpec
from app.engines.stats import Recorder
from app.engines.vllm_lane import VllmLane, finish_of, special_tokens, token_score
from app.errors import EngineError


@dataclass
class Arguments:
    """Stands for vLLM's AsyncEngineArgs."""

    model: str = ""
    max_model_len: int = 0
    worker_extension_cls: str = ""


def spec(**args: Any) -> LaneSpec:
    return LaneSpec("baseline", "m", "cpu", {"model": "m", **args}, {"per_request_spec_decode_metrics": "detailed"})


def test_an_optional_argument_is_left_out_where_vllm_has_none() -> None:
    assert boot.engine_args(Arguments, spec(max_model_len=8)) == Arguments("m", 8, "app.engines.worker.WorkerReport")


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(EngineError, match=r"'max_modl_len'. Did you mean 'max_model_len'\?"):
        boot.engine_args(Arguments, spec(max_modl_len=8))


@pytest.mark.parametrize(
    ("version", "complaint"),
    [("0.31.2", "0.31.2 is not supported"), ("0.9", "0.9 is not supported"), (None, "not installed")],
)
def test_a_vllm_that_is_too_old_or_missing_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str | None, complaint: str
) -> None:
    monkeypatch.setattr(boot, "vllm_version", lambda: version)
    with pytest.raises(EngineError, match=complaint):
        boot.check_version()


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1rc2", "1.0", "2026.1"])
def test_newer_versions_are_tried(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(boot, "vllm_version", lambda: version)
    boot.check_version()


def test_the_environment_is_put_back_with_what_vllm_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDUEL_KEPT", "old")
    monkeypatch.setenv("SPECDUEL_REMOVED", "old")
    before = dict(os.environ)
    with boot.environment({"SPECDUEL_KEPT": "new", "SPECDUEL_REMOVED": None, "SPECDUEL_ADDED": "1"}):
        assert os.environ["SPECDUEL_KEPT"] == "new"
        assert "SPECDUEL_REMOVED" not in os.environ
        os.environ["LD_PRELOAD"] = "set by vLLM"
    assert dict(os.environ) == before


def test_the_stat_logger_passes_for_vllms_own_and_only_records() -> None:
    class Prometheus:
        def __init__(self, vllm_config: object, engine_indexes: object) -> None:
            raise AssertionError("the real one would touch the default registry")

        def record_sleep_state(self, *args: object) -> None:
            raise AssertionError

    recorder = Recorder()
    kind: Any = boot.stat_logger(Prometheus, recorder)
    logger = kind("config", [0])
    logger.log_engine_initialized()
    logger.record_sleep_state(0, 0)
    logger.log()
    recorder.open()
    logger.record(SimpleNamespace(kv_cache_usage=0.5), SimpleNamespace(num_generation_tokens=2), None, engine_idx=0)
    assert issubclass(kind, Prometheus)
    assert recorder.kv_usage == 0.5
    assert recorder.take(2) is not None


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ValueError: No available memory for the cache blocks.", "No available memory for the cache blocks."),
        (
            "ValidationError: 1 validation error for ModelConfig\n  Value error, The checkpoint has model type `x`. "
            "[type=value_error, input_value=ArgsKwargs()]",
            "The checkpoint has model type `x`.",
        ),
        ("KeyError: 'lm_head'", "KeyError: 'lm_head'"),
    ],
)
def test_a_failure_is_one_line_without_wrapping(line: str, cause: str) -> None:
    assert boot.tidy(line) == cause


def test_a_gated_model_says_what_to_do() -> None:
    text = boot.tidy("OSError: You are trying to access a gated repo.\nMake sure to have access to it at a page.")
    assert "HF_TOKEN" in text
    assert "\n" not in text


def test_the_innermost_cause_is_told() -> None:
    try:
        try:
            raise OSError("no space left")
        except OSError as error:
            raise RuntimeError("Engine core initialization failed. See root cause above.") from error
    except RuntimeError as error:
        assert boot.describe(error) == "no space left"


# Marks


def test_marks_are_read_from_where_reading_stopped(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    writer = marks.Writer(str(path))
    writer.phase("one")
    (first,) = marks.read(path)
    writer.error("two\nlines")
    (second,) = marks.read(path, first[1])
    assert [(mark.kind, mark.text) for mark, _ in (first, second)] == [("phase", "one"), ("error", "two\nlines")]
    assert first[0].pid == os.getpid()


def test_a_line_that_is_still_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    path.write_text('{"kind": "phase", "text": "a", "pid": 1}\nnot json\n{"kind": "phase"')
    assert [mark.text for mark, _ in marks.read(path)] == ["a"]


def test_no_file_has_no_marks(tmp_path: Path) -> None:
    assert list(marks.read(tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("message", "phase"),
    [
        ("Starting to load model /m...", "Loading the weights"),
        ("Loading drafter model...", "Loading the draft"),
        ("CPU KV cache size: 8,704 tokens", "Allocating the KV cache"),
        ("Graph capturing finished in 5 secs, took 0.50 GiB", "Capturing CUDA graphs"),
        ("Something else", None),
    ],
)
def test_vllms_messages_become_phases(tmp_path: Path, message: str, phase: str | None) -> None:
    path = tmp_path / "marks"
    handler = marks.MarkHandler(marks.Writer(str(path)))
    handler.emit(logging.LogRecord("vllm", logging.INFO, __file__, 1, message, (), None))
    assert [mark.text for mark, _ in marks.read(path)] == ([phase] if phase else [])


def test_a_warning_that_compiling_is_off_is_no_phase(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    message = "Enforce eager set, disabling torch.compile"
    marks.MarkHandler(marks.Writer(str(path))).emit(
        logging.LogRecord("vllm", logging.WARNING, __file__, 1, message, (), None)
    )
    assert list(marks.read(path)) == []


def test_an_exception_in_an_engine_is_reported_by_its_cause(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    try:
        raise ValueError("no room\nfor weights")
    except ValueError as error:
        failure = (ValueError, error, error.__traceback__)
    marks.MarkHandler(marks.Writer(str(path))).emit(
        logging.LogRecord("vllm", logging.ERROR, __file__, 1, "WorkerProc failed to start.", (), failure)
    )
    assert [(mark.kind, mark.text) for mark, _ in marks.read(path)] == [("error", "ValueError: no room for weights")]


# What an engine tells


def test_a_score_names_the_given_token_and_the_best() -> None:
    entry = {7: SimpleNamespace(logprob=-2.5), 9: SimpleNamespace(logprob=-0.5)}
    score = token_score(7, entry)
    assert (score.token_id, score.logprob, score.best_id, score.best_logprob) == (7, -2.5, 9, -0.5)
    own = token_score(9, entry)
    assert (own.best_id, own.best_logprob) == (9, -0.5)


def test_special_tokens_are_those_of_the_vocabulary_and_the_added_ones() -> None:
    added = {
        0: SimpleNamespace(content="<|im_start|>", special=True),
        1: SimpleNamespace(content="indent", special=False),
    }
    assert special_tokens(SimpleNamespace(all_special_tokens=["</s>"], added_tokens_decoder=added)) == {
        "</s>",
        "<|im_start|>",
    }


def counts(accepted: list[int], drafted: list[int]) -> Any:
    histogram = [accepted.count(n) for n in range(5)]
    return SimpleNamespace(histogram=histogram, per_step_accepted=accepted, per_step_drafted=drafted)


STEPS = [Step(1.0, (1,), "a", 0, 0), Step(2.0, (2, 3), "bc", 1, 4)]


def test_a_speculative_finish_is_reconciled() -> None:
    assert finish_of(STEPS, "stop", counts([1], [4]), frozenset(), speculates=True).reconciled is True
    failed = finish_of(STEPS, "stop", counts([2], [4]), frozenset(), speculates=True)
    assert failed.reconciled is False
    assert failed.note


def test_a_baseline_has_nothing_to_reconcile() -> None:
    finish = finish_of(STEPS, "length", None, frozenset(), speculates=False)
    assert (finish.reason, finish.reconciled, finish.note) == ("length", None, None)


def test_a_vllm_without_counts_is_no_disagreement_unless_steps_are_merged() -> None:
    assert finish_of(STEPS, "stop", None, frozenset(), speculates=True).reconciled is None
    assert finish_of(STEPS, "stop", None, frozenset({1}), speculates=True).reconciled is False


def config(**compilation: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype="torch.bfloat16", max_model_len=4096, enforce_eager=False),
        cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16),
        compilation_config=SimpleNamespace(**compilation),
        speculative_config=None,
    )


def test_resolved_settings_have_every_key_and_none_for_the_unknown() -> None:
    found = resolved.settings(config(), {"runner": "V2"}, spec(), "0.33.0")
    assert found["dtype"] == "bfloat16"
    assert found["kv_tokens"] == 160
    assert found["runner"] == "V2"
    assert found["method"] is None
    assert found["tensor_parallel"] is None
    assert len(found) == 18


@pytest.mark.parametrize(
    ("compilation", "execution"),
    [
        ({"mode": SimpleNamespace(name="NONE")}, "eager"),
        ({"mode": SimpleNamespace(name="VLLM_COMPILE")}, "compiled"),
        (
            {
                "mode": SimpleNamespace(name="VLLM_COMPILE"),
                "cudagraph_mode": SimpleNamespace(name="FULL_AND_PIECEWISE"),
                "cudagraph_capture_sizes": [1, 2],
            },
            "cuda graphs",
        ),
    ],
)
def test_execution_is_named(compilation: dict[str, Any], execution: str) -> None:
    assert resolved.execution(config(**compilation)) == execution


# A lane that has no engine


async def test_a_lane_that_was_never_started_can_be_stopped_and_refuses_work() -> None:
    lane = VllmLane(spec())
    changes: list[str] = []
    lane.on_change(lambda: changes.append(lane.state))
    assert (lane.state, lane.phases, lane.process_ids) == ("waiting", (), ())
    with pytest.raises(EngineError, match="waiting"):
        await lane.score([1], [2])
    memory = await lane.memory()
    assert memory.process_bytes is None
    assert memory.reasons["process_bytes"]
    await lane.stop()
    await lane.stop()
    assert changes == ["stopped"]


async def test_a_start_that_fails_at_once_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot, "vllm_version", lambda: "0.12.0")
    lane = VllmLane(spec())
    with pytest.raises(EngineError, match=r"0\.12\.0 is not supported"):
        await lane.start()
    assert lane.state == "failed"
    assert lane.error is not None
    assert "0.12.0 is not supported" in lane.error
    assert all(phase.done for phase in lane.phases)
    await lane.stop()


def test_a_process_tree_is_ended_and_its_end_explained() -> None:
    import multiprocessing
    import time

    import psutil

    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    assert child.pid is not None
    core = processes.Core(child, psutil.Process(child.pid))
    assert processes.running(core.process)
    assert processes.exit_cause(core) is None
    processes.kill([core])
    assert not processes.running(core.process)
    assert processes.exit_cause(core) == "its process was ended by SIGKILL; too little memory is the usual reason"
