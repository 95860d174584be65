"""The tables of the model card, made from the measurements in ``docs/results``.

``python -m app.drafters card docs`` writes them into ``docs/drafters.md``, between its markers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.errors import PairError

CARD = "drafters.md"
CPU_RESULTS = "results/drafters-cpu.json"
TRAINING = "results/drafters-training.json"
NAMES = {"eagle3": "EAGLE-3 head", "draft_model": "draft model"}


TIMES = "\N{MULTIPLICATION SIGN}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def tokens_per_step(runs: Sequence[Mapping[str, Any]]) -> float:
    """Σ tokens / Σ steps of the decode phase."""
    tokens: int = sum(run["tokens"] - run["first_tokens"] for run in runs)
    steps: int = sum(run["decode_steps"] for run in runs)
    return tokens / steps


def acceptance(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Acceptance by position, unconditional: Σ drafts accepted up to there / Σ drafts."""
    drafts = sum(run["drafts"] for run in runs)
    return [sum(counts) / drafts for counts in zip(*(run["accepted_at"] for run in runs), strict=True)]


def speedups(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Decode speed-up of each prompt that was measured with its baseline, one right after the other."""

    def rate(run: Mapping[str, Any]) -> float:
        return float((run["tokens"] - run["first_tokens"]) / run["decode_ms"])

    return [rate(run) / rate(run["baseline"]) for run in runs if run.get("baseline")]


def grouped(runs: Iterable[Mapping[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Runs by the values of ``keys``, in order of appearance."""
    result: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for run in runs:
        result.setdefault(tuple(run[key] for key in keys), []).append(run)
    return result


def summary_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """One row for each drafter, k, kind of prompt and temperature."""
    rows = []
    for (method, k, group, temperature), members in grouped(runs, "method", "k", "group", "temperature").items():
        ratios = speedups(members)
        ratio = "not measured"
        if ratios:
            ratio = f"{statistics.median(ratios):.2f}{TIMES} ({min(ratios):.2f} to {max(ratios):.2f})"
        by_position = " / ".join(f"{x:.2f}" for x in acceptance(members))
        row = [NAMES[method], str(k), group, f"{temperature:g}", str(len(members)), f"{tokens_per_step(members):.2f}"]
        rows.append((*row, by_position, ratio))
    return table(
        ("drafter", "k", "prompts", "T", "number", "tokens per step", "acceptance by position", "decode speed-up"), rows
    )


def category_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Tokens per step by category at k = 3."""
    chosen = [run for run in runs if run["k"] == 3]
    methods = list(dict.fromkeys(run["method"] for run in chosen))
    rows = []
    for (category, temperature), members in grouped(chosen, "category", "temperature").items():
        cells = []
        for method in methods:
            own = [run for run in members if run["method"] == method]
            cells.append(f"{tokens_per_step(own):.2f}" if own else "not measured")
        rows.append((category.replace("_", " "), f"{temperature:g}", *cells))
    return table(("category", "T", *(NAMES[method] for method in methods)), rows)


def curve_table(training: Mapping[str, Any]) -> str:
    """The validation curve of both trainings, thinned."""
    rows = []
    for kind, name in NAMES.items():
        points = training["curves"][kind]
        for point in [p for i, p in enumerate(points) if i % 3 == 0 or i == len(points) - 1]:
            when = [f"{point['seconds']:.0f}", str(point["iteration"]), f"{point['epoch']:.2f}"]
            what = [f"{point['validation_loss']:.3f}", f"{point['structured']:.2f}", f"{point['other']:.2f}"]
            rows.append((name, *when, *what))
    head = ("drafter", "s", "iterations", "epochs", "validation loss, nats", "structured, T = 0", "other, T = 0")
    return table(head, rows)


def validation_table(training: Mapping[str, Any]) -> str:
    """The final validation by temperature at each k, on made-up prompts that were held back."""
    rows = []
    for kind, name in NAMES.items():
        for temperature, groups in training["final"][kind].items():
            for group in ("structured", "other"):
                cells = [f"{groups[group][f'k={k}']['tokens_per_step']:.2f}" for k in (2, 3, 4, 5)]
                rows.append((name, temperature.replace("=", " = "), group, *cells))
    return table(("drafter", "text sampled at", "prompts", "k = 2", "k = 3", "k = 4", "k = 5"), rows)


def render(text: str, docs: Path) -> str:
    """The card with its tables made anew.

    Raises:
        PairError: a marker is missing from the card.
    """
    cpu = json.loads((docs / CPU_RESULTS).read_text(encoding="utf-8"))
    training = json.loads((docs / TRAINING).read_text(encoding="utf-8"))
    tables = {
        "summary": summary_table(cpu["runs"]),
        "categories": category_table(cpu["runs"]),
        "curve": curve_table(training),
        "validation": validation_table(training),
    }
    for name, content in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise PairError(f"The card lacks the marker {begin.strip()} or {end}. Put them back around the table.")
        text = f"{head}{begin}\n{content}\n\n{end}{tail}"
    return text


def write(docs: Path) -> None:
    """Make the tables of ``docs/drafters.md`` anew."""
    path = docs / CARD
    path.write_text(render(path.read_text(encoding="utf-8"), docs), encoding="utf-8")
