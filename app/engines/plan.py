"""From a model pair and a machine to the two engines' settings. Pure: no vLLM, no torch, no processes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.engines.lane import LaneName
from app.engines.machine import Machine
from app.errors import PairError
from app.pairs.pair import ResolvedPair

# A demo's prompts and answers fit; a model's full context (131,072 tokens) would cost gigabytes of KV cache.
CONTEXT_TOKENS: Mapping[str, int] = {"cpu": 8192, "cuda": 16384}
# A prefill can be cancelled between two chunks only: on a CPU core a chunk must take well under a second.
CPU_PREFILL_CHUNK = 128
# One request at a time, and one more while a cancelled one leaves.
MAX_SEQUENCES = 2
# vLLM keeps one block unused, and looks ahead by the drafted tokens.
SPARE_BLOCKS = 4
BLOCK_TOKENS: Mapping[str, int] = {"cpu": 128, "cuda": 16}
# When the model's shape isn't known before vLLM reads it: enough for 16,384 tokens of an 8B model.
UNKNOWN_KV_BYTES: Mapping[str, int] = {"cpu": 1 << 30, "cuda": 4 << 30}
# vLLM wants this share of all memory free at start, though an explicit KV size makes it meaningless otherwise.
GPU_MEMORY_CHECK = 0.02

SEED = 0
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """One engine, ready to be started.

    ``engine_args`` are ``AsyncEngineArgs`` of vLLM; ``optional_args`` too, each left out by versions
    that don't know it. ``env`` is for the engine's processes. ``cores``: the CPU cores its threads are
    bound to (empty on a GPU). ``gpu``: the one GPU it sees, as CUDA_VISIBLE_DEVICES names it.
    Weight bytes are those of the checkpoints. ``warmups``: how often warm-up requests are repeated.
    """

    name: LaneName
    model: str
    kind: Literal["cpu", "cuda"]
    engine_args: Mapping[str, Any]
    optional_args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str | None] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    gpu: str | None = None
    target_weights_bytes: int | None = None
    draft_weights_bytes: int | None = None
    warmups: int = 1

    @property
    def speculates(self) -> bool:
        return self.engine_args.get("speculative_config") is not None


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model's config.json says about its KV cache. ``kv_values_per_token``: keys and values of all layers."""

    kv_values_per_token: int | None
    max_context: int | None
    dtype: str | None


def read_config(model: Path | str) -> Mapping[str, Any] | None:
    """The config.json in a model's folder; None for a repository that isn't here.

    Raises:
        PairError: the file can't be read as JSON.
    """
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise PairError(
            f"{path} is not JSON ({error}). The model's folder is damaged: fetch or build it again."
        ) from error
    if not isinstance(config, dict):
        raise PairError(f"{path} holds no JSON object. The model's folder is damaged: fetch or build it again.")
    return config


