"""The training loops: distillation on the target's own outputs, against the clock.

The learning rate follows a cosine over the *time* given, so a run ends as planned on any machine.
Weights' matrices are trained by Muon (orthogonalized momentum), the rest by AdamW.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.drafters import weights
from app.drafters.corpus import Batch, Corpus, Loader
from app.drafters.eagle3 import CHECKPOINT_NAMES, Eagle3Head, Rows, default_aux_layers
from app.drafters.losses import distillation_loss
from app.drafters.prompts import CATEGORIES, STRUCTURED
from app.drafters.small import LAYER_NAMES, SmallLlama, SmallSize
from app.drafters.target import Shape, Target

Log = Callable[..., None]


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """``seconds`` of training; ``batch_tokens`` padded tokens a batch; ``draft_vocab`` of the EAGLE-3 head;
    ``frequent`` tokens whose embedding the draft model corrects; ``steps`` drafting steps trained together."""

    seconds: float
    batch_tokens: int = 24576
    muon_lr: float = 2.5e-3
    adam_lr: float = 1e-3
    weight_decay: float = 0.05
    warmup: int = 100
    draft_vocab: int = 12288
    frequent: int = 8192
    steps: int = 4
    sharpen: float = 0.3
    validation: int = 768
    validate_every_s: float = 30.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Chain:
    """How far drafts would have been accepted, for one validated sequence.

    ``ok`` ``[starts, k]``: the draft that begins with the ``i``-th response token (the first is the
    target's own) matched the text up to its column. ``temperature`` and ``category`` are the sequence's.
    """

    ok: np.ndarray
    temperature: float
    category: str


def walk(ok: np.ndarray, k: int) -> tuple[int, int]:
    """Decode one sequence as speculation would: tokens yielded and steps taken, with ``k`` drafts a step.

    ``ok`` is ``Chain.ok``. The last step is left out when the text ends inside it.
    """
    lengths = ok[:, :k].sum(1)
    at = steps = 0
    while at + k < len(lengths):
        at += int(lengths[at]) + 1
        steps += 1
    return at, steps


def acceptance(chains: Iterable[Chain], k: int) -> dict[str, Any]:
    """Tokens per step of a walk, and acceptance by position (unconditional), over sequences of one kind."""
    tokens = steps = starts = 0
    by_position = np.zeros(k)
    for chain in chains:
        gained, taken = walk(chain.ok, k)
        tokens, steps = tokens + gained, steps + taken
        by_position += chain.ok[:, :k].sum(0)
        starts += len(chain.ok)
    return {
        "tokens_per_step": round(tokens / steps, 3) if steps else None,
        "acceptance_by_position": [round(float(x) / starts, 4) for x in by_position] if starts else None,
        "steps": steps,
    }


def report(chains: list[Chain], ks: tuple[int, ...] = (3,)) -> dict[str, Any]:
    """``acceptance`` by temperature, for structured prompts, the others, and each category, at each ``k``."""
    result: dict[str, Any] = {}
    for temperature in sorted({chain.temperature for chain in chains}):
        at = [chain for chain in chains if chain.temperature == temperature]
        groups = {
            "structured": [c for c in at if c.category in STRUCTURED],
            "other": [c for c in at if c.category not in STRUCTURED],
            **{name: [c for c in at if c.category == name] for name in CATEGORIES},
        }
        result[f"T={temperature:g}"] = {
            name: {f"k={k}": acceptance(group, k) for k in ks} for name, group in groups.items() if group
        }
    return result


class Trainer:
    """What both kinds share: data, optimizers, schedule, validation."""

    kind: str
    model: nn.Module

    def __init__(self, target: Target, corpus: Corpus, settings: TrainSettings, log: Log) -> None:
        self.target, self.corpus, self.settings, self.log = target, corpus, settings, log
        torch.manual_seed(settings.seed)
        order = np.random.default_rng(settings.seed).permutation(len(corpus))
        held = min(settings.validation, len(corpus) // 10)
        self.validation, self.training = order[:held], order[held:]
        self.loader = Loader(corpus, target.device, settings.batch_tokens)
        counts = corpus.response_counts(target.shape.vocab)
        self.frequency_order = np.argsort(-counts, kind="stable")
        self.counts = counts

    def coverage(self, size: int) -> float:
        """Share of response tokens that are among the ``size`` most frequent."""
        return float(self.counts[self.frequency_order[:size]].sum() / self.counts.sum())

    def places(self, batch: Batch, first: int) -> tuple[Tensor, Tensor]:
        """Flat places of the teacher's predictions of response tokens, from position ``first`` on, and those tokens."""
        length = batch.ids.shape[1]
        offset = np.arange(length)[None]
        lengths = self.corpus.lengths[batch.index][:, None]
        prompts = self.corpus.prompt_lengths[batch.index][:, None]
        valid = (offset >= np.maximum(prompts - 1, first)) & (offset < lengths - 1)
        at = torch.from_numpy(np.flatnonzero(valid))
        if batch.ids.is_cuda:
            at = at.pin_memory().to(batch.ids.device, non_blocking=True)
        return at, batch.ids.reshape(-1)[at + 1]

    def loss(self, batch: Batch, steps: int) -> tuple[Tensor, list[Tensor], Tensor]:
        """Loss, acceptance of each step by row, and the rows' flat places."""
        raise NotImplementedError

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Those for Muon (hidden matrices) and those for AdamW."""
        raise NotImplementedError

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and metadata of the shipped file."""
        raise NotImplementedError

    @torch.no_grad()
    def validate(self, count: int, steps: int) -> tuple[float, list[Chain]]:
        """Mean loss (nats) and chains of the first ``count`` validation sequences, with ``steps`` drafting steps."""
        chains: list[Chain] = []
        losses: list[float] = []
        for group in self.loader.groups(self.validation[:count], None):
            batch = self.loader.batch(group)
            loss, accepted, at = self.loss(batch, steps)
            losses.append(float(loss))
            length = batch.ids.shape[1]
            flags = torch.zeros(batch.ids.numel(), steps, dtype=torch.bool, device=at.device)
            for step, ok in enumerate(accepted):
                # a row holds the draft that ends there: store it where that draft began
                flags[(at - step).clamp(min=0), step] = ok
            table = flags.view(-1, length, steps).cpu().numpy()
            for row, index in zip(table, group, strict=True):
                prompt, end = int(self.corpus.prompt_lengths[index]), int(self.corpus.lengths[index])
                # the target's pass over the prompt yields response token 0; drafts begin with token 1
                ok = row[prompt : end - 1]
                if len(ok):
                    chains.append(Chain(ok, float(round(float(self.corpus.temperatures[index]), 2)),
                                        CATEGORIES[int(self.corpus.categories[index])]))  # fmt: skip
        return sum(losses) / max(1, len(losses)), chains

    def run(self, out: Path) -> None:
        """Train for the time given, then write ``<kind>.safetensors`` and ``<kind>-raw-*.safetensors`` to ``out``."""
        s = self.settings
        matrices, others = self.parameters()
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=s.muon_lr, weight_decay=s.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=s.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        peaks = [s.muon_lr, s.adam_lr]
        begun = time.monotonic()
        seen = iteration = 0
        next_check, running = s.validate_every_s / 3, None
        epoch = 0.0
        for epoch, batch in self.loader.epochs(self.training, s.seed):
            elapsed = time.monotonic() - begun
            if elapsed >= s.seconds:
                break
            fraction = elapsed / s.seconds
            scale = min(1.0, (iteration + 1) / s.warmup) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * fraction)))
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = peak * scale
            loss, _, _ = self.loss(batch, s.steps)
            loss.backward()
            norm = nn.utils.clip_grad_norm_([*matrices, *others], 1.0)
            for parameter in (*matrices, *others):
                # a batch whose gradient overflowed is skipped, without waiting for the device
                parameter.grad = torch.where(norm.isfinite(), parameter.grad, 0.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            running = loss.detach() if running is None else running * 0.98 + loss.detach() * 0.02
            iteration += 1
            seen += batch.ids.numel()
            if elapsed >= next_check:
                next_check = elapsed + s.validate_every_s
                held, chains = self.validate(128, s.steps)
                greedy = report(chains).get("T=0", {})
                self.log(
                    self.kind, seconds=round(elapsed, 1), iteration=iteration, epoch=round(epoch, 3),
                    padded_tokens=seen, loss=round(float(running), 4), validation_loss=round(held, 4),
                    structured_greedy=greedy.get("structured"), other_greedy=greedy.get("other"),
                )  # fmt: skip
                self.save_raw(out)
        held, chains = self.validate(len(self.validation), 5)
        self.save_raw(out)
        tensors, metadata = self.export()
        metadata |= {
            "kind": self.kind, "seed": s.seed, "train_seconds": s.seconds, "iterations": iteration,
            "epochs": round(epoch, 3), "sequences": len(self.training), "corpus_tokens": int(self.corpus.starts[-1]),
        }  # fmt: skip
        path = out / f"{self.kind}.safetensors"
        weights.write(path, tensors, metadata)
        self.log(
            self.kind, final=True, seconds=round(time.monotonic() - begun, 1), iteration=iteration,
            epoch=round(epoch, 3), validation_loss=round(held, 4), bytes=path.stat().st_size,
            report=report(chains, (2, 3, 4, 5)),
        )  # fmt: skip
        # what users get is the 8-bit form: validate that as well
        self.load_shipped(weights.read(path)[0])
        held, chains = self.validate(len(self.validation), 5)
        self.log(self.kind, final_8bit=True, validation_loss=round(held, 4), report=report(chains))

    def save_raw(self, out: Path) -> None:
        """The parameters in bf16, so that a cut-off run is not lost; at most 16 MiB a file."""
        from safetensors.torch import save_file

        parts: list[dict[str, Tensor]] = [{}]
        size = 0
        for name, tensor in self.export()[0].items():
            stored = (
                tensor.detach().to(torch.bfloat16 if tensor.is_floating_point() else torch.int32).cpu().contiguous()
            )
            size += stored.nbytes
            if size > 15 << 20 and parts[-1]:
                parts.append({})
                size = stored.nbytes
            parts[-1][name] = stored
        for at, part in enumerate(parts):
            save_file(part, str(out / f"{self.kind}-raw-{at}.safetensors"))

    def load_shipped(self, tensors: dict[str, Tensor]) -> None:
        """Put an exported file's tensors back into the model."""
        raise NotImplementedError


class Eagle3Trainer(Trainer):
    kind = "eagle3"
    model: Eagle3Head

    def __init__(self, target: Target, corpus: Corpus, settings: TrainSettings, log: Log) -> None:
        super().__init__(target, corpus, settings, log)
        size = min(settings.draft_vocab, target.shape.vocab)
        kept = torch.from_numpy(self.frequency_order[:size].copy())
        self.model = Eagle3Head(target.shape, kept).to(target.device)
        self.model.start_from(target)
        self.aux = default_aux_layers(target.shape.layers)
        coverage = {str(n): round(self.coverage(n), 5) for n in (4096, 6144, 8192, 10240, 12288, 16384)}
        parameters = sum(p.numel() for p in self.model.parameters())
        log(self.kind, draft_vocab=size, coverage=coverage, parameters=parameters)

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        matrices = [p for n, p in self.model.named_parameters() if p.dim() == 2 and n != "lm_head"]
        return matrices, [p for n, p in self.model.named_parameters() if p.dim() == 1 or n == "lm_head"]

    def loss(self, batch: Batch, steps: int) -> tuple[Tensor, list[Tensor], Tensor]:
        aux, last = self.target.forward(batch.ids, self.aux)
        at, next_ids = self.places(batch, steps + 1)
        with torch.no_grad():
            picked = last.reshape(-1, last.shape[-1])[at]
            probs = self.teacher(picked)
        loss, accepted = self.model.draft(
            aux, batch.ids, self.target.embedding, Rows(at, next_ids, *probs), steps, sharpen=self.settings.sharpen
        )
        return loss, accepted, at

    def teacher(self, picked: Tensor) -> tuple[Tensor, Tensor]:
        """The target's distribution over the draft vocabulary (renormalized), and its arg-max there."""
        rows = self.target.embedding[self.model.kept]
        if picked.is_cuda and picked.dtype != torch.float32:
            logits = torch.mm(picked, rows.t(), out_dtype=torch.float32)
        else:
            logits = F.linear(picked, rows).float()
        return logits.softmax(-1).to(picked.dtype), logits.argmax(-1)

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The output layer is stored as its difference from the target's rows, which 8 bits hold more finely."""
        m, target = self.model, self.target
        tensors = {name: getattr(m, name) for name in CHECKPOINT_NAMES}
        tensors["lm_head_change"] = m.lm_head - target.embedding[m.kept].float()
        tensors["kept"] = m.kept
        return tensors, {"aux_layers": list(self.aux), "target": target_facts(target)}

    @torch.no_grad()
    def load_shipped(self, tensors: dict[str, Tensor]) -> None:
        for name in CHECKPOINT_NAMES:
            getattr(self.model, name).copy_(tensors[name])
        rows = self.target.embedding[self.model.kept].float()
        self.model.lm_head.copy_(rows + tensors["lm_head_change"].to(rows.device))


class SmallTrainer(Trainer):
    kind = "draft_model"
    model: SmallLlama

    def __init__(
        self, target: Target, corpus: Corpus, settings: TrainSettings, log: Log, size: SmallSize | None = None
    ) -> None:
        super().__init__(target, corpus, settings, log)
        self.size = size or SmallSize()
        shape = Shape.from_config(self.size.config(target.config))
        frequent = torch.from_numpy(self.frequency_order[: settings.frequent].copy()).to(target.device)
        self.model = SmallLlama(shape, frequent.cpu(), target.embedding.cpu()).to(target.device)
        self.model.start_from(target)
        parameters = (
            target.shape.vocab * shape.hidden + sum(p.numel() for p in self.model.layers.parameters()) + shape.hidden
        )
        log(self.kind, parameters=parameters, frequent_coverage=round(self.coverage(settings.frequent), 5))

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        matrices = [p for p in self.model.layers.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.layers.parameters() if p.dim() == 1]
        return matrices, [*vectors, self.model.norm, self.model.projection, self.model.correction]

    def loss(self, batch: Batch, steps: int) -> tuple[Tensor, list[Tensor], Tensor]:
        _, last = self.target.forward(batch.ids)
        at, next_ids = self.places(batch, steps + 1)
        with torch.no_grad():
            logits = self.target.logits(last.reshape(-1, last.shape[-1])[at])
            probs, best = logits.softmax(-1).to(last.dtype), logits.argmax(-1)
            del logits
        embedding = self.model.embedding()
        hidden = self.model(batch.ids, embedding, self.target.dtype)
        weight = torch.full((len(at),), 1 / max(1, len(at)), device=at.device)
        loss, chosen = distillation_loss(
            hidden.reshape(-1, hidden.shape[-1])[at], embedding, probs, best, weight, self.settings.sharpen
        )
        right = torch.zeros(batch.ids.numel(), dtype=torch.bool, device=at.device)
        right[at] = chosen == next_ids
        accepted = [right[at]]
        for step in range(1, steps):
            accepted.append(accepted[-1] & right[at - step])
        return loss, accepted, at

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        m = self.model
        tensors = {
            f"layers.{i}.{name}": getattr(layer, name) for i, layer in enumerate(m.layers) for name in LAYER_NAMES
        }
        tensors |= {"norm": m.norm, "projection": m.projection, "correction": m.correction, "frequent": m.frequent}
        size = {name: getattr(self.size, name) for name in SmallSize.__slots__}
        return tensors, {"size": size, "target": target_facts(self.target)}

    @torch.no_grad()
    def load_shipped(self, tensors: dict[str, Tensor]) -> None:
        for index, layer in enumerate(self.model.layers):
            for name in LAYER_NAMES:
                getattr(layer, name).copy_(tensors[f"layers.{index}.{name}"])
        for name in ("norm", "projection", "correction"):
            getattr(self.model, name).copy_(tensors[name])


TRAINERS: dict[str, type[Eagle3Trainer] | type[SmallTrainer]] = {"eagle3": Eagle3Trainer, "draft_model": SmallTrainer}


def target_facts(target: Target) -> dict[str, int]:
    """What a target must have for the drafter to fit."""
    s = target.shape
    return {"vocab_size": s.vocab, "hidden_size": s.hidden, "num_hidden_layers": s.layers}
