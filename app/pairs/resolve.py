"""From a pair to models that can be loaded: found, whole, and fitting each other.

Everything that can be told from small files is told here, in one line, before an engine starts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from app.errors import PairError
from app.pairs import builders, hub
from app.pairs.checkpoint import read_config, weight_files, weights_bytes
from app.pairs.compatibility import Model, check_draft_model, check_eagle3
from app.pairs.pair import ModelRef, Pair, ResolvedPair

Device = Literal["cpu", "cuda"]


def resolve(pair: Pair, *, cache_dir: Path, device: Device) -> ResolvedPair:
    """Find a pair's models, check them, and check that they fit each other.

    Built models must be there already (:func:`build`); a hub's are taken from the local cache, or left to vLLM to
    fetch once their small files have shown that they can be had and fit.

    Args:
        pair: what to run.
        cache_dir: where built models lie.
        device: where the engines will run; decides the weights' dtype.

    Raises:
        PairError: the device isn't one of the pair's, a model is missing, damaged, gated or unknown, a draft doesn't
            fit its target, or an engine argument is unknown. One line, with what to do.
    """
    check_device(pair, device)
    check_engine_arguments(pair)
    target, target_folder = _locate(pair.target, cache_dir)
    draft, draft_folder = _locate(pair.draft, cache_dir) if pair.draft is not None else (None, None)
    if pair.draft is not None and draft_folder is not None:
        check = check_eagle3 if pair.method == "eagle3" else check_draft_model
        check(Model(pair.target.name, target_folder), Model(pair.draft.name, draft_folder))
    dtype = engine_dtype(pair, read_config(target_folder), device)
    return ResolvedPair(
        pair=pair,
        target=target,
        draft=draft,
        target_weights_bytes=weights_bytes(target_folder, dtype) if isinstance(target, Path) else None,
        draft_weights_bytes=weights_bytes(draft_folder, dtype) if isinstance(draft, Path) and draft_folder else None,
    )


def built_models(pair: Pair) -> Iterator[str]:
    """The names of the models that have to be built before a pair can be resolved."""
    for ref in (pair.target, pair.draft):
        if ref is not None and ref.source == "built":
            yield ref.name


def check_device(pair: Pair, device: Device) -> None:
    """Check that a pair runs on this kind of device.

    Raises:
        PairError: it doesn't.
    """
    if device not in pair.devices:
        here = "an NVIDIA GPU" if device == "cuda" else "the CPU"
        needs = "an NVIDIA GPU and vLLM's CUDA build" if pair.devices == ("cuda",) else "the CPU"
        raise PairError(f"The pair {pair.name!r} needs {needs}; the engines here run on {here}. Use --pair embedded.")


def check_engine_arguments(pair: Pair) -> None:
    """Check the names of a pair's engine arguments against the installed vLLM, without importing it.

    Raises:
        PairError: one is unknown; with the nearest known one.
    """
    places = (
        ("engine", pair.engine, "EngineArgs", "engine/arg_utils.py"),
        ("baseline_engine", pair.baseline_engine, "EngineArgs", "engine/arg_utils.py"),
        ("speculative_engine", pair.speculative_engine, "EngineArgs", "engine/arg_utils.py"),
        ("speculative_config", pair.speculative_config, "SpeculativeConfig", "config/speculative.py"),
    )
    for table, given, class_name, file in places:
        if not given or not (known := _fields(class_name, file)):
            continue
        for key in given:
            if key not in known:
                nearest = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.5)
                hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
                raise PairError(f"The pair {pair.name!r}: {table}.{key} is no argument of the installed vLLM.{hint}")


def engine_dtype(pair: Pair, config: Mapping[str, Any], device: Device) -> str:
    """The dtype in which the engine holds the weights: the pair's, or vLLM's choice for "auto".

    On the CPU float32 is the default; elsewhere the checkpoint's dtype, but bfloat16 for float32 checkpoints.
    """
    dtype = str(pair.engine.get("dtype", "float32" if device == "cpu" else "auto"))
    if dtype != "auto":
        return dtype
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return "bfloat16" if stored == "float32" else stored


def _locate(ref: ModelRef, cache_dir: Path) -> tuple[Path | str, Path]:
    """What vLLM is to load, and the folder with at least the model's small files."""
    match ref.source:
        case "built":
            builder = builders.builder(ref.name)
            folder = builder.path(cache_dir)
            builder.check(folder)
            return folder, folder
        case "path":
            folder = Path(ref.name)
            if not folder.is_dir():
                raise PairError(f"The model folder {folder} isn't there. Check the path in the pair's file.")
            if not weight_files(folder) and not any(folder.glob("*.bin")):
                raise PairError(
                    f"The model folder {folder} has no *.safetensors file. Check the path in the pair's file."
                )
            return folder, folder
        case "hub":
            whole = hub.cached(ref)
            return (whole, whole) if whole is not None else (ref.name, hub.small_files(ref))


def _fields(class_name: str, file: str) -> frozenset[str]:
    """The annotated fields of one of vLLM's classes, from its source; empty where vLLM isn't installed.

    Importing vLLM for the names would take ten seconds, parsing the file one.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    try:
        source = (Path(spec.origin).parent / file).read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    body = re.search(rf"^class {class_name}\b.*?(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL)
    # Fields stand at the class's own indentation; what methods annotate stands deeper.
    return frozenset(re.findall(r"^    ([a-z_][a-z0-9_]*): ", body.group(), re.MULTILINE)) if body else frozenset()
