"""The widened target and head compute what the narrow ones do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from safetensors.torch import load_file, save_file  # noqa: E402

from app.drafters.eagle3 import CHECKPOINT_NAMES, Eagle3Head, Rows  # noqa: E402
from app.drafters.target import Shape, Target  # noqa: E402
from app.errors import PairError  # noqa: E402
from app.pairs import standin  # noqa: E402

WIDE = standin.WideShape(hidden=112, intermediate=160, heads=16, kv_heads=4)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def wide_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.build(tiny_target, tmp_path_factory.mktemp("wide") / "target", WIDE, dtype="float32", device="cpu")


def test_wide_target_has_the_narrow_ones_logits(tiny_target: Path, wide_target: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(3, 300, (2, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        narrow, wide = (
            transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
                ids, output_hidden_states=True
            )
            for folder in (tiny_target, wide_target)
        )
    torch.testing.assert_close(wide.logits, narrow.logits, rtol=1e-4, atol=1e-4)
    assert wide.hidden_states[3].shape[-1] == 112
    assert wide.hidden_states[3][..., 48:].abs().max() == 0


def test_wide_weights_are_dense_where_that_is_free(wide_target: Path) -> None:
    tensors: dict[str, Any] = {}
    for file in wide_target.glob("*.safetensors"):
        tensors |= load_file(str(file))
    layer = "model.layers.2."
    assert (tensors[layer + "mlp.gate_proj.weight"] == 0).float().mean() < 0.01
    assert (tensors[layer + "mlp.down_proj.weight"][48:] == 0).all()
    assert json.loads((wide_target / "config.json").read_text())["hidden_size"] == 112


def head_of(folder: Path) -> Eagle3Head:
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(str(folder / "model.safetensors"))
    kept = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    head = Eagle3Head(Shape.from_config(config), kept)
    with torch.no_grad():
        for own, name in CHECKPOINT_NAMES.items():
            getattr(head, own).copy_(tensors[name])
        head.lm_head.copy_(tensors["lm_head.weight"])
    return head


def test_wide_head_equals_the_narrow_one_on_the_same_states(
    tiny_target: Path, wide_target: Path, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    narrow_target, wide = Target(tiny_target, CPU, torch.float32), Target(wide_target, CPU, torch.float32)
    kept = torch.randperm(320)[:64]
    head = Eagle3Head(narrow_target.shape, kept)
    head.start_from(narrow_target)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    folder = tmp_path / "head"
    folder.mkdir()
    tensors = {name: getattr(head, own).detach() for own, name in CHECKPOINT_NAMES.items()}
    save_file(
        {**tensors, "lm_head.weight": head.lm_head.detach(), "d2t": kept - torch.arange(64)},
        str(folder / "model.safetensors"),
    )
    config = json.loads((tiny_target / "config.json").read_text()) | {"num_hidden_layers": 1, "draft_vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    wide_head = head_of(standin.build_head(folder, tmp_path / "wide-head", WIDE, dtype="float32", device="cpu"))

    ids = torch.randint(3, 300, (2, 15))
    logits: list[Any] = []
    for target, model in ((narrow_target, head), (wide, wide_head)):
        aux, _ = target.forward(ids, (2, 3))
        aux = torch.cat([aux, aux[..., : target.shape.hidden]], -1)
        seen: list[Any] = []
        original = model.layer
        model.layer = lambda *a, original=original, seen=seen: seen.append(original(*a)) or seen[-1]  # type: ignore[method-assign]
        at = torch.arange(5, 12)
        rows = Rows(at, ids.reshape(-1)[at + 1], torch.rand(7, 64).softmax(-1), torch.zeros(7, dtype=torch.long))
        with torch.no_grad():
            model.draft(aux, ids, target.embedding, rows, 3)
            normed = F.rms_norm(seen[2], (target.shape.hidden,), model.norm, target.shape.eps)
            logits.append(F.linear(normed, model.lm_head))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-4)
    assert logits[0].std() > 0.1


def test_a_narrower_shape_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(PairError, match="hidden_size from 48 to 32"):
        standin.build(tiny_target, tmp_path / "x", standin.WideShape(32, 160, 16, 4), dtype="float32", device="cpu")
