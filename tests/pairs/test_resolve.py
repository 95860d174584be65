from __future__ import annotations

import ast
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from app.errors import PairError
from app.pairs import builders, catalogue, embedded, resolve
from app.pairs.pair import ModelRef, Pair
from tests.pairs.checkpoints import write_head, write_model, write_tokenizer


def at(path: Path) -> ModelRef:
    return ModelRef("path", str(path))


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair("mine", "Mine", at(write_model(tmp_path / "target")), "ngram", 3)


def test_a_pair_of_folders_resolves(pair: Pair, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft")
    resolved = resolve.resolve(replace(pair, method="draft_model", draft=at(draft)), cache_dir=tmp_path, device="cpu")
    assert (resolved.target, resolved.draft) == (tmp_path / "target", draft)
    assert resolved.target_weights_bytes == resolved.draft_weights_bytes == 2 * 5 * 8 * 4
    on_gpu = resolve.resolve(pair, cache_dir=tmp_path, device="cuda")
    assert (on_gpu.target_weights_bytes, on_gpu.draft, on_gpu.draft_weights_bytes) == (2 * 5 * 8 * 2, None, None)


def test_a_draft_that_does_not_fit_is_refused(pair: Pair, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft")
    write_tokenizer(draft, tokens={"b": 0, "a": 1, "ab": 2})
    with pytest.raises(PairError, match="their tokenizers differ"):
        resolve.resolve(replace(pair, method="draft_model", draft=at(draft)), cache_dir=tmp_path, device="cpu")
    head = write_head(tmp_path / "head", hidden_size=16)
    with pytest.raises(PairError, match="hidden size of 16, the target's is 8"):
        resolve.resolve(replace(pair, method="eagle3", draft=at(head)), cache_dir=tmp_path, device="cpu")


def test_a_missing_folder_is_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(PairError, match="nowhere isn't there"):
        resolve.resolve(replace(pair, target=at(tmp_path / "nowhere")), cache_dir=tmp_path, device="cpu")
    (tmp_path / "target" / "model.safetensors").unlink()
    with pytest.raises(PairError, match=r"target has no \*\.safetensors file"):
        resolve.resolve(pair, cache_dir=tmp_path, device="cpu")


def test_a_built_model_that_is_not_built_says_how(tmp_path: Path) -> None:
    embedded_pair = catalogue.override(catalogue.load("embedded"), method="ngram")
    with pytest.raises(PairError, match=r"isn't there\. Build it again with `specduel pairs build embedded`"):
        resolve.resolve(embedded_pair, cache_dir=tmp_path, device="cpu")


def test_an_unknown_built_model_is_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"no built model 'embeded'; specduel can build embedded"):
        resolve.resolve(replace(pair, target=ModelRef("built", "embeded")), cache_dir=tmp_path, device="cpu")


def test_the_shipped_pairs_name_known_builders() -> None:
    for name in catalogue.names():
        for model in resolve.built_models(catalogue.load(name)):
            assert model in builders.names()
            built = builders.builder(model)
            assert callable(built.path) and callable(built.check) and callable(built.build)


def test_builders_are_the_modules_they_name() -> None:
    assert builders.builder("embedded").path(Path("/c")) == embedded.path(Path("/c"))


def test_a_gpu_pair_on_the_cpu_is_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"'mine' needs an NVIDIA GPU.*run on the CPU\. Use --pair embedded"):
        resolve.resolve(replace(pair, devices=("cuda",)), cache_dir=tmp_path, device="cpu")


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM's source")
def test_engine_arguments_are_checked_against_vllm(pair: Pair) -> None:
    resolve.check_engine_arguments(
        replace(pair, engine={"max_model_len": 8}, speculative_config={"prompt_lookup_max": 3})
    )
    with pytest.raises(PairError, match=r"engine\.max_model_length is no argument.*Did you mean 'max_model_len'\?"):
        resolve.check_engine_arguments(replace(pair, engine={"max_model_length": 8}))
    with pytest.raises(PairError, match=r"speculative_config\.promt_lookup_max.*Did you mean 'prompt_lookup_max'\?"):
        resolve.check_engine_arguments(replace(pair, speculative_config={"promt_lookup_max": 3}))


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM's source")
@pytest.mark.parametrize(
    ("class_name", "file"), [("EngineArgs", "engine/arg_utils.py"), ("SpeculativeConfig", "config/speculative.py")]
)
def test_the_names_are_those_a_parser_finds(class_name: str, file: str) -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / file).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    fields = [node.target for node in found.body if isinstance(node, ast.AnnAssign)]
    assert resolve._fields(class_name, file) == {field.id for field in fields if isinstance(field, ast.Name)}


@pytest.mark.parametrize(
    ("engine", "stored", "device", "expected"),
    [
        ({}, "bfloat16", "cpu", "float32"),
        ({}, "bfloat16", "cuda", "bfloat16"),
        ({}, "torch.float16", "cuda", "float16"),
        ({}, "float32", "cuda", "bfloat16"),
        ({"dtype": "half"}, "bfloat16", "cuda", "half"),
        ({"dtype": "auto"}, "float16", "cpu", "float16"),
    ],
)
def test_engine_dtype(pair: Pair, engine: dict[str, str], stored: str, device: resolve.Device, expected: str) -> None:
    assert resolve.engine_dtype(replace(pair, engine=engine), {"torch_dtype": stored}, device) == expected
