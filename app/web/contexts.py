"""What each template is given: one frozen dataclass a template, and the plain data they are made of.

``TEMPLATES`` names the dataclass of every file in ``templates/``; a test holds that a template uses
exactly the fields of its dataclass, those of the partials it includes among them.
"""

# ruff: noqa: RUF001  (the texts of the page use real minus and multiplication signs)

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Term:
    """A figure of the page: what its label says, how it is computed, and what it tells.

    ``key`` is the metric's name in the HTTP contract, or the page's own where there is none.
    """

    key: str
    label: str
    formula: str
    meaning: str


TERMS: tuple[Term, ...] = (
    Term(
        "decode_tok_s",
        "tok/s",
        "(tokens − tokens of the first step) ÷ (time of the last step − time of the first)",
        "Decode speed of the lane. While it runs: the last 2 seconds. Afterwards: the whole decode phase.",
    ),
    Term(
        "ttft_ms",
        "TTFT, server",
        "from handing the request to the engine until its first tokens arrive",
        "Time to first token, on the server's clock: mostly prefill.",
    ),
    Term(
        "ttft_browser_ms",
        "TTFT, browser",
        "from Run (in turn, the second lane: from its start) until this page has written its first token",
        "Time to first token as this browser saw it, network and page included. None for a viewer who joined later.",
    ),
    Term(
        "acceptance_rate",
        "accepted",
        "Σ accepted drafts ÷ Σ drafted tokens",
        "How many of the drafted tokens the target kept. None while nothing was drafted.",
    ),
    Term(
        "tokens_per_step",
        "tokens/step",
        "(tokens − tokens of the first step) ÷ decode steps",
        "How many tokens one verify pass of the target yields, its own token included. 1 without speculation.",
    ),
    Term("output_tokens", "tokens", "token ids counted, never events or words", "Output tokens so far."),
    Term(
        "total_ms",
        "elapsed",
        "from handing the request to the engine until its last tokens arrive",
        "Time of this lane's request, prefill included. It freezes when the lane ends.",
    ),
    Term(
        "decode_speedup",
        "Speed-up",
        "tok/s speculative ÷ tok/s baseline = tokens per step ÷ cost per step",
        "Below 1× speculation is slower. Fair only when each lane had the device for itself: "
        "in turn, or on devices of their own.",
    ),
    Term(
        "step_cost_ratio",
        "cost per step",
        "mean decode step time, speculative ÷ baseline, each lane alone",
        "What drafting and verifying add to one step. Also the tokens per step at which speculation breaks even.",
    ),
    Term(
        "acceptance_by_position",
        "Acceptance by position",
        "drafts whose first i tokens were all accepted ÷ drafts",
        "How far into a draft the target still agrees.",
    ),
    Term(
        "memory_tax",
        "Memory tax",
        "bytes of the speculative lane − bytes of the baseline lane",
        "What speculation costs in memory: draft weights, the draft's share of the KV cache, and the rest.",
    ),
)


@dataclass(frozen=True, slots=True)
class LaneView:
    """A lane's fixed texts: its name in the contract, its title, and how it decodes."""

    name: str
    title: str
    how: str


@dataclass(frozen=True, slots=True)
class PairView:
    """The model pair as the header names it. ``draft`` is None for drafts without a model."""

    title: str
    target: str
    draft: str | None
    method: str
    stand_in: bool
    notes: str


@dataclass(frozen=True, slots=True)
class Limits:
    """What the form may ask for; the server checks, these are hints."""

    context_tokens: int | None
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class PromptForm:
    """The fields that picking a prompt fills in. Numbers are texts: an input keeps what was typed.

    ``json_schema`` is the schema as indented JSON, or an empty text.
    """

    prompt_id: str
    title: str
    expect: str
    prompt: str
    temperature: str
    top_p: str
    max_tokens: str
    seed: str
    json_schema: str


