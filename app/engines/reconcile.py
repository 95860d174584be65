"""Bring the live steps of a generation together with the engine's own counts for the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.engines.lane import Step


@dataclass(frozen=True, slots=True)
class Reconciled:
    """``steps`` replaces the live steps (None: they stand). ``agree``: they agree with the engine, or were made to."""

    steps: tuple[Step, ...] | None
    agree: bool
    note: str | None = None


def reconcile(
    live: Sequence[Step], accepted: Sequence[int], drafted: Sequence[int], *, unsplit: frozenset[int] = frozenset()
) -> Reconciled:
    """Compare the live steps with the engine's counts, and correct the steps where that has one answer.

    Args:
        live: the steps as they came, the prefill's first.
        accepted: accepted drafts of each verify pass that had drafts, in order
            (vLLM's ``RequestSpecDecodeMetrics.per_step_accepted``).
        drafted: drafted tokens of the same passes (``per_step_drafted``).
        unsplit: indices into ``live`` of steps that came without counts, and can hold several passes.

    Returns:
        Steps with the same ids and the same text. A pass yields its accepted drafts and one token; the last one can
        be cut short by the end of the sequence or the token budget. Passes without drafts are not in the engine's
        lists, so an unsplit step can be split only where all its tokens belong to passes with drafts.
    """
    if len(accepted) != len(drafted):
        return Reconciled(None, False, f"the engine lists {len(accepted)} accepted and {len(drafted)} drafted counts")
    engine = [(hit, made) for hit, made in zip(accepted, drafted, strict=True) if made]
    seen = [(step.accepted, step.drafted) for step in live if step.drafted]
    if not unsplit and seen == engine and all(map(_whole, live[:-1])):
        return Reconciled(None, True)
    rebuilt = _rebuild(live, engine, unsplit)
    if rebuilt is not None:
        return Reconciled(tuple(rebuilt), True, "steps that arrived merged were split by the engine's counts")
    return Reconciled(
        None, False, f"live: {len(seen)} steps with drafts, {_sums(seen)}; the engine: {len(engine)}, {_sums(engine)}"
    )


def _sums(pairs: Sequence[tuple[int, int]]) -> str:
    return f"{sum(hit for hit, _ in pairs)} of {sum(made for _, made in pairs)} accepted"


def _whole(step: Step) -> bool:
    """One verify pass that was not cut short."""
    return len(step.ids) == step.accepted + 1


def _rebuild(live: Sequence[Step], engine: Sequence[tuple[int, int]], unsplit: frozenset[int]) -> list[Step] | None:
    """The steps by the engine's counts; None where the two don't add up."""
    rest = list(engine)
    steps: list[Step] = []
    for index, step in enumerate(live):
        last = index == len(live) - 1
        if index in unsplit:
            if index == 0:  # the prefill's own token comes before any draft
                head, step = _cut(step, 1)
                steps.append(head)
            parts = _split(step, rest, last=last)
            if parts is None:
                return None
            steps.extend(parts)
            continue
        if step.drafted and (not rest or rest.pop(0) != (step.accepted, step.drafted)):
            return None
        if not _whole(step) and not last:
            return None
        steps.append(step)
    return None if rest else steps


def _split(step: Step, rest: list[tuple[int, int]], *, last: bool) -> list[Step] | None:
    """Split a step without counts into the engine's next passes, which are taken off ``rest``."""
    parts: list[Step] = []
    while step.ids:
        if not rest:
            return None
        hit, made = rest.pop(0)
        if hit + 1 > len(step.ids) and not last:
            return None
        head, step = _cut(step, hit + 1)
        parts.append(replace(head, accepted=hit, drafted=made))
    if step.text and parts:
        parts[-1] = replace(parts[-1], text=parts[-1].text + step.text)
    return parts


def _cut(step: Step, tokens: int) -> tuple[Step, Step]:
    """The first ``tokens`` ids of a step, and the rest. Text that can't be told apart stays with the rest."""
    if step.pieces is None:
        return replace(step, ids=step.ids[:tokens], text=""), replace(step, ids=step.ids[tokens:])
    head, tail = step.pieces[:tokens], step.pieces[tokens:]
    return (
        replace(step, ids=step.ids[:tokens], text="".join(head), pieces=head),
        replace(step, ids=step.ids[tokens:], text="".join(tail), pieces=tail),
    )
