"""Sample the target's responses: many sequences at once, each at its own temperature.

A fixed number of rows decode together. A row whose response ended takes the next prompt, so the
batch stays full. On a GPU the decode step is one CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from app.drafters.prompts import TrainingPrompt
from app.drafters.target import Target


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """``rows`` sequences decode together, up to ``max_new`` new tokens each, prompts up to ``max_prompt`` tokens.

    Temperatures are dealt out in turn. ``stride`` decode steps pass between two looks at which rows
    have ended; it costs idle rows, but saves synchronizing with the device.
    """

    rows: int = 4096
    max_new: int = 320
    max_prompt: int = 224
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 0.0, 1.0)
    stride: int = 16
    prefill_tokens: int = 65536


def encode_prompts(tokenizer: Any, prompts: Iterator[TrainingPrompt], count: int) -> list[tuple[list[int], str]]:
    """Token ids, through the chat template with a generation prompt, and category of ``count`` prompts.

    The template runs once for each system prompt, not once for each prompt: that is what takes time.

    Raises:
        ValueError: the template does more with a user's text than to insert it.
    """

    def render(prompt: TrainingPrompt) -> str:
        text: str = tokenizer.apply_chat_template(prompt.messages(), add_generation_prompt=True, tokenize=False)
        return text

    taken = [next(prompts) for _ in range(count)]
    frames: dict[str | None, tuple[str, str]] = {}
    texts: list[str] = []
    for prompt in taken:
        if prompt.system not in frames:
            head, _, tail = render(replace(prompt, user="\0")).partition("\0")
            if render(prompt) != head + prompt.user + tail:
                raise ValueError("The chat template changes the user's text; render each prompt by itself.")
            frames[prompt.system] = head, tail
        head, tail = frames[prompt.system]
        texts.append(head + prompt.user + tail)
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [(row, prompt.category) for row, prompt in zip(ids, taken, strict=True)]


class Sampler:
    """Holds the KV cache and the decode step for one device."""

    def __init__(self, target: Target, settings: SampleSettings, eos: int, seed: int) -> None:
        self.target, self.settings, self.eos = target, settings, eos
        device, shape, rows = target.device, target.shape, settings.rows
        torch.manual_seed(seed)
        self.capacity = settings.max_prompt + settings.max_new + settings.stride + 1
        cache = (shape.layers, rows, shape.kv_heads, self.capacity, shape.head_dim)
        self.keys = torch.zeros(cache, device=device, dtype=target.dtype)
        self.values = torch.zeros(cache, device=device, dtype=target.dtype)
        self.tokens = torch.zeros(rows, device=device, dtype=torch.int64)
        self.pos = torch.zeros(rows, device=device, dtype=torch.int64)
        self.temperature = torch.zeros(rows, device=device)
        self.done = torch.ones(rows, device=device, dtype=torch.bool)
        self.limit = torch.zeros(rows, device=device, dtype=torch.int64)
        self.out = torch.zeros(rows, self.capacity + 1, device=device, dtype=torch.int64)
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> None:
        """Feed every row's token, draw the next, advance the rows that have not ended."""
        logits = self.target.decode(self.tokens, self.pos, self.keys, self.values)
        # Gumbel-max: arg-max of logits / T + noise samples the softmax at T; no noise is greedy
        noise = -torch.empty_like(logits).exponential_().log_()
        sampled = self.temperature > 0
        scaled = logits / torch.where(sampled, self.temperature, 1.0)[:, None]
        token = (scaled + noise * sampled[:, None]).argmax(-1)
        self.tokens.copy_(torch.where(self.done, self.tokens, token))
        self.pos.copy_(torch.where(self.done, self.pos, self.pos + 1))
        rows = torch.arange(len(self.pos), device=self.pos.device)
        self.out[rows, self.pos] = self.tokens
        self.done.logical_or_((self.tokens == self.eos) | (self.pos >= self.limit))

    def capture(self) -> None:
        """Record ``step`` as a CUDA graph; on the CPU there is nothing to do."""
        if self.target.device.type != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def admit(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], temperatures: Sequence[float]) -> None:
        """Prefill prompts into rows. The last prompt token is fed again by the next step."""
        order = sorted(range(len(rows)), key=lambda i: len(prompts[i]))
        while order:
            take: list[int] = []
            while order and (len(take) + 1) * len(prompts[order[0]]) <= max(
                self.settings.prefill_tokens, len(prompts[order[0]])
            ):
                take.append(order.pop(0))
            width = max(len(prompts[i]) for i in take)
            width = -(-width // 16) * 16
            padded = torch.zeros(len(take), width, dtype=torch.int64)
            for at, i in enumerate(take):
                padded[at, : len(prompts[i])] = torch.tensor(prompts[i])
            device = self.target.device
            padded = padded.to(device)
            place = torch.tensor([rows[i] for i in take], device=device)
            lengths = torch.tensor([len(prompts[i]) for i in take], device=device)
            kv: list[tuple[Tensor, Tensor]] = []
            self.target.forward(padded, kv=kv)
            for layer, (key, value) in enumerate(kv):
                self.keys[layer, place, :, :width] = key
                self.values[layer, place, :, :width] = value
            self.out[place, :width] = padded
            self.pos[place] = lengths - 1
            self.tokens[place] = padded[torch.arange(len(take), device=device), lengths - 1]
            self.limit[place] = lengths - 1 + self.settings.max_new
            self.temperature[place] = torch.tensor([temperatures[i] for i in take], device=device)
            self.done[place] = False

    def run(
        self,
        prompts: Sequence[tuple[list[int], str]],
        seconds: float,
        log: Callable[..., None],
    ) -> list[tuple[list[int], int, float, str]]:
        """Sample until the prompts or the time run out.

        Responses still in flight at the end are dropped when shorter than 8 tokens, else kept as they stand.

        Returns:
            Token ids, prompt length, temperature, and category of each sequence.
        """
        s = self.settings
        results: list[tuple[list[int], int, float, str]] = []
        queue = [(ids, category) for ids, category in prompts if len(ids) <= s.max_prompt]
        at = 0
        holder: list[tuple[int, float, str] | None] = [None] * s.rows
        begun = time.monotonic()
        steps = 0

        def collect(rows: list[int]) -> None:
            if not rows:
                return
            index = torch.tensor(rows, device=self.pos.device)
            ids = self.out[index].cpu().numpy()
            ends = (self.pos[index] + 1).tolist()
            for row, line, end in zip(rows, ids, ends, strict=True):
                held = holder[row]
                holder[row] = None
                if held is not None and end - held[0] >= 8:
                    results.append((line[:end].astype("uint16"), *held))

        next_log = 0.0
        while True:
            elapsed = time.monotonic() - begun
            free = self.done.nonzero().flatten().tolist()
            collect([row for row in free if holder[row] is not None])
            if elapsed >= seconds or (at >= len(queue) and len(free) == s.rows):
                break
            batch = queue[at : at + len(free)]
            rows = free[: len(batch)]
            temperatures = [s.temperatures[(at + i) % len(s.temperatures)] for i in range(len(batch))]
            at += len(batch)
            if batch:
                self.admit(rows, [ids for ids, _ in batch], temperatures)
                for row, (ids, category), temperature in zip(rows, batch, temperatures, strict=True):
                    holder[row] = (len(ids), temperature, category)
            if self.graph is None and steps == 0 and self.target.device.type == "cuda":
                self.capture()
                steps += 3
            for _ in range(s.stride):
                if self.graph is not None:
                    self.graph.replay()
                else:
                    self.step()
            steps += s.stride
            if elapsed >= next_log:
                next_log = elapsed + 10
                total = sum(len(row[0]) for row in results)
                log(
                    "sample",
                    seconds=round(elapsed, 1),
                    steps=steps,
                    sequences=len(results),
                    tokens=total,
                    queued=len(queue) - at,
                )
        collect([row for row in range(s.rows) if holder[row] is not None])
        return results