@dataclass(frozen=True, slots=True)
class PromptCard:
    """One prompt in the library dialog."""

    id: str
    title: str
    category: str
    expect: str
    words: int
    settings: str
    structured: bool


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """The prompts of one group, in the library's order."""

    key: str
    title: str
    note: str
    prompts: tuple[PromptCard, ...]


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One engine setting of both lanes. ``forced_by`` says who forces a difference, if anyone."""

    setting: str
    baseline: str
    speculative: str
    differs: bool
    forced_by: str | None


@dataclass(frozen=True, slots=True)
class MethodOption:
    """A method that the speculative lane can be switched to."""

    key: str
    label: str
    note: str
    current: bool


@dataclass(frozen=True, slots=True)
class IndexContext:
    """``index.html``: the page, the partials it includes among it."""

    version: str
    source: str
    device: str
    pair: PairView
    lanes: tuple[LaneView, ...]
    form: PromptForm
    limits: Limits
    terms: Mapping[str, Term]
    method_names: Mapping[str, str]
    switchable: bool


@dataclass(frozen=True, slots=True)
class HelpContext:
    """``_help.html``: the help dialog's body."""

    terms: Mapping[str, Term]


@dataclass(frozen=True, slots=True)
class PromptFormContext:
    """``_prompt_form.html``: the fields of the run form that depend on the picked prompt."""

    form: PromptForm
    limits: Limits


@dataclass(frozen=True, slots=True)
class LibraryContext:
    """``_library.html``: the prompt library dialog's body."""

    groups: tuple[PromptGroup, ...]


@dataclass(frozen=True, slots=True)
class SettingsContext:
    """``_settings.html``: both lanes' resolved engine settings, side by side."""

    known: bool
    differences: int
    rows: tuple[SettingRow, ...]


@dataclass(frozen=True, slots=True)
class MethodContext:
    """``_method.html``: the dialog that switches the speculative lane's method."""

    options: tuple[MethodOption, ...]
    num_speculative_tokens: int


@dataclass(frozen=True, slots=True)
class MacroContext:
    """Files of macros only: everything comes in through arguments."""


Context = (
    IndexContext | HelpContext | PromptFormContext | LibraryContext | SettingsContext | MethodContext | MacroContext
)

TEMPLATES: Mapping[str, type[Context]] = MappingProxyType(
    {
        "index.html": IndexContext,
        "_help.html": HelpContext,
        "_library.html": LibraryContext,
        "_macros.html": MacroContext,
        "_method.html": MethodContext,
        "_prompt_form.html": PromptFormContext,
        "_settings.html": SettingsContext,
    }
)

METHOD_NAMES: Mapping[str, str] = MappingProxyType(
    {"ngram": "n-gram", "draft_model": "draft model", "eagle3": "EAGLE-3", "scripted": "scripted"}
)

METHOD_NOTES: Mapping[str, str] = MappingProxyType(
    {
        "ngram": "looks the next tokens up in the text so far. No second model.",
        "draft_model": "a small model of its own guesses ahead.",
        "eagle3": "a one-layer head guesses ahead from the target's own hidden states.",
    }
)

GROUPS: tuple[tuple[str, str, str], ...] = (
    ("structured", "Structured", "Predictable text: drafts are often right."),
    ("creative", "Creative", "Many good next words: drafts are often wrong."),
    ("prefill", "Prefill-heavy", "Long input, short output: decoding is a small share of the time."),
)

BLANK_FORM = PromptForm("", "Own prompt", "", "", "0", "1", "128", "0", "")


def as_context(context: Context) -> dict[str, Any]:
    """The context as a template takes it: field by field, nested dataclasses left as they are."""
    return {f.name: getattr(context, f.name) for f in fields(context)}


def terms_by_key() -> Mapping[str, Term]:
    return {term.key: term for term in TERMS}


