from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from app.errors import PairError
from app.pairs import catalogue
from app.pairs.pair import METHODS, ModelRef

GOOD = """
title = "A pair"
method = "draft_model"
num_speculative_tokens = 3
[target]
hub = "owner/target"
[draft]
path = "models/draft"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.toml"


def test_a_file_becomes_a_pair(file: Path, tmp_path: Path) -> None:
    file.write_text(
        GOOD.replace('title = "A pair"', 'title = "A pair"\ndevices = ["cuda"]\nstand_in = true\nnotes = "Hm."')
        + "[engine]\nmax_model_len = 2048\n[baseline_engine]\nseed = 1\n[speculative_config]\nmax_model_len = 512\n"
    )
    pair = catalogue.load(str(file))
    assert pair.name == "mine"
    assert pair.target == ModelRef("hub", "owner/target")
    assert pair.draft == ModelRef("path", str(tmp_path / "models" / "draft"))
    assert (pair.method, pair.num_speculative_tokens) == ("draft_model", 3)
    assert (pair.devices, pair.stand_in, pair.notes) == (("cuda",), True, "Hm.")
    assert pair.engine == {"max_model_len": 2048}
    assert pair.baseline_engine == {"seed": 1}
    assert pair.speculative_engine == {}
    assert pair.speculative_config == {"max_model_len": 512}


@pytest.mark.parametrize("name", catalogue.names())
def test_the_shipped_pairs_are_valid(name: str) -> None:
    pair = catalogue.load(name)
    assert pair.name == name
    assert pair.notes.endswith((".", "!"))
    assert catalogue.override(pair, method="ngram").draft is None


def test_the_shipped_pairs_are_those_promised() -> None:
    assert {"embedded", "llama-3.1-8b", "llama-3.1-8b-eagle3", "qwen3-8b", "qwen3-8b-eagle3"} <= set(catalogue.names())
    for device, name in catalogue.DEFAULTS.items():
        assert device in catalogue.load(name).devices
    gated = catalogue.load("llama-3.1-8b")
    assert gated.draft is not None
    assert gated.target.licence_url and gated.draft.licence_url
    assert catalogue.load("qwen3-8b").target.licence_url is None


def test_the_method_of_the_embedded_pair_is_one_line() -> None:
    text = (Path(catalogue.__file__).parent / "embedded.toml").read_text()
    assert sum(line.startswith("method =") for line in text.splitlines()) == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title =", "titel =", r"titel: unknown key \(did you mean 'title'\?\)\. The keys are: title, "),
        ("hub =", "hbu =", r"target\.hbu: unknown key \(did you mean 'hub'\?\)"),
        ('title = "A pair"', "", "title: missing; it must be a string"),
        ('title = "A pair"', 'title = " "', "title: it must not be empty"),
        ("= 3", '= "3"', "num_speculative_tokens: '3' is of the wrong type; it must be a whole number from 1 to 32"),
        ("= 3", "= true", "num_speculative_tokens: True is of the wrong type"),
        ("= 3", "= 0", "num_speculative_tokens: 0 is out of range; it must be 1 to 32"),
        (
            '"draft_model"',
            '"draft-model"',
            r"'draft-model' is unknown \(did you mean 'draft_model'\?\).*one of ngram, ",
        ),
        ('"draft_model"', '"ngram"', r'draft: the method "ngram" drafts from the prompt and takes no \[draft\]'),
        ('[draft]\npath = "models/draft"', "", r'draft: the method "draft_model" needs a \[draft\] table'),
        ('[target]\nhub = "owner/target"', "", r"target: missing; it must be a table \[target\]"),
        ('hub = "owner/target"', "", "target: give exactly one of hub, path or built"),
        ('hub = "owner/target"', 'hub = "o/t"\nbuilt = "embedded"', "target: give exactly one of"),
        (
            '"owner/target"',
            '"target"',
            r"target\.hub: 'target' is not a repository id; it must look like \"owner/name\"",
        ),
        ('title = "A pair"', 'title = "A"\ndevices = ["gpu"]', r"devices: \['gpu'\] is not allowed.*'cpu' and 'cuda'"),
        ('title = "A pair"', 'title = "A"\ndevices = []', "devices.*not empty"),
        (
            'title = "A pair"',
            'title = "A"\nengine = 3',
            r"engine: 3 is of the wrong type; it must be a table \[engine\]",
        ),
        ("[draft]", '[engine]\nmodel = "x"\n[draft]', r"engine\.model: this is said by \[target\]; remove it here"),
        (
            "[draft]",
            '[speculative_config]\nmethod = "x"\n[draft]',
            r"speculative_config\.method: this is said by the key",
        ),
        ("title =", "title", "not valid TOML"),
    ],
)
def test_a_mistake_is_named_with_file_and_key(file: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(PairError, match=message) as caught:
        catalogue.read(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_pair_is_refused_with_the_nearest() -> None:
    with pytest.raises(PairError, match=r"no pair 'embeded' \(did you mean 'embedded'\?\).*--pair path/to/file\.toml"):
        catalogue.load("embeded")


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"nothing\.toml can't be read: No such file"):
        catalogue.load(str(tmp_path / "nothing.toml"))


def test_a_file_of_bytes_is_one_line(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PairError, match="not valid TOML"):
        catalogue.load(str(file))


def test_every_pair_can_use_ngram() -> None:
    pair = catalogue.override(catalogue.load("qwen3-8b"), method="ngram")
    assert (pair.method, pair.draft, pair.target.name) == ("ngram", None, "Qwen/Qwen3-8B")
    assert pair.title == "Qwen3 8B, n-gram lookup"
    assert pair.speculative_config == catalogue.NGRAM_CONFIG


def test_another_method_brings_the_draft_of_its_own_pair() -> None:
    pair = catalogue.override(catalogue.load("qwen3-8b"), method="eagle3")
    head = catalogue.load("qwen3-8b-eagle3")
    assert (pair.name, pair.method, pair.draft) == ("qwen3-8b", "eagle3", head.draft)
    assert pair.num_speculative_tokens == head.num_speculative_tokens


def test_override_changes_nothing_it_was_not_asked_to() -> None:
    pair = catalogue.load("qwen3-8b")
    assert catalogue.override(pair) == pair
    assert catalogue.override(pair, method="draft_model") == pair
    assert catalogue.override(pair, num_speculative_tokens=7) == dataclasses.replace(pair, num_speculative_tokens=7)


def test_methods_are_those_that_override_can_give() -> None:
    for name in catalogue.names():
        pair = catalogue.load(name)
        for method in METHODS:
            if method in catalogue.methods(pair):
                assert catalogue.override(pair, method=method).method == method
            else:
                with pytest.raises(PairError, match="has no draft for the method"):
                    catalogue.override(pair, method=method)


def test_a_target_nobody_drafts_for_can_use_ngram_only(file: Path) -> None:
    file.write_text(GOOD)
    pair = catalogue.override(catalogue.load(str(file)), method="ngram")
    assert catalogue.methods(pair) == ("ngram",)
    with pytest.raises(PairError, match=r"'mine' has no draft for the method 'eagle3'; it can use ngram\."):
        catalogue.override(pair, method="eagle3")


def test_the_embedded_target_has_every_method() -> None:
    for name in ("embedded", "embedded-ngram", "embedded-draft"):
        assert catalogue.methods(catalogue.load(name)) == METHODS


@pytest.mark.parametrize("k", [0, 33])
def test_override_refuses_a_number_out_of_range(k: int) -> None:
    with pytest.raises(PairError, match=f"--num-speculative-tokens is {k}; it must be 1 to 32"):
        catalogue.override(catalogue.load("embedded"), num_speculative_tokens=k)


def test_override_refuses_an_unknown_method() -> None:
    with pytest.raises(PairError, match=r"--method: the method 'eagle' is unknown \(did you mean 'eagle3'\?\)"):
        catalogue.override(catalogue.load("embedded"), method="eagle")
