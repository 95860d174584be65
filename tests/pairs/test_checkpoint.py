from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.errors import PairError
from app.pairs.checkpoint import read_config, tensors, weight_files, weights_bytes
from tests.pairs.checkpoints import write_model, write_safetensors


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2), ("half", 2)])
def test_bytes_are_counted_in_the_engines_dtype(tmp_path: Path, dtype: str, width: int) -> None:
    assert weights_bytes(write_model(tmp_path), dtype) == 2 * 5 * 8 * width


def test_a_tied_output_layer_is_not_counted_twice(tmp_path: Path) -> None:
    assert weights_bytes(write_model(tmp_path, tie_word_embeddings=True), "float32") == 5 * 8 * 4


def test_integer_tensors_keep_their_width(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", {"w": ("BF16", (4,)), "d2t": ("I64", (3,))})
    assert weights_bytes(tmp_path, "float32") == 4 * 4 + 3 * 8


def test_an_unknown_dtype_is_not_guessed(tmp_path: Path) -> None:
    assert weights_bytes(write_model(tmp_path), "nvfp4") is None


def test_weights_of_another_format_are_none(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert weights_bytes(tmp_path, "float32") is None


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "consolidated.safetensors")
    weight_map = {}
    for number in (1, 2):
        write_safetensors(tmp_path / f"model-{number}.safetensors", {f"w{number}": ("BF16", (2, 2))})
        weight_map[f"w{number}"] = f"model-{number}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert tensors(tmp_path).keys() == {"w1", "w2"}
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(
        PairError, match=r"model-2\.safetensors is missing, though model\.safetensors\.index\.json names"
    ):
        weight_files(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index_is_one_line(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(PairError, match="is damaged"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"w": {}}',
    ],
)
def test_what_is_no_safetensors_file_is_damaged(tmp_path: Path, content: bytes) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(PairError, match=r"model\.safetensors is damaged"):
        tensors(tmp_path)


def test_a_file_cut_short_is_damaged(tmp_path: Path) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(PairError, match=rf"it has {len(data) - 1} bytes, its header tells of {len(data)}"):
        tensors(tmp_path)


def test_the_nested_parts_of_a_config_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"draft_vocab_size": 3, "transformer_layer_config": {"vocab_size": 9}})
    )
    config = read_config(tmp_path)
    assert (config["draft_vocab_size"], config["vocab_size"]) == (3, 9)


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "no JSON object")])
def test_a_damaged_config_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PairError, match=message):
        read_config(tmp_path)


def test_a_missing_config_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"config\.json can't be read \(No such file"):
        read_config(tmp_path)
