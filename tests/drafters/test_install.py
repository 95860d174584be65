"""From shipped weights to a checkpoint: what is rebuilt, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from app.drafters import install, weights  # noqa: E402
from app.drafters.eagle3 import CHECKPOINT_NAMES, Eagle3Head  # noqa: E402
from app.drafters.small import SmallLlama, SmallSize  # noqa: E402
from app.drafters.target import Shape, Target, read_config  # noqa: E402
from app.errors import PairError  # noqa: E402

CPU = torch.device("cpu")
SIZE = SmallSize(32, 64, 2, 4, 2, 8)


@pytest.fixture(scope="module")
def models(tiny_target: Path) -> tuple[Eagle3Head, SmallLlama]:
    torch.manual_seed(0)
    target = Target(tiny_target, CPU, torch.float32)
    head = Eagle3Head(target.shape, torch.randperm(320)[:100])
    small = SmallLlama(Shape.from_config(SIZE.config(target.config)), torch.randperm(320)[:40], target.embedding)
    with torch.no_grad():
        small.correction.normal_(0, 0.1)
    return head, small


@pytest.fixture
def shipped(models: tuple[Eagle3Head, SmallLlama], tiny_target: Path, tmp_path: Path) -> Path:
    """A folder like the package's, with drafters of the tiny target."""
    head, small = models
    folder = tmp_path / "weights"
    folder.mkdir()
    embedding = install.target_embedding(tiny_target)
    tensors = {name: getattr(head, name) for name in CHECKPOINT_NAMES}
    tensors |= {"lm_head_change": head.lm_head - embedding[head.kept], "kept": head.kept}
    weights.write(folder / "eagle3.safetensors", tensors, {"aux_layers": [2, 3, 3]})
    tensors = {
        f"layers.{i}.{n}": getattr(layer, n) for i, layer in enumerate(small.layers) for n in install.LAYER_NAMES
    }
    tensors |= {n: getattr(small, n) for n in ("norm", "projection", "correction", "frequent")}
    size = {name: getattr(SIZE, name) for name in SmallSize.__slots__}
    weights.write(folder / "draft_model.safetensors", tensors, {"size": size})
    manifest = {
        kind: {
            "file": f"{kind}.safetensors",
            "sha256": weights.sha256(folder / f"{kind}.safetensors"),
            "target": {"vocab_size": 320, "hidden_size": 48},
            "tokenizer_sha256": install.tokenizer_fingerprint(tiny_target),
        }
        for kind in ("eagle3", "draft_model")
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def test_eagle3_checkpoint_is_the_head_within_8_bits(
    models: tuple[Eagle3Head, SmallLlama], shipped: Path, tiny_target: Path, tmp_path: Path
) -> None:
    head, _ = models
    folder = install.build(tiny_target, tmp_path / "cache", "eagle3", shipped=shipped)
    tensors = load_file(str(folder / "model.safetensors"))
    for own, name in CHECKPOINT_NAMES.items():
        exact = getattr(head, own).detach()
        step = exact.abs().amax(-1, keepdim=True) / 127
        assert ((tensors[name] - exact).abs() <= step * 0.51).all(), name
    change = (head.lm_head - install.target_embedding(tiny_target)[head.kept]).detach()
    step = change.abs().amax(-1, keepdim=True) / 127
    assert ((tensors["lm_head.weight"] - head.lm_head.detach()).abs() <= step * 0.51 + 1e-6).all()
    assert (tensors["d2t"] + torch.arange(100)).tolist() == head.kept.tolist()
    assert not [name for name in tensors if "embed" in name]
    config = read_config(folder)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 100
    assert config["num_hidden_layers"] == 1
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3]


def test_draft_model_checkpoint_computes_what_was_trained(
    models: tuple[Eagle3Head, SmallLlama], shipped: Path, tiny_target: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    _, small = models
    folder = install.build(tiny_target, tmp_path / "cache", "draft_model", shipped=shipped)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(3, 300, (2, 19))
    with torch.no_grad():
        embedding = small.embedding()
        expected = small(ids, embedding, torch.float32) @ embedding.T
        got = loaded(ids).logits
    assert (got - expected).norm() / expected.norm() < 0.03
    assert loaded.config.vocab_size == 320


def test_building_again_finds_the_same_checkpoint(shipped: Path, tiny_target: Path, tmp_path: Path) -> None:
    first = install.build(tiny_target, tmp_path / "cache", "eagle3", shipped=shipped)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert install.build(tiny_target, tmp_path / "cache", "eagle3", shipped=shipped) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    other = install.build(tiny_target, tmp_path / "elsewhere", "eagle3", shipped=shipped)
    assert weights.sha256(other / "model.safetensors") == weights.sha256(first / "model.safetensors")


def test_a_damaged_file_is_found_by_its_hash(shipped: Path, tiny_target: Path, tmp_path: Path) -> None:
    path = shipped / "eagle3.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(PairError, match="damaged: its SHA-256 is"):
        install.build(tiny_target, tmp_path / "cache", "eagle3", shipped=shipped)
    path.unlink()
    with pytest.raises(PairError, match="missing"):
        install.build(tiny_target, tmp_path / "cache", "eagle3", shipped=shipped)


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 321), ("hidden_size", 64)])
def test_a_target_of_other_dimensions_is_refused_with_both_values(
    name: str, value: int, shipped: Path, tiny_target: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    config = read_config(target) | {name: value}
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    wanted = {"vocab_size": 320, "hidden_size": 48}[name]
    for kind in ("eagle3", "draft_model"):
        with pytest.raises(PairError, match=rf"needs {name} = {wanted}, the target has {value}"):
            install.build(target, tmp_path / "cache", kind, shipped=shipped)  # type: ignore[arg-type]


def test_a_target_with_another_tokenizer_is_refused(shipped: Path, tiny_target: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    text = (target / "tokenizer.json").read_text(encoding="utf-8").replace('"w7"', '"seven"')
    (target / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(PairError, match="tokenizers differ"):
        install.build(target, tmp_path / "cache", "draft_model", shipped=shipped)


def test_8_bit_rows_round_to_the_nearest_step() -> None:
    matrix = torch.randn(7, 50) * torch.logspace(-3, 2, 7)[:, None]
    stored, scale = weights.quantize_rows(matrix)
    assert stored.dtype == torch.int8
    assert ((weights.dequantize_rows(stored, scale) - matrix).abs() <= 0.501 * scale[:, None]).all()


def test_the_shipped_drafters_are_whole_and_small_enough() -> None:
    files = [weights.checked(kind)[0] for kind in ("eagle3", "draft_model")]
    assert sum(file.stat().st_size for file in files) <= 24_000_000
    tensors, metadata = weights.read(files[0])
    assert len(tensors["kept"]) == len(set(tensors["kept"].tolist()))
    assert metadata["aux_layers"] == [2, 15, 27]
    size = SmallSize(**weights.read(files[1])[1]["size"])
    attention = 2 * size.hidden * size.head_dim * (size.heads + size.kv_heads)
    layer = attention + 3 * size.hidden * size.intermediate + 2 * size.hidden
    assert 9 * (49152 * size.hidden + size.layers * layer + size.hidden) <= 134_515_008
