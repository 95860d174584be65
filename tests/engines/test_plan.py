"""From a pair and a machine to two engines' settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.engines.machine import Gpu, Machine
from app.engines.plan import plan, read_config, shape_of, split_cores
from app.errors import PairError
from app.pairs.pair import ModelRef, Pair, ResolvedPair

CPU = Machine("cpu", "a CPU", (0, 1))
GPU = Gpu("0", "a GPU", 80 << 30)
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
FP32_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4


def model(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def pair(**changes: Any) -> Pair:
    fields: dict[str, Any] = {
        "name": "p",
        "title": "P",
        "target": ModelRef("path", "target"),
        "method": "ngram",
        "num_speculative_tokens": 4,
    }
    return Pair(**(fields | changes))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return model(tmp_path / "target")


@pytest.mark.parametrize(
    ("cores", "baseline", "speculative"),
    [
        ((3,), (3,), (3,)),
        ((0, 1), (0,), (1,)),
        ((0, 2, 5), (0,), (2,)),
        ((0, 1, 2, 3), (1,), (2,)),
        ((0, 1, 2, 3, 4), (1, 2), (3, 4)),
        (tuple(range(8)), (1, 2, 3), (4, 5, 6)),
    ],
)
def test_cores_are_split_evenly_and_one_is_left_from_four_up(
    cores: tuple[int, ...], baseline: tuple[int, ...], speculative: tuple[int, ...]
) -> None:
    assert split_cores(cores) == (baseline, speculative)


def test_the_lanes_differ_in_nothing_but_speculation_and_cores(target: Path) -> None:
    baseline, speculative = plan(ResolvedPair(pair(), target), CPU)
    assert set(speculative.engine_args) - set(baseline.engine_args) == {"speculative_config"}
    assert {name: speculative.engine_args[name] for name in baseline.engine_args} == baseline.engine_args
    differing = {name for name in baseline.env if baseline.env[name] != speculative.env[name]}
    assert differing == {"VLLM_CPU_OMP_THREADS_BIND"}
    assert (baseline.env["VLLM_CPU_OMP_THREADS_BIND"], speculative.env["VLLM_CPU_OMP_THREADS_BIND"]) == ("0", "1")


def test_a_cpu_engine_is_planned_in_full_precision_with_a_fair_prefill(target: Path) -> None:
    args = plan(ResolvedPair(pair(), target), CPU)[0].engine_args
    assert args["dtype"] == "float32"
    assert args["enforce_eager"] is True
    assert args["enable_prefix_caching"] is False
    assert args["seed"] == 0


def test_the_kv_cache_holds_one_context_and_little_more(target: Path) -> None:
    args = plan(ResolvedPair(pair(), target), CPU)[0].engine_args
    tokens = args["kv_cache_memory_bytes"] / FP32_BYTES_PER_TOKEN
    assert 8192 < tokens <= 8192 + 8 * 128


def test_a_draft_models_cache_comes_on_top(target: Path, tmp_path: Path) -> None:
    draft = model(tmp_path / "draft", num_hidden_layers=2)
    chosen = pair(method="draft_model", draft=ModelRef("path", "draft"))
    baseline, speculative = plan(ResolvedPair(chosen, target, draft), CPU)
    ratio = speculative.engine_args["kv_cache_memory_bytes"] / baseline.engine_args["kv_cache_memory_bytes"]
    assert ratio == pytest.approx(32 / 30)
    assert speculative.engine_args["speculative_config"] == {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "model": str(draft),
    }


def test_an_eagle_head_caches_one_layer_whatever_its_config_says(target: Path, tmp_path: Path) -> None:
    draft = model(tmp_path / "head", num_hidden_layers=30)
    chosen = pair(method="eagle3", draft=ModelRef("path", "head"))
    baseline, speculative = plan(ResolvedPair(chosen, target, draft), CPU)
    ratio = speculative.engine_args["kv_cache_memory_bytes"] / baseline.engine_args["kv_cache_memory_bytes"]
    assert ratio == pytest.approx(31 / 30)


def test_the_context_is_the_smaller_of_target_and_draft(target: Path, tmp_path: Path) -> None:
    draft = model(tmp_path / "draft", max_position_embeddings=2048)
    chosen = pair(method="draft_model", draft=ModelRef("path", "draft"), engine={"max_model_len": 4096})
    assert [spec.engine_args["max_model_len"] for spec in plan(ResolvedPair(chosen, target, draft), CPU)] == [2048] * 2


def test_a_pair_overrides_any_argument_of_either_lane(target: Path) -> None:
    chosen = pair(
        engine={"dtype": "bfloat16", "max_model_len": 1024},
        baseline_engine={"async_scheduling": False},
        speculative_engine={"max_num_seqs": 8},
        speculative_config={"prompt_lookup_max": 7},
    )
    baseline, speculative = plan(ResolvedPair(chosen, target), CPU)
    assert baseline.engine_args["dtype"] == speculative.engine_args["dtype"] == "bfloat16"
    assert baseline.engine_args["async_scheduling"] is False
    assert "async_scheduling" not in speculative.engine_args
    assert (baseline.engine_args["max_num_seqs"], speculative.engine_args["max_num_seqs"]) == (2, 8)
    assert speculative.engine_args["speculative_config"]["prompt_lookup_max"] == 7
    # Half the bytes a value, and a smaller context.
    assert baseline.engine_args["kv_cache_memory_bytes"] < 1600 * FP32_BYTES_PER_TOKEN / 2


def test_per_request_counts_are_asked_of_the_speculative_lane_only(target: Path) -> None:
    baseline, speculative = plan(ResolvedPair(pair(), target), CPU)
    assert baseline.optional_args == {}
    assert speculative.optional_args == {"per_request_spec_decode_metrics": "detailed"}


def test_two_engines_on_one_gpu_ask_for_less_than_is_free(target: Path) -> None:
    specs = plan(ResolvedPair(pair(), target), Machine("cuda", GPU.name, (0, 1), (GPU,)))
    assert sum(spec.engine_args["gpu_memory_utilization"] for spec in specs) < 0.1
    assert all(spec.engine_args["kv_cache_memory_bytes"] > 0 for spec in specs)
    assert [spec.gpu for spec in specs] == ["0", "0"]
    assert all("CUDA_VISIBLE_DEVICES" not in spec.env for spec in specs)
    assert all("dtype" not in spec.engine_args for spec in specs)


def test_each_lane_has_a_gpu_of_its_own_where_there_are_two(target: Path) -> None:
    machine = Machine("cuda", GPU.name, (0, 1), (GPU, Gpu("GPU-b7", "a GPU", None)))
    specs = plan(ResolvedPair(pair(), target), machine)
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0", "GPU-b7"]


def test_a_model_on_this_machine_is_never_looked_up(target: Path) -> None:
    assert plan(ResolvedPair(pair(), target), CPU)[0].env["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in plan(ResolvedPair(pair(), "owner/name"), CPU)[0].env


def test_a_model_that_is_not_here_yet_gets_a_fixed_cache() -> None:
    specs = plan(ResolvedPair(pair(), "owner/name"), Machine("cuda", GPU.name, (0, 1), (GPU,)))
    assert [spec.engine_args["kv_cache_memory_bytes"] for spec in specs] == [4 << 30] * 2


def test_a_method_that_needs_a_draft_is_refused_without_one(target: Path) -> None:
    with pytest.raises(PairError, match=r"'eagle3'.*needs a draft"):
        plan(ResolvedPair(pair(method="eagle3"), target), CPU)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(PairError, match=r"config\.json"):
        read_config(tmp_path)


def test_the_shape_of_latent_attention_is_not_guessed() -> None:
    assert shape_of(CONFIG | {"kv_lora_rank": 512}).kv_values_per_token is None
    assert shape_of({"text_config": CONFIG}).kv_values_per_token == 2 * 30 * 3 * 64
