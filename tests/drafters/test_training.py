"""The trainer's arithmetic against plain, slow definitions, and both loops on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from app.drafters import kernels  # noqa: E402
from app.drafters.corpus import Corpus, Loader  # noqa: E402
from app.drafters.eagle3 import Eagle3Head, Rows, default_aux_layers  # noqa: E402
from app.drafters.losses import distillation_loss  # noqa: E402
from app.drafters.sample import Sampler, SampleSettings  # noqa: E402
from app.drafters.small import SmallSize  # noqa: E402
from app.drafters.target import Target, rms_norm, rotate  # noqa: E402
from app.drafters.train import (  # noqa: E402
    Chain,
    Eagle3Trainer,
    SmallTrainer,
    TrainSettings,
    acceptance,
    walk,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target(tiny_target, CPU, torch.float32)


@pytest.fixture(scope="module")
def corpus(target: Target) -> Corpus:
    """Responses of the tiny target: greedy and sampled, prompts of 8 to 12 random tokens."""
    rng = np.random.default_rng(0)
    prompts = [(rng.integers(3, 300, size=rng.integers(8, 13)).tolist(), "json") for _ in range(96)]
    sampler = Sampler(
        target, SampleSettings(rows=16, max_new=40, max_prompt=16, temperatures=(0.0, 0.0, 0.8), stride=4), 2, 0
    )
    return Corpus.build(sampler.run(prompts, 600, lambda *_a, **_k: None))


def test_target_agrees_with_transformers(tiny_target: Path, target: Target) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    ids = torch.randint(3, 300, (2, 17))
    with torch.no_grad():
        expected = reference(ids, output_hidden_states=True)
    aux, last = target.forward(ids, (2, 3))
    torch.testing.assert_close(aux, torch.cat([expected.hidden_states[i] for i in (2, 3)], -1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.logits(last), expected.logits, rtol=1e-4, atol=1e-4)


def test_sampler_is_greedy_decoding_at_temperature_0(target: Target, corpus: Corpus) -> None:
    checked = 0
    for index in range(len(corpus)):
        if corpus.temperatures[index] > 0:
            continue
        ids = corpus.ids[corpus.starts[index] : corpus.starts[index + 1]].astype(np.int64)
        prompt = int(corpus.prompt_lengths[index])
        _, last = target.forward(torch.from_numpy(ids)[None])
        best = target.logits(last)[0].argmax(-1)
        assert best[prompt - 1 : -1].tolist() == ids[prompt:].tolist()
        assert len(ids) - prompt == 40 or ids[-1] == 2
        checked += 1
    assert checked >= 40
    assert 90 <= len(corpus) <= 96  # a response that ends within 8 tokens is dropped


def test_decode_attention_definition_masks_the_future() -> None:
    q, keys, values = torch.randn(3, 6, 8), torch.randn(3, 2, 20, 8), torch.randn(3, 2, 20, 8)
    pos = torch.tensor([0, 7, 19])
    got = kernels.decode_attention(q, keys, values, pos)
    for row in range(3):
        n = int(pos[row]) + 1
        want = F.scaled_dot_product_attention(
            q[row][None, :, None], keys[row : row + 1, :, :n], values[row : row + 1, :, :n], enable_gqa=True
        )
        torch.testing.assert_close(got[row], want[0, :, 0])


def test_distillation_loss_and_gradients_equal_autograd() -> None:
    hidden = torch.randn(9, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, 16, dtype=torch.float64, requires_grad=True)
    probs = torch.randn(9, 40, dtype=torch.float64).softmax(-1)
    best = probs.argmax(-1)
    best[3] = -1
    row_weight = torch.rand(9, dtype=torch.float64)
    onehot = torch.zeros(9, 40, dtype=torch.float64)
    for row, column in enumerate(best.tolist()):
        if column >= 0:
            onehot[row, column] = 1
    wanted = torch.where(best[:, None] >= 0, 0.7 * probs + 0.3 * onehot, probs)
    expected = (-(wanted * (hidden @ weight.T).log_softmax(-1)).sum(-1) * row_weight).sum()
    expected_grads = torch.autograd.grad(expected, (hidden, weight))
    got, chosen = distillation_loss(hidden, weight, probs, best, row_weight, 0.3)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    assert chosen.tolist() == (hidden @ weight.T).argmax(-1).tolist()
    for ours, theirs in zip(torch.autograd.grad(2 * got, (hidden, weight)), expected_grads, strict=True):
        torch.testing.assert_close(ours, 2 * theirs, rtol=1e-5, atol=1e-6)


def drafted_one_by_one(head: Eagle3Head, aux: Any, ids: Any, embedding: Any, start: int, steps: int) -> list[Any]:
    """Hidden states of a draft that begins at ``start``, computed as an engine does: one token at a time."""
    s = head.shape

    def parts(token: int, hidden: Any, position: int) -> tuple[Any, Any, Any]:
        x = torch.cat([rms_norm(embedding[token], head.norm_embed, s.eps), rms_norm(hidden, head.norm_hidden, s.eps)])
        cos, sin = head.cos[position], head.sin[position]
        return (
            rotate((head.q @ x).view(s.heads, -1), cos, sin),
            rotate((head.k @ x).view(s.kv_heads, -1), cos, sin),
            (head.v @ x).view(s.kv_heads, -1),
        )

    cache = []
    for at in range(start):
        _, key, value = parts(int(ids[at + 1]), head.combine(aux[at]), at)
        cache.append((key, value))
    hidden, outputs = head.combine(aux[start]), []
    for step in range(steps):
        q, key, value = parts(int(ids[start + 1 + step]), hidden, start + step)
        cache.append((key, value))
        keys, values = (torch.stack([pair[n] for pair in cache], 1) for n in (0, 1))
        attended = F.scaled_dot_product_attention(q[None, :, None], keys[None], values[None], enable_gqa=True)
        hidden = hidden + head.o @ attended.reshape(-1)
        y = rms_norm(hidden, head.norm_post, s.eps)
        hidden = hidden + head.down @ (F.silu(head.gate @ y) * (head.up @ y))
        outputs.append(hidden)
    return outputs


def test_training_time_test_equals_drafting_one_token_at_a_time(target: Target) -> None:
    torch.manual_seed(0)
    head = Eagle3Head(target.shape, torch.arange(50))
    head.start_from(target)
    ids = torch.randint(3, 300, (2, 16))
    aux, _ = target.forward(ids, default_aux_layers(6))
    seen: list[Any] = []
    original = head.layer
    head.layer = lambda *args: seen.append(original(*args)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    at = torch.arange(5, 12)
    rows = Rows(
        at, ids.reshape(-1)[at + 1], torch.rand(len(at), 50).softmax(-1), torch.zeros(len(at), dtype=torch.long)
    )
    with torch.no_grad():
        head.draft(aux, ids, target.embedding, rows, 3)
        for row, start in ((0, 4), (1, 9)):
            expected = drafted_one_by_one(head, aux[row], ids[row], target.embedding, start, 3)
            for step in range(3):
                torch.testing.assert_close(seen[step][row, start], expected[step], rtol=1e-4, atol=1e-4)


def test_walk_counts_as_speculation_does() -> None:
    ok = np.array([[1, 1], [0, 0], [1, 0], [0, 0], [1, 1], [1, 1], [1, 1], [1, 1]], dtype=bool)
    # starts 0 (2 accepted) -> 3 (0) -> 4 (2) -> 7: too near the end
    assert walk(ok, 2) == (7, 3)
    assert walk(ok, 1) == (8, 4)
    got = acceptance([Chain(ok, 0.0, "json")], 2)
    assert got["tokens_per_step"] == round(7 / 3, 3)
    assert got["acceptance_by_position"] == [6 / 8, 5 / 8]


def test_batches_cover_every_sequence_once(corpus: Corpus) -> None:
    loader = Loader(corpus, CPU, 256, round_to=16)
    groups = loader.groups(np.arange(len(corpus)), None)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(corpus)))
    for group in groups:
        batch = loader.batch(group)
        assert batch.ids.numel() <= max(256, batch.ids.shape[1])
        for row, index in enumerate(group):
            assert (
                batch.ids[row, : batch.lengths[row]].tolist()
                == corpus.ids[corpus.starts[index] : corpus.starts[index + 1]].tolist()
            )


@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
def test_training_lowers_the_loss_and_ships_what_it_trained(
    kind: str, target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    lines: list[dict[str, Any]] = []
    settings = TrainSettings(seconds=12, batch_tokens=1024, draft_vocab=256, frequent=128, steps=3, warmup=5,
                             muon_lr=5e-3, adam_lr=5e-3, validate_every_s=100)  # fmt: skip
    log = lambda what, **values: lines.append(values)  # noqa: E731
    if kind == "eagle3":
        trainer: Any = Eagle3Trainer(target, corpus, settings, log)
    else:
        trainer = SmallTrainer(target, corpus, settings, log, SmallSize(32, 64, 2, 4, 2, 8))
    before, _ = trainer.validate(9, 3)
    trainer.run(tmp_path)
    after, _ = trainer.validate(9, 3)
    final = next(line for line in lines if line.get("final"))
    shipped = next(line for line in lines if line.get("final_8bit"))
    assert after < before - 0.5
    assert shipped["validation_loss"] == pytest.approx(final["validation_loss"], rel=0.05)
    assert (tmp_path / f"{kind}.safetensors").stat().st_size == final["bytes"]
    assert json.dumps(final)
