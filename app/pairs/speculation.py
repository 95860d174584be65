"""Which pair a server runs, and by which method its speculative lane speculates: chosen at start, changed later."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from app.pairs import catalogue, resolve
from app.pairs.pair import Pair, ResolvedPair


class Speculation:
    """A pair and the methods it can use.

    Args:
        base: the pair as its file says.
        cache_dir: where built models lie.
        device: where the engines run.
        pair: the pair as it is to run: ``base``, or an override of it.
    """

    def __init__(
        self, base: Pair, *, cache_dir: Path, device: Literal["cpu", "cuda"], pair: Pair | None = None
    ) -> None:
        self._base = base
        self._cache_dir = cache_dir
        self._device: Literal["cpu", "cuda"] = device
        self.pair = pair or base

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that the speculative lane can be switched to, the present one included."""
        return catalogue.methods(self._base)

    def resolve(self) -> ResolvedPair:
        """The present pair's models, found and checked.

        Raises:
            PairError: one is missing or damaged, or they don't fit.
        """
        return resolve.resolve(self.pair, cache_dir=self._cache_dir, device=self._device)

    def with_method(self, method: str | None, num_speculative_tokens: int | None) -> Speculation:
        """The same pair with another method or number of drafted tokens.

        Raises:
            PairError: the method is unknown or has no draft here, or the number is out of range.
        """
        pair = catalogue.override(self._base, method=method, num_speculative_tokens=num_speculative_tokens)
        return Speculation(self._base, cache_dir=self._cache_dir, device=self._device, pair=pair)

    def as_dict(self) -> dict[str, Any]:
        """The pair as ``GET /api/state`` and the records carry it."""
        pair = self.pair
        return {
            "name": pair.name,
            "title": pair.title,
            "target": pair.target.name,
            "draft": pair.draft.name if pair.draft else None,
            "method": pair.method,
            "num_speculative_tokens": pair.num_speculative_tokens,
            "stand_in": pair.stand_in,
            "notes": pair.notes,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class ScriptedSpeculation:
    """What stands for a pair where the lanes are scripted. It has one method, and no models."""

    num_speculative_tokens: int
    methods: tuple[str, ...] = ("scripted",)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": "scripted",
            "title": "Scripted lanes: no model runs, the figures mean nothing",
            "target": "scripted",
            "draft": "scripted",
            "method": "scripted",
            "num_speculative_tokens": self.num_speculative_tokens,
            "stand_in": False,
            "notes": "Scripted lanes follow a script instead of running a model.",
        }
