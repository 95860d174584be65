"""Exact steps of the request that an engine is working on, from what the engine reports each iteration.

vLLM reports every iteration (one forward pass of the target) to a stat logger right after it has queued the
iteration's outputs, with no ``await`` between. So whoever wakes up with an output finds its iterations here. While
the reader lags, vLLM merges outputs; the iterations then say how to split them again. This counts on one request at
a time in an engine; where two overlapped, nothing is split.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.engines.lane import Step


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of the engine that yielded tokens.

    ``at_s``: when the server got it, on the monotonic clock. ``drafted``: draft tokens verified, ``accepted``: how
    many of them the target accepted.
    """

    at_s: float
    tokens: int
    accepted: int = 0
    drafted: int = 0


class Recorder:
    """Takes an engine's iterations. All on the event loop's thread.

    Holds at most what one request yields between two reads; idle, it holds nothing.
    """

    def __init__(self) -> None:
        self._iterations: deque[Iteration] = deque()
        self._open = 0
        self._mixed = False
        self.kv_usage: float | None = None

    @property
    def active(self) -> int:
        """How many requests are open."""
        return self._open

    def open(self) -> None:
        """A request begins."""
        if self._open == 0:
            self._iterations.clear()
            self._mixed = False
        else:
            self._mixed = True
        self._open += 1

    def close(self) -> None:
        """A request has ended."""
        self._open -= 1
        if self._open == 0:
            self._iterations.clear()

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """What vLLM's stat logger gets for an iteration; either can be None."""
        if scheduler_stats is not None:
            self.kv_usage = getattr(scheduler_stats, "kv_cache_usage", None)
        tokens = getattr(iteration_stats, "num_generation_tokens", 0)
        if not tokens or not self._open:
            return
        drafts = getattr(scheduler_stats, "spec_decoding_stats", None)
        self._iterations.append(
            Iteration(
                time.monotonic(),
                tokens,
                getattr(drafts, "num_accepted_tokens", 0),
                getattr(drafts, "num_draft_tokens", 0),
            )
        )

    def take(self, tokens: int) -> list[Iteration] | None:
        """The iterations that yielded the next ``tokens`` tokens; None when they don't add up to that."""
        if self._mixed:
            return None
        taken: list[Iteration] = []
        while self._iterations and sum(part.tokens for part in taken) < tokens:
            taken.append(self._iterations.popleft())
        return taken if taken and sum(part.tokens for part in taken) == tokens else None


def steps_of(
    ids: Sequence[int],
    text: str,
    pieces: Sequence[str] | None,
    iterations: Sequence[Iteration] | None,
    *,
    started_s: float,
    now_s: float,
) -> list[Step]:
    """The steps in one output of the engine.

    Args:
        ids: the output's token ids.
        text: its text.
        pieces: one text for each id, together ``text``; None when they are not known.
        iterations: the iterations that yielded ``ids``; None when they are not known. The output is then one
            step without counts, which reconciling can mend.
        started_s: when the request was handed to the engine, on the monotonic clock.
        now_s: when the output was read; the time of a step without an iteration.
    """
    if iterations is None:
        own = tuple(pieces) if pieces is not None else None
        return [Step((now_s - started_s) * 1e3, tuple(ids), text, 0, 0, own)]
    steps: list[Step] = []
    begin = 0
    for index, part in enumerate(iterations):
        end = begin + part.tokens
        own = tuple(pieces[begin:end]) if pieces is not None else None
        last = index == len(iterations) - 1
        shown = "".join(own) if own is not None else (text if last else "")
        steps.append(
            Step((part.at_s - started_s) * 1e3, tuple(ids[begin:end]), shown, part.accepted, part.drafted, own)
        )
        begin = end
    return steps


class Pieces:
    """The text of each single token of an output, as the engine's own incremental detokenizer makes it.

    For tokenizers of the ``tokenizers`` library, which vLLM detokenizes with the same stream. For others there are
    no pieces.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        self._backend = getattr(tokenizer, "_tokenizer", None)
        self._stream: Any = None
        if self._backend is not None:
            try:
                from tokenizers.decoders import DecodeStream

                self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=True)
            except (ImportError, TypeError):  # an older library
                self._backend = None

    def of(self, ids: Sequence[int], text: str, *, ends_in_stop: bool) -> list[str] | None:
        """One text for each id; None when they are not exactly ``text`` together.

        ``ends_in_stop``: the last id is the stop token, which has no text.
        """
        if self._stream is None:
            return None
        spoken = ids[:-1] if ends_in_stop else ids
        try:
            pieces = [self._stream.step(self._backend, token) or "" for token in spoken]
        except Exception:  # the library refuses some broken sequences: from here on there are no pieces
            self._stream = None
            return None
        if ends_in_stop:
            pieces.append("")
        return pieces if "".join(pieces) == text else None
