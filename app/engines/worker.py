"""What only an engine's worker knows, read inside it: weights, KV cache, attention backend, threads.

vLLM mixes this class into its worker (``worker_extension_cls``) and calls it through ``collective_rpc``. Reads
are defensive: the V1 and V2 model runners, and versions of vLLM, name things differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

QUALIFIED_NAME = "app.engines.worker.WorkerReport"


class WorkerReport:
    """Methods added to vLLM's worker. Every key of the report is there; what can't be read is None."""

    def specduel_report(self) -> dict[str, Any]:
        """This worker's part of the engine: sizes in bytes, names as vLLM has them."""
        runner: Any = getattr(self, "model_runner", None)
        proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        config: Any = getattr(self, "vllm_config", None)
        cpu = getattr(getattr(self, "device", None), "type", None) == "cpu"
        seen: set[int] = set()
        target = _weight_bytes(getattr(runner, "model", None), seen)
        draft = _weight_bytes(getattr(proposer, "model", None), seen)
        layers = _kv_by_layer(config)
        names = _draft_layers(proposer)
        return {
            "runner": "V2" if getattr(self, "use_v2_model_runner", False) else "V1",
            "attention_backend": _attention_backend(runner, config),
            "threads": _threads() if cpu else None,
            "cpu": cpu,
            "target_weights_bytes": target,
            "draft_weights_bytes": draft,
            "kv_bytes": sum(layers.values()) if layers else None,
            "draft_kv_bytes": sum(size for name, size in layers.items() if name in names) if layers else None,
            "rejection_sampler": _rejection_sampler(cpu, config),
        }

    def specduel_ping(self) -> bool:
        """Answers when the engine is between two steps."""
        return True


def _rejection_sampler(cpu: bool, config: Any) -> str | None:
    if getattr(config, "speculative_config", None) is None:
        return None
    if not cpu:
        return "vLLM's"
    try:
        from app.engines import cpu_mend

        return cpu_mend.ensure()
    except (ImportError, AttributeError):  # another version, without the function that could be broken
        return "vLLM's"


def _weight_bytes(model: Any, seen: set[int]) -> int | None:
    """Bytes of a module's parameters and buffers that ``seen`` doesn't hold yet (a draft shares embeddings)."""
    if not hasattr(model, "parameters"):
        return None
    total = 0
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _tensors(value: Any) -> Iterator[Any]:
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _kv_by_layer(config: Any) -> dict[str, int]:
    """Bytes of KV cache by attention layer. Layers that share a storage share its bytes."""
    context = getattr(getattr(config, "compilation_config", None), "static_forward_context", None) or {}
    owners: dict[int, list[str]] = {}
    sizes: dict[int, int] = {}
    for name, layer in context.items():
        for tensor in _tensors(getattr(layer, "kv_cache", None)):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                owners.setdefault(storage.data_ptr(), []).append(name)
                sizes[storage.data_ptr()] = storage.nbytes()
    totals: dict[str, int] = {}
    for pointer, names in owners.items():
        for name in names:
            totals[name] = totals.get(name, 0) + sizes[pointer] // len(names)
    return totals


def _draft_layers(proposer: Any) -> frozenset[str]:
    for attribute in ("draft_attn_layer_names", "_draft_attn_layer_names", "attn_layer_names"):
        if names := getattr(proposer, attribute, None):
            return frozenset(names)
    return frozenset()


def _attention_backend(runner: Any, config: Any) -> str | None:
    context = getattr(getattr(config, "compilation_config", None), "static_forward_context", None) or {}
    for layer in context.values():
        backend: Any = getattr(layer, "attn_backend", None)
        if backend is None and hasattr(layer, "get_attn_backend"):
            backend = layer.get_attn_backend()
        if hasattr(backend, "get_name"):
            return str(backend.get_name())
    for groups in getattr(runner, "attn_groups", None) or ():
        for group in groups:
            backend = getattr(group, "backend", None)
            if hasattr(backend, "get_name"):
                return str(backend.get_name())
    return None


def _threads() -> int:
    import torch

    return int(torch.get_num_threads())
