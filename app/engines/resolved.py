"""The settings that an engine really runs with, for people to compare. Names: docs/http-api.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.engines.plan import LaneSpec


def settings(config: Any, report: Mapping[str, Any], spec: LaneSpec, vllm: str | None) -> dict[str, Any]:
    """Resolved settings of an engine.

    Args:
        config: vLLM's configuration after the engine is up (vLLM corrects it while loading).
        report: what the worker knows (:meth:`app.engines.worker.WorkerReport.specduel_report`).
        spec: what was asked for.
        vllm: its version.
    """
    model, cache = _of(config, "model_config"), _of(config, "cache_config")
    scheduler, parallel = _of(config, "scheduler_config"), _of(config, "parallel_config")
    speculation = _of(config, "speculative_config")
    dtype = _of(model, "dtype")
    quantization = _of(model, "quantization")
    return {
        "model": spec.model,
        "method": _of(speculation, "method"),
        "num_speculative_tokens": _of(speculation, "num_speculative_tokens"),
        "dtype": str(dtype).removeprefix("torch.") if dtype is not None else None,
        "context_tokens": _of(model, "max_model_len"),
        "kv_tokens": kv_tokens(config),
        "max_sequences": _of(scheduler, "max_num_seqs"),
        "prefix_caching": _of(cache, "enable_prefix_caching"),
        "async_scheduling": _of(scheduler, "async_scheduling"),
        "chunked_prefill": _of(scheduler, "enable_chunked_prefill"),
        "runner": report.get("runner"),
        "execution": execution(config),
        "attention_backend": report.get("attention_backend"),
        "threads": report.get("threads"),
        "quantization": str(quantization) if quantization is not None else None,
        "tensor_parallel": _of(parallel, "tensor_parallel_size"),
        "rejection_sampler": report.get("rejection_sampler"),
        "vllm": vllm,
    }


def _of(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def kv_tokens(config: Any) -> int | None:
    """How many tokens the KV cache holds."""
    cache = _of(config, "cache_config")
    if (tokens := _of(cache, "kv_cache_size_tokens")) is not None:
        return int(tokens)
    blocks, size = _of(cache, "num_gpu_blocks"), _of(cache, "block_size")
    return int(blocks) * int(size) if blocks and size else None


def execution(config: Any) -> str | None:
    """ "eager", "compiled", or "cuda graphs"."""
    compilation = _of(config, "compilation_config")
    if compilation is None:
        return None
    if _of(_of(config, "model_config"), "enforce_eager"):
        return "eager"
    graphs = _of(compilation, "cudagraph_mode")
    if graphs is not None and _name(graphs) != "NONE" and _of(compilation, "cudagraph_capture_sizes"):
        return "cuda graphs"
    mode = _of(compilation, "mode")
    return "eager" if mode is None or _name(mode) in ("NONE", "0") else "compiled"


def _name(value: Any) -> str:
    return str(getattr(value, "name", value))
