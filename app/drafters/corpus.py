"""Sampled sequences: on disk, and as padded batches on a device."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from app.drafters.prompts import CATEGORIES


@dataclass(frozen=True, slots=True)
class Corpus:
    """Prompts with their responses, flat.

    ``ids`` holds all token ids after one another (uint16: the vocabulary has 49,152 entries);
    sequence ``i`` is ``ids[starts[i]:starts[i + 1]]``, its first ``prompt_lengths[i]`` tokens the
    prompt. ``temperatures`` and ``categories`` (indices into ``CATEGORIES``) have one entry each.
    """

    ids: np.ndarray
    starts: np.ndarray
    prompt_lengths: np.ndarray
    temperatures: np.ndarray
    categories: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> np.ndarray:
        lengths: np.ndarray = np.diff(self.starts)
        return lengths

    def response_counts(self, vocab: int) -> np.ndarray:
        """How often each token id occurs in responses ``[vocab]``."""
        offset = np.arange(len(self.ids)) - np.repeat(self.starts[:-1], self.lengths)
        response = offset >= np.repeat(self.prompt_lengths, self.lengths)
        counts: np.ndarray = np.bincount(self.ids[response], minlength=vocab)
        return counts

    def save(self, path: Path) -> None:
        np.savez(path, ids=self.ids, starts=self.starts, prompt_lengths=self.prompt_lengths,
                 temperatures=self.temperatures, categories=self.categories)  # fmt: skip

    @classmethod
    def load(cls, paths: Sequence[Path]) -> Corpus:
        """Read one or more files as one corpus, in the order given."""
        parts = [np.load(path) for path in paths]
        lengths = np.concatenate([np.diff(part["starts"]) for part in parts])
        return cls(
            np.concatenate([part["ids"] for part in parts]),
            np.concatenate([[0], np.cumsum(lengths)]),
            *(np.concatenate([part[n] for part in parts]) for n in ("prompt_lengths", "temperatures", "categories")),
        )

    @classmethod
    def build(cls, rows: Sequence[tuple[Sequence[int], int, float, str]]) -> Corpus:
        """From (token ids, prompt length, temperature, category) of each sequence."""
        lengths = [len(ids) for ids, _, _, _ in rows]
        return cls(
            np.concatenate([np.asarray(ids, dtype=np.uint16) for ids, _, _, _ in rows]),
            np.concatenate([[0], np.cumsum(lengths)]),
            np.asarray([row[1] for row in rows], dtype=np.int32),
            np.asarray([row[2] for row in rows], dtype=np.float32),
            np.asarray([CATEGORIES.index(row[3]) for row in rows], dtype=np.int8),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """``ids`` ``[batch, length]`` padded with 0 on the right; ``lengths`` and ``prompts`` ``[batch]``;
    ``index`` the sequences' places in the corpus (on the CPU)."""

    ids: Tensor
    lengths: Tensor
    prompts: Tensor
    index: np.ndarray


class Loader:
    """Batches of one token budget, sequences of like length together."""

    def __init__(self, corpus: Corpus, device: torch.device, tokens: int, *, round_to: int = 64) -> None:
        self.corpus, self.tokens, self.round_to = corpus, tokens, round_to
        self.flat = torch.from_numpy(corpus.ids.astype(np.int32)).to(device)
        self.starts = torch.from_numpy(corpus.starts[:-1].astype(np.int64)).to(device)
        self.lengths = torch.from_numpy(corpus.lengths.astype(np.int64)).to(device)
        self.prompts = torch.from_numpy(corpus.prompt_lengths.astype(np.int64)).to(device)
        self.device = device

    def batch(self, index: np.ndarray) -> Batch:
        at = torch.from_numpy(index).to(self.device)
        lengths = self.lengths[at]
        longest = int(self.corpus.lengths[index].max())
        width = -(-longest // self.round_to) * self.round_to
        offset = torch.arange(width, device=self.device)
        inside = offset[None] < lengths[:, None]
        places = (self.starts[at][:, None] + offset[None]).clamp(max=len(self.flat) - 1)
        return Batch(torch.where(inside, self.flat[places], 0).long(), lengths, self.prompts[at], index)

    def groups(self, order: np.ndarray, rng: random.Random | None) -> list[np.ndarray]:
        """Cut ``order`` into batches of one padded length each. With ``rng``: shuffled, batches in random order."""
        if rng is not None:
            order = np.random.default_rng(rng.getrandbits(32)).permutation(order)
        widths = -(-self.corpus.lengths[order] // self.round_to) * self.round_to
        groups: list[np.ndarray] = []
        for width in np.unique(widths):
            members = order[widths == width]
            size = max(1, self.tokens // int(width))
            groups.extend(members[at : at + size] for at in range(0, len(members), size))
        if rng is not None:
            rng.shuffle(groups)
        return groups

    def epochs(self, order: np.ndarray, seed: int) -> Iterator[tuple[float, Batch]]:
        """Batches without end, each with the number of epochs begun so far (a fraction counts the current one)."""
        rng = random.Random(seed)
        epoch = 0
        while True:
            groups = self.groups(order, rng)
            for at, group in enumerate(groups):
                yield epoch + at / len(groups), self.batch(group)
            epoch += 1
