"""What a model pair is. Pure data: reading it from a file is catalogue.py's, fetching models resolve.py's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Method = Literal["ngram", "draft_model", "eagle3"]
METHODS: tuple[Method, ...] = ("ngram", "draft_model", "eagle3")


@dataclass(frozen=True, slots=True)
class ModelRef:
    """Where a model comes from: ``built`` by specduel on this machine, a ``path``, or a ``hub`` repository.

    ``name`` is the builder's name ("embedded", "stand-in"), the path, or the repository id.
    """

    source: Literal["built", "path", "hub"]
    name: str
    revision: str | None = None
    licence_url: str | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A model pair, as its TOML file says.

    ``engine`` are vLLM engine arguments of both lanes; ``baseline_engine`` and ``speculative_engine``
    are added on top for one lane. ``speculative_config`` is vLLM's, without method, model and
    num_speculative_tokens, which stand here as fields.
    """

    name: str
    title: str
    target: ModelRef
    method: Method
    num_speculative_tokens: int
    draft: ModelRef | None = None
    devices: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
    stand_in: bool = False
    notes: str = ""
    engine: Mapping[str, Any] = field(default_factory=dict)
    baseline_engine: Mapping[str, Any] = field(default_factory=dict)
    speculative_engine: Mapping[str, Any] = field(default_factory=dict)
    speculative_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResolvedPair:
    """A pair whose models lie on this machine (or are vLLM's to fetch from a hub).

    ``target`` and ``draft`` are folders, or repository ids. The byte counts are those of the
    checkpoints' weights in the engine's dtype, read from the safetensors headers; None when the
    files aren't here yet.
    """

    pair: Pair
    target: Path | str
    draft: Path | str | None = None
    target_weights_bytes: int | None = None
    draft_weights_bytes: int | None = None