def shape_of(config: Mapping[str, Any] | None, *, layers: int | None = None) -> Shape:
    """The shape in a config.json; fields that it doesn't give, or gives in another way, are None."""
    if config is None:
        return Shape(None, None, None)
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or (hidden // heads if heads and hidden else None)
    depth = layers or text.get("num_hidden_layers")
    plain = "kv_lora_rank" not in text  # multi-head latent attention caches something else
    values = 2 * depth * kv_heads * head_dim if plain and depth and kv_heads and head_dim else None
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return Shape(values, text.get("max_position_embeddings"), str(dtype).removeprefix("torch.") if dtype else None)


def split_cores(cores: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cores for the baseline and the speculative lane: equal in number, the first left to the server from four up.

    A single core is shared.
    """
    if len(cores) < 2:
        return tuple(cores), tuple(cores)
    free = cores[1:] if len(cores) >= 4 else cores
    each = len(free) // 2
    return tuple(free[:each]), tuple(free[each : 2 * each])


def context_tokens(machine: Machine, overrides: Mapping[str, Any], target: Shape, draft: Shape) -> int:
    """Tokens of prompt and output together, for both lanes: what was asked for, but not more than either model has."""
    known = [shape.max_context for shape in (target, draft) if shape.max_context]
    return min([int(overrides.get("max_model_len") or CONTEXT_TOKENS[machine.kind]), *known])


def kv_bytes(machine: Machine, context: int, block: int, shapes: Sequence[Shape], dtypes: Sequence[str | None]) -> int:
    """Bytes of KV cache that hold one request of ``context`` tokens, target and draft together."""
    per_token = 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        size = DTYPE_BYTES.get(dtype or "")
        if shape.kv_values_per_token is None or size is None:
            return UNKNOWN_KV_BYTES[machine.kind]
        per_token += shape.kv_values_per_token * size
    blocks = -(-context // block) + SPARE_BLOCKS
    return blocks * block * per_token


def plan(resolved: ResolvedPair, machine: Machine, *, engine_logs: bool = False) -> tuple[LaneSpec, LaneSpec]:
    """The baseline's and the speculative lane's engine settings.

    The lanes differ in the speculation, in the KV cache's bytes (the draft's share comes on top, so that both hold
    the same number of tokens), and in the cores or the GPU they run on. The pair's ``engine`` settings go over
    these, then its ``baseline_engine`` and ``speculative_engine``.

    Raises:
        PairError: a model's config.json is damaged, or the method needs a draft and there is none.
    """
    pair = resolved.pair
    if pair.method != "ngram" and resolved.draft is None:
        raise PairError(
            f"The pair {pair.name!r} uses the method {pair.method!r}, which needs a draft. Add [draft] to it."
        )
    target = shape_of(read_config(resolved.target))
    draft_config = read_config(resolved.draft) if resolved.draft is not None else None
    # An EAGLE-3 head has one layer, whatever its config says about the target's.
    draft = shape_of(draft_config, layers=1 if pair.method == "eagle3" else None)
    common: dict[str, Any] = {
        "model": str(resolved.target),
        "seed": SEED,
        "max_num_seqs": MAX_SEQUENCES,
        "enable_prefix_caching": False,  # a repeated prompt would have no prefill, and no fair time to first token
        "disable_log_stats": True,
    }
    if machine.kind == "cpu":
        # Verifying five tokens costs 1.9 times one token in fp32, 3 times in bf16; compiling takes minutes.
        common |= {"dtype": "float32", "enforce_eager": True, "max_num_batched_tokens": CPU_PREFILL_CHUNK}
    else:
        common |= {"gpu_memory_utilization": GPU_MEMORY_CHECK}
    if resolved.pair.target.source == "hub" and pair.target.revision:
        common["revision"] = pair.target.revision
    common |= pair.engine

    context = context_tokens(machine, common, target, draft)
    common["max_model_len"] = context
    speculation: dict[str, Any] = {"method": pair.method, "num_speculative_tokens": pair.num_speculative_tokens}
    if resolved.draft is not None:
        speculation["model"] = str(resolved.draft)
        if pair.draft is not None and pair.draft.source == "hub" and pair.draft.revision:
            speculation["revision"] = pair.draft.revision
    speculation |= pair.speculative_config

    block = int(common.get("block_size") or BLOCK_TOKENS[machine.kind])
    dtype = _kv_dtype(common, target)
    has_draft = resolved.draft is not None
    budgets = {
        "baseline": kv_bytes(machine, context, block, [target], [dtype]),
        "speculative": kv_bytes(
            machine, context, block, [target, draft] if has_draft else [target], [dtype] * (1 + has_draft)
        ),
    }
    cores = dict(zip(("baseline", "speculative"), split_cores(machine.cores), strict=True))
    overrides = {"baseline": pair.baseline_engine, "speculative": pair.speculative_engine}
    single = int(common.get("tensor_parallel_size") or 1) == 1
    local = all(Path(str(model)).exists() for model in (resolved.target, resolved.draft) if model is not None)

    def spec(name: LaneName) -> LaneSpec:
        args = common | {"kv_cache_memory_bytes": budgets[name]}
        if "kv_cache_memory_bytes" in common:
            args["kv_cache_memory_bytes"] = common["kv_cache_memory_bytes"]
        args |= overrides[name]
        speculative = name == "speculative"
        if speculative:
            args.setdefault("speculative_config", speculation)
        gpu = None
        if machine.kind == "cuda" and machine.gpus and single:
            gpu = machine.gpus[1 if speculative and len(machine.gpus) > 1 else 0].visible
        return LaneSpec(
            name=name,
            model=pair.target.name if pair.target.source != "path" else Path(pair.target.name).name,
            kind=machine.kind,
            engine_args=args,
            optional_args={"per_request_spec_decode_metrics": "detailed"} if speculative else {},
            env=environment(machine, cores[name], gpu, local=local, engine_logs=engine_logs),
            cores=cores[name] if machine.kind == "cpu" else (),
            gpu=gpu,
            target_weights_bytes=resolved.target_weights_bytes,
            draft_weights_bytes=resolved.draft_weights_bytes if speculative else None,
            warmups=2 if machine.kind == "cuda" else 1,
        )

    return spec("baseline"), spec("speculative")


def _kv_dtype(args: Mapping[str, Any], target: Shape) -> str | None:
    """The dtype the KV cache will have; None when vLLM decides in a way that isn't known here."""
    if args.get("kv_cache_dtype") not in (None, "auto"):
        return str(args["kv_cache_dtype"])
    dtype = str(args.get("dtype") or "auto")
    if dtype != "auto":
        return dtype
    return "bfloat16" if target.dtype == "float32" else target.dtype


def environment(
    machine: Machine, cores: Sequence[int], gpu: str | None, *, local: bool, engine_logs: bool
) -> dict[str, str | None]:
    """Environment variables of an engine's processes; None for one that must not be set."""
    env: dict[str, str | None] = {
        # What goes wrong is told as the lane's error. The engine's log file has it all.
        "VLLM_LOGGING_LEVEL": "INFO" if engine_logs else "CRITICAL",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads can hang
        "TOKENIZERS_PARALLELISM": "false",
    }
    if local:
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if machine.kind == "cpu":
        env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores)) if cores else "nobind"
        env["VLLM_CPU_KVCACHE_SPACE"] = None  # it would override the explicit size
    if gpu is not None and len(machine.gpus) > 1:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    return env
