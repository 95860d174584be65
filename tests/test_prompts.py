"""The prompt library: what ships, and what the loader refuses."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from app import prompts, resources
from app.errors import BadRequestError, StartError
from app.pairs import cache, embedded

SHIPPED = prompts.load(resources.prompts())
IDS = [prompt.id for prompt in SHIPPED]

CATEGORIES = {
    "structured": {"json": 3, "sql": 2, "code": 2, "code_editing": 2, "table": 1, "extraction": 2},
    "creative": {"poem": 1, "story": 1, "brainstorm": 1, "roleplay": 1},
    "prefill": {"question_answering": 1, "summary": 1, "retrieval": 1},
}
# Markers of turns and special tokens in the chat templates of Llama, Qwen, Mistral, Gemma, SmolLM and older formats.
SPECIAL = re.compile(
    r"<\|[^|\n]*\|>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>|<bos>|<eos>|<unk>|<pad>|</?think>"
)
# What vLLM's structured-output backends all implement.
SCHEMA_KEYWORDS = {
    "$schema", "type", "properties", "required", "additionalProperties", "items", "enum",
    "minItems", "maxItems", "maxLength", "minimum", "maximum",
}  # fmt: skip

GOOD = """\
---
id: {id}
title: A good one
category: json
group: structured
expect: High acceptance.
settings: {{temperature: 0, top_p: 1, max_tokens: 64, seed: 0}}
---
Write some JSON.
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "good")
    return tmp_path


def write(folder: Path, stem: str, text: str = GOOD, *, change: tuple[str, str] = ("", "")) -> Path:
    path = folder / f"{stem}.md"
    text = text.replace("{id}", stem).replace("{{", "{").replace("}}", "}")
    assert change[0] in text
    path.write_text(text.replace(*change, 1) if change[0] else text, encoding="utf-8")
    return path


def refusal(folder: Path, **kwargs: Any) -> str:
    with pytest.raises(StartError) as caught:
        prompts.load(folder, **kwargs)
    return caught.value.message