def index_context(state: Json, prompts: Iterable[Json]) -> IndexContext:
    """The page, from the JSON of ``GET /api/state`` and the prompts of ``GET /api/prompts``."""
    pair = pair_view(state["pair"])
    first = next(iter(prompts), None)
    return IndexContext(
        version=str(state["version"]),
        source=str(state["source"]),
        device=str(state["device"]["name"]),
        pair=pair,
        lanes=(
            LaneView("baseline", "Baseline", "one token a step"),
            LaneView("speculative", "Speculative", pair.method),
        ),
        form=BLANK_FORM if first is None else prompt_form(first),
        limits=limits(state),
        terms=terms_by_key(),
        method_names=dict(METHOD_NAMES),
        switchable=str(state["source"]) == "live",
    )


def method_context(pair: Json) -> MethodContext:
    """The methods to choose from, from ``pair`` of ``GET /api/state``."""
    return MethodContext(
        options=tuple(
            MethodOption(
                key=str(method),
                label=METHOD_NAMES.get(str(method), str(method)),
                note=METHOD_NOTES.get(str(method), ""),
                current=method == pair["method"],
            )
            for method in pair.get("methods", ())
        ),
        num_speculative_tokens=int(pair["num_speculative_tokens"]),
    )


def pair_view(pair: Json) -> PairView:
    method = METHOD_NAMES.get(str(pair["method"]), str(pair["method"]))
    drafted = pair.get("num_speculative_tokens")
    return PairView(
        title=str(pair["title"]),
        target=str(pair["target"]),
        draft=str(pair["draft"]) if pair.get("draft") else None,
        method=f"{method}, {drafted} drafted a step" if drafted else method,
        stand_in=bool(pair.get("stand_in")),
        notes=str(pair.get("notes") or ""),
    )


def limits(state: Json) -> Limits:
    values = state.get("limits") or {}
    return Limits(context_tokens=values.get("context_tokens"), max_tokens=values.get("max_tokens"))


def prompt_form(prompt: Json) -> PromptForm:
    """The form as one prompt of the library fills it."""
    settings = prompt.get("settings") or {}
    schema = prompt.get("json_schema")
    return PromptForm(
        prompt_id=str(prompt["id"]),
        title=str(prompt["title"]),
        expect=str(prompt.get("expect") or ""),
        prompt=str(prompt["prompt"]),
        temperature=_number(settings.get("temperature"), BLANK_FORM.temperature),
        top_p=_number(settings.get("top_p"), BLANK_FORM.top_p),
        max_tokens=_number(settings.get("max_tokens"), BLANK_FORM.max_tokens),
        seed=_number(settings.get("seed"), BLANK_FORM.seed),
        json_schema="" if schema is None else json.dumps(schema, indent=2, ensure_ascii=False),
    )


def prompt_groups(prompts: Iterable[Json]) -> tuple[PromptGroup, ...]:
    """The library by group, in the order structured, creative, prefill; empty groups left out."""
    cards: dict[str, list[PromptCard]] = {key: [] for key, _, _ in GROUPS}
    for prompt in prompts:
        form = prompt_form(prompt)
        cards.setdefault(str(prompt["group"]), []).append(
            PromptCard(
                id=form.prompt_id,
                title=form.title,
                category=str(prompt.get("category") or "").replace("_", " "),
                expect=form.expect,
                words=int(prompt.get("words") or 0),
                settings=f"T {form.temperature}, {form.max_tokens} tokens",
                structured=bool(form.json_schema),
            )
        )
    return tuple(PromptGroup(key, title, note, tuple(cards[key])) for key, title, note in GROUPS if cards[key])


def settings_context(fairness: Json | None) -> SettingsContext:
    """The settings table, from ``fairness`` of ``GET /api/state``."""
    rows = tuple(
        SettingRow(
            setting=str(row["setting"]).replace("_", " "),
            baseline=_value(row.get("baseline")),
            speculative=_value(row.get("speculative")),
            differs=bool(row.get("differs")),
            forced_by=row.get("forced_by"),
        )
        for row in (fairness or {}).get("rows", ())
    )
    return SettingsContext(known=bool(rows), differences=sum(row.differs for row in rows), rows=rows)


def _number(value: Any, default: str) -> str:
    return default if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _value(value: Any) -> str:
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)
