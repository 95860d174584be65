"""Templates and their contexts agree, and contexts say what they are given."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from jinja2 import Environment, FileSystemLoader, StrictUndefined, meta

from app import resources
from app.web import contexts

FOLDER = Path(resources.templates())
ENVIRONMENT = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
NAMES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.html"))
STATE = {
    "version": "1",
    "source": "live",
    "device": {"name": "GPU <0>", "kind": "cuda", "shared": True},
    "pair": {"title": "T", "target": "Big", "draft": None, "method": "ngram", "num_speculative_tokens": 4},
    "limits": {"context_tokens": 2048, "max_tokens": 512},
}
PROMPTS = [
    {
        "id": "b",
        "title": "Second group",
        "category": "poem",
        "group": "creative",
        "prompt": "\nA <b>poem</b>.",
        "expect": "low",
        "settings": {"temperature": 1.0, "top_p": 0.95, "max_tokens": 64, "seed": 0},
        "json_schema": None,
        "words": 2,
    },
    {
        "id": "a",
        "title": "First group",
        "category": "json",
        "group": "structured",
        "prompt": "JSON.",
        "expect": "high",
        "settings": {"temperature": 0, "top_p": 1, "max_tokens": 9, "seed": 7},
        "json_schema": {"type": "object"},
        "words": 1,
    },
]


def variables(name: str) -> set[str]:
    """What a template and those it includes take from their context."""
    tree = ENVIRONMENT.parse((FOLDER / name).read_text(encoding="utf-8"))
    own = meta.find_undeclared_variables(tree)
    return own.union(*(variables(other) for other in meta.find_referenced_templates(tree) if other))


def test_every_template_has_a_context() -> None:
    assert sorted(contexts.TEMPLATES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_template_and_context_agree(name: str) -> None:
    assert variables(name) == {field.name for field in dataclasses.fields(contexts.TEMPLATES[name])}


def test_the_page_renders_and_escapes() -> None:
    context = contexts.index_context(STATE, PROMPTS)
    page = ENVIRONMENT.get_template("index.html").render(contexts.as_context(context))
    assert "A &lt;b&gt;poem&lt;/b&gt;." in page
    assert "GPU &lt;0&gt;" in page
    assert "n-gram, 4 drafted a step" in page
    assert page.count('class="lane ') == 2
    assert " style=" not in page and "<style" not in page and " onclick" not in page


def test_a_page_without_prompts_renders() -> None:
    context = contexts.index_context(STATE, [])
    assert 'data-prompt-id=""' in ENVIRONMENT.get_template("index.html").render(contexts.as_context(context))


def test_groups_come_in_order_and_empty_ones_are_left_out() -> None:
    groups = contexts.prompt_groups(PROMPTS)
    assert [(group.key, [card.id for card in group.prompts]) for group in groups] == [
        ("structured", ["a"]),
        ("creative", ["b"]),
    ]
    library = ENVIRONMENT.get_template("_library.html").render(groups=groups)
    assert library.index("First group") < library.index("Second group")


def test_a_prompt_fills_the_form_with_texts() -> None:
    form = contexts.prompt_form(PROMPTS[0])
    assert (form.temperature, form.top_p, form.max_tokens, form.seed) == ("1", "0.95", "64", "0")
    assert contexts.prompt_form(PROMPTS[1]).json_schema == '{\n  "type": "object"\n}'


def test_settings_tell_what_differs_and_who_forces_it() -> None:
    rows = [
        {"setting": "kv_tokens", "baseline": 65536, "speculative": 65536, "differs": False, "forced_by": None},
        {"setting": "async_scheduling", "baseline": True, "speculative": False, "differs": True, "forced_by": "vLLM"},
        {"setting": "runner", "baseline": None, "speculative": "V1", "differs": True, "forced_by": None},
    ]
    context = contexts.settings_context({"equal": False, "rows": rows})
    assert (context.known, context.differences) == (True, 2)
    assert [(row.baseline, row.speculative) for row in context.rows] == [
        ("65,536", "65,536"),
        ("on", "off"),
        ("—", "V1"),
    ]
    shown = ENVIRONMENT.get_template("_settings.html").render(contexts.as_context(context))
    assert "differs, forced by vLLM" in shown
    assert "2 settings differ" in shown
    empty = ENVIRONMENT.get_template("_settings.html").render(contexts.as_context(contexts.settings_context(None)))
    assert "not told their settings yet" in empty