def objects(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas in it."""
    yield schema
    for child in (*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])):
        yield from objects(child)


# What ships


def test_there_are_prompts_of_every_kind() -> None:
    counts: Counter[tuple[str, str]] = Counter((prompt.group, prompt.category) for prompt in SHIPPED)
    assert len(SHIPPED) >= 20
    for group, categories in CATEGORIES.items():
        for category, least in categories.items():
            assert counts[group, category] >= least, category
    assert {category for _, category in counts} == set(prompts.CATEGORIES)
    assert sum(counts["prefill", category] for category in CATEGORIES["prefill"]) >= 3


def test_enough_of_them_carry_a_schema() -> None:
    counts = Counter(prompt.category for prompt in SHIPPED if prompt.json_schema is not None)
    assert counts["json"] >= 2
    assert counts["extraction"] >= 1


def test_they_are_sorted_by_group_category_id() -> None:
    keys = [(prompts.GROUPS.index(p.group), prompts.CATEGORIES.index(p.category), p.id) for p in SHIPPED]
    assert keys == sorted(keys)
    assert len(set(IDS)) == len(IDS)


@pytest.mark.parametrize("prompt", SHIPPED.prompts, ids=IDS)
def test_settings_suit_the_group(prompt: prompts.Prompt) -> None:
    settings = prompt.settings
    assert 0 <= settings.temperature <= 2
    assert 0 < settings.top_p <= 1
    assert 0 <= settings.seed < 2**32
    least, most = (32, 64) if prompt.group == "prefill" else (96, 192)
    assert least <= settings.max_tokens <= most
    if prompt.group != "creative":
        assert settings.temperature == 0


@pytest.mark.parametrize("category", CATEGORIES["creative"])
def test_each_creative_category_has_a_hot_prompt(category: str) -> None:
    assert any(0.9 <= p.settings.temperature <= 1.0 for p in SHIPPED if p.category == category)


@pytest.mark.parametrize("prompt", SHIPPED.prompts, ids=IDS)
def test_no_prompt_holds_special_tokens(prompt: prompts.Prompt) -> None:
    assert not SPECIAL.search(prompt.prompt)


@pytest.mark.parametrize("prompt", SHIPPED.prompts, ids=IDS)
def test_the_expectation_is_one_readable_line(prompt: prompts.Prompt) -> None:
    assert 40 <= len(prompt.expect) <= 200
    assert prompt.expect.endswith(".")
    assert len(prompt.title) <= 48


@pytest.mark.parametrize("prompt", [p for p in SHIPPED if p.json_schema], ids=lambda p: p.id)
def test_schemas_leave_no_room_to_wander(prompt: prompts.Prompt) -> None:
    assert prompt.json_schema is not None
    for schema in objects(prompt.json_schema):
        assert set(schema) <= SCHEMA_KEYWORDS
        if schema["type"] == "object":
            assert schema["additionalProperties"] is False
            assert set(schema["required"]) == set(schema["properties"])
        elif schema["type"] == "array":
            assert schema["maxItems"] <= 8
        elif schema["type"] == "string":
            assert "enum" in schema or schema["maxLength"] <= 80


@pytest.mark.parametrize("prompt", [p for p in SHIPPED if p.group == "prefill"], ids=lambda p: p.id)
def test_long_prompts_repeat_no_paragraph(prompt: prompts.Prompt) -> None:
    paragraphs = [part for part in prompt.prompt.split("\n\n") if not part.startswith("#")]
    assert len(set(paragraphs)) == len(paragraphs) > 10
    assert prompt.words > 1_200


def test_short_prompts_are_short() -> None:
    assert all(prompt.words < 200 for prompt in SHIPPED if prompt.group != "prefill")


@pytest.mark.engines
def test_token_counts_and_special_tokens_with_the_real_tokenizer() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    file = embedded.path(cache.cache_dir()) / "tokenizer.json"
    if not file.is_file():
        pytest.skip(f"the embedded model is not built ({file})")
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    assert len(special) >= 3
    for prompt in SHIPPED:
        assert not [token for token in special if token in prompt.prompt], prompt.id
        tokens = len(tokenizer.encode(prompt.prompt).ids)
        if prompt.group == "prefill":
            assert 2_000 <= tokens <= 6_500, (prompt.id, tokens)
        else:
            assert tokens <= 300, (prompt.id, tokens)


def test_as_dict_is_the_contract() -> None:
    bodies = SHIPPED.as_dict()["prompts"]
    assert [body["id"] for body in bodies] == IDS
    for body, prompt in zip(bodies, SHIPPED, strict=True):
        assert list(body) == [
            "id", "title", "category", "group", "prompt", "expect", "settings", "json_schema", "words",
        ]  # fmt: skip
        assert list(body["settings"]) == ["temperature", "top_p", "max_tokens", "seed"]
        assert body["words"] == len(prompt.prompt.split()) > 0
        assert json.loads(json.dumps(body, allow_nan=False)) == body


def test_as_dict_hands_out_copies() -> None:
    prompt = next(p for p in SHIPPED if p.json_schema)
    prompt.as_dict()["json_schema"]["properties"].clear()
    assert prompt.as_dict()["json_schema"]["properties"]


# Finding one


def test_get_finds_by_id() -> None:
    for prompt in SHIPPED:
        assert SHIPPED.get(prompt.id) is prompt


def test_an_unknown_id_names_near_ones() -> None:
    with pytest.raises(BadRequestError, match="poem-lighthouse") as caught:
        SHIPPED.get("poem-lighthose")
    assert caught.value.as_dict()["error"]["param"] == "prompt_id"


def test_an_unknown_id_like_no_other_says_where_all_are() -> None:
    with pytest.raises(BadRequestError, match="GET /api/prompts") as caught:
        SHIPPED.get("x" * 10_000)
    assert len(caught.value.message) < 200


# Loading


def test_a_file_in_full(folder: Path) -> None:
    (prompt,) = prompts.load(folder)
    assert prompt == prompts.Prompt(
        id="good",
        title="A good one",
        category="json",
        group="structured",
        prompt="Write some JSON.",
        expect="High acceptance.",
        settings=prompts.PromptSettings(temperature=0.0, top_p=1.0, max_tokens=64, seed=0),
    )


def test_order_of_groups_categories_ids(folder: Path) -> None:
    write(folder, "b", change=("category: json", "category: zoology"))
    write(folder, "c", change=("category: json", "category: table"))
    write(folder, "a", change=("group: structured", "group: prefill"))
    write(folder, "also-good")
    assert [prompt.id for prompt in prompts.load(folder)] == ["also-good", "good", "c", "b", "a"]


def test_rules_and_front_matter_lines_in_the_body_are_kept(folder: Path) -> None:
    write(folder, "rules", change=("Write some JSON.", "One\n\n---\n\ntwo: three\n\n---\n\nfour"))
    assert prompts.load(folder).get("rules").prompt == "One\n\n---\n\ntwo: three\n\n---\n\nfour"


def test_crlf_and_a_byte_order_mark_are_read(folder: Path) -> None:
    path = folder / "good.md"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert prompts.load(folder).get("good").prompt == "Write some JSON."


def test_a_schema_inline_and_from_a_file(folder: Path) -> None:
    (folder / "schemas").mkdir()
    (folder / "schemas" / "thing.json").write_text('{"type": "object"}')
    write(folder, "inline", change=("---\nWrite", "json_schema: {type: object}\n---\nWrite"))
    write(folder, "file", change=("---\nWrite", "json_schema: schemas/thing.json\n---\nWrite"))
    library = prompts.load(folder)
    assert library.get("inline").json_schema == library.get("file").json_schema == {"type": "object"}
    assert library.get("good").json_schema is None


def test_the_limit_of_max_tokens_is_the_callers(folder: Path) -> None:
    assert len(prompts.load(folder, max_tokens=64)) == 1
    assert "Allowed is a whole number from 1 to 63" in refusal(folder, max_tokens=63)


# Refusals


def test_no_folder(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none")


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "holds no *.md file" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("title:", "titel:"), ["unknown key 'titel'", "did you mean 'title'", "json_schema"]),
        (("expect: High acceptance.\n", ""), ["lacks expect"]),
        (("id: bad", "id: other"), ["id is 'other'", "named 'bad'"]),
        (("id: bad", "id: Bad One"), ["id is 'Bad One'", "lower-case"]),
        (("id: bad", "id: 7"), ["id is 7", "lower-case"]),
        (("title: A good one", "title: ''"), ["title is ''", "one line"]),
        (("expect: High acceptance.", "expect: |\n  One\n  Two"), ["expect is", "one line"]),
        (("group: structured", "group: creativ"), ["group is 'creativ'", "structured, creative and prefill"]),
        (("category: json", "category: JSON files"), ["category is 'JSON files'", "question_answering"]),
        (("temperature: 0", "temperature: 2.1"), ["temperature is 2.1", "from 0 to 2"]),
        (("temperature: 0", "temperature: -0.1"), ["temperature is -0.1"]),
        (("temperature: 0", "temperature: .nan"), ["temperature is nan"]),
        (("temperature: 0", "temperature: true"), ["temperature is True"]),
        (("temperature: 0", "temperature: cold"), ["temperature is 'cold'"]),
        (("top_p: 1", "top_p: 0"), ["top_p is 0", "over 0, up to 1"]),
        (("top_p: 1", "top_p: 1.01"), ["top_p is 1.01"]),
        (("max_tokens: 64", "max_tokens: 0"), ["max_tokens is 0", "whole number from 1 to 4096"]),
        (("max_tokens: 64", "max_tokens: 64.5"), ["max_tokens is 64.5"]),
        (("max_tokens: 64", "max_tokens: 5000"), ["max_tokens is 5000"]),
        (("seed: 0", "seed: -1"), ["seed is -1", "4294967295"]),
        (("seed: 0", "seed: 4294967296"), ["seed is 4294967296"]),
        ((", seed: 0", ""), ["settings lacks seed"]),
        (("seed: 0", "seed: 0, top_k: 5"), ["unknown key 'top_k' in the settings", "did you mean 'top_p'"]),
        (("settings: {temperature: 0, top_p: 1, max_tokens: 64, seed: 0}", "settings: hot"), ["settings is 'hot'"]),
        (("title: A good one", "title: [a"), ["not valid YAML"]),
        (("title: A good one", "title: Edit: one line"), ["not valid YAML", "Quote"]),
        (("Write some JSON.", "  "), ["has no prompt"]),
        (("Write some JSON.", "Write\0JSON"), ["NUL"]),
    ],
)
def test_a_bad_file(folder: Path, change: tuple[str, str], said: list[str]) -> None:
    write(folder, "bad", change=change)
    message = refusal(folder)
    assert message.startswith("Prompt file bad.md: ")
    for words in said:
        assert words in message


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("{type: objekt}", ["not a valid JSON Schema", "$.type", "objekt"]),
        ("{type: object, properties: {a: {minLength: -1}}}", ["not a valid JSON Schema", "$.properties.a.minLength"]),
        ("[1, 2]", ["json_schema is [1, 2]"]),
        ("{const: 2020-01-01}", ["JSON has no form for"]),
        ("{const: .nan}", ["JSON has no form for"]),
        ("schemas/none.json", ["does not exist", "schemas/broken.json and schemas/list.json"]),
        ("schemas/broken.json", ["is not JSON"]),
        ("schemas/list.json", ["json_schema is [1]"]),
        ("good.md", ["Allowed is a *.json file in schemas/"]),
        ("schemas/../../outside.json", ["Allowed is a *.json file in schemas/"]),
        ("/etc/outside.json", ["Allowed is a *.json file in schemas/"]),
    ],
)
def test_a_bad_schema(folder: Path, schema: str, said: list[str]) -> None:
    (folder / "schemas").mkdir()
    (folder / "schemas" / "broken.json").write_text("{")
    (folder / "schemas" / "list.json").write_text("[1]")
    write(folder, "bad", change=("---\nWrite", f"json_schema: {schema}\n---\nWrite"))
    message = refusal(folder)
    assert message.startswith("Prompt file bad.md: ")
    for words in said:
        assert words in message


def test_a_file_without_front_matter(folder: Path) -> None:
    (folder / "bad.md").write_text("Write some JSON.\n")
    assert "bad.md: it has no front matter" in refusal(folder)


def test_a_file_that_is_not_utf8(folder: Path) -> None:
    (folder / "bad.md").write_bytes(b"---\nid: caf\xe9\n---\n")
    assert "bad.md: it is not UTF-8 (byte 11)" in refusal(folder)


def test_an_id_twice(folder: Path) -> None:
    (folder / "more").mkdir()
    write(folder / "more", "good")
    message = refusal(folder)
    assert "more/good.md" in message
    assert "taken by good.md" in message
