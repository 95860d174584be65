"""Train the embedded pair's drafters: sample the target, then train each drafter on the samples.

    python -m app.drafters sample --target TARGET --seconds 150 --out corpus.npz
    python -m app.drafters train --kind eagle3 --target TARGET --corpus corpus.npz --seconds 600 --out trained
    python -m app.drafters train --kind draft_model --target TARGET --corpus corpus.npz --seconds 600 --out trained
    python -m app.drafters ship trained --target TARGET

TARGET is the folder of the embedded target's checkpoint. Sampling and training want a GPU; on the
CPU they run, for tests. ``ship`` copies the results into the package and writes the manifest.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from app.errors import SpecduelError

# streams of prompts that a run draws from; part of what a seed means
SHARDS = 8


def _logger(path: Path | None) -> Callable[..., None]:
    begun = time.monotonic()

    def log(what: str, **values: Any) -> None:
        line = json.dumps({"what": what, "t_s": round(time.monotonic() - begun, 1), **values})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if path is not None:
            with path.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")

    return log


def _device(name: str) -> Any:
    """The device by name, made the current one: Triton launches its kernels there."""
    import torch

    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _encoded_shard(target: Path, seed: int, long: bool, count: int) -> list[tuple[list[int], str]]:
    from transformers import AutoTokenizer

    from app.drafters.prompts import training_prompts
    from app.drafters.sample import encode_prompts

    return encode_prompts(AutoTokenizer.from_pretrained(target), training_prompts(seed, long=long), count)


def _encoded_prompts(options: argparse.Namespace) -> list[tuple[list[int], str]]:
    """Prompts of eight streams, made and tokenized side by side, in a fixed order."""
    with ProcessPoolExecutor(SHARDS) as pool:
        each = -(-options.prompts // SHARDS)
        parts = [
            pool.submit(_encoded_shard, options.target, options.seed * SHARDS + i, options.long, each)
            for i in range(SHARDS)
        ]
        return [pair for part in parts for pair in part.result()]


def _sample(options: argparse.Namespace) -> None:
    import torch

    from app.drafters.corpus import Corpus
    from app.drafters.sample import Sampler, SampleSettings
    from app.drafters.target import Target

    log = _logger(options.log)
    prompts = _encoded_prompts(options)
    log("prompts", count=len(prompts))
    device = _device(options.device)
    target = Target(options.target, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    eos = target.config["eos_token_id"]
    log("target", device=options.device)
    if options.long:
        settings = SampleSettings(rows=options.rows or 384, max_new=options.max_new or 224, max_prompt=2048)
    else:
        settings = SampleSettings(rows=options.rows or 4096, max_new=options.max_new or 320)
    sampler = Sampler(target, settings, eos, options.seed)
    rows = sampler.run(prompts, options.seconds, log)
    corpus = Corpus.build(rows)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    corpus.save(options.out)
    log("sampled", sequences=len(corpus), tokens=int(corpus.starts[-1]),
        response_tokens=int((corpus.lengths - corpus.prompt_lengths).sum()))  # fmt: skip


def _train(options: argparse.Namespace) -> None:
    import torch

    from app.drafters.corpus import Corpus
    from app.drafters.target import Target
    from app.drafters.train import TRAINERS, TrainSettings

    log = _logger(options.log)
    device = _device(options.device)
    target = Target(options.target, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    corpus = Corpus.load(options.corpus)
    log("corpus", sequences=len(corpus), tokens=int(corpus.starts[-1]))
    settable = ("batch_tokens", "muon_lr", "adam_lr", "draft_vocab", "steps", "validate_every_s")
    extra = {name: getattr(options, name) for name in settable if getattr(options, name) is not None}
    trainer = TRAINERS[options.kind](
        target, corpus, TrainSettings(seconds=options.seconds, seed=options.seed, **extra), log
    )
    options.out.mkdir(parents=True, exist_ok=True)
    trainer.run(options.out)


def _ship(options: argparse.Namespace) -> None:
    from app.drafters import weights
    from app.drafters.install import tokenizer_fingerprint

    weights.WEIGHTS.mkdir(exist_ok=True)
    manifest: dict[str, dict[str, Any]] = {}
    for kind in ("eagle3", "draft_model"):
        path = weights.WEIGHTS / f"{kind}.safetensors"
        tensors, metadata = weights.read(options.trained / path.name)
        if kind == "eagle3" and options.draft_vocab:
            # the kept tokens stand in order of frequency: a smaller draft vocabulary is a cut
            tensors = {
                n: t[: options.draft_vocab] if n in ("kept", "lm_head_change") else t for n, t in tensors.items()
            }
        weights.write(path, tensors, metadata)
        wanted = dict(metadata["target"])
        if kind == "draft_model":
            del wanted["num_hidden_layers"]
        manifest[kind] = {
            "file": path.name, "bytes": path.stat().st_size, "sha256": weights.sha256(path),
            "target": wanted, "tokenizer_sha256": tokenizer_fingerprint(options.target),
        }  # fmt: skip
    text = json.dumps(manifest, indent=2) + "\n"
    (weights.WEIGHTS / weights.MANIFEST).write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def _card(options: argparse.Namespace) -> None:
    from app.drafters import card

    card.write(options.docs)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="specduel drafter", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = result.add_subparsers(required=True, metavar="command")
    sample = commands.add_parser("sample", help="sample responses of the target to made-up prompts")
    train = commands.add_parser("train", help="train one drafter on sampled responses")
    for command in (sample, train):
        command.add_argument("--target", type=Path, required=True, help="folder of the target's checkpoint")
        command.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu")
        command.add_argument("--seconds", type=float, required=True, help="time to spend, loading not counted")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--log", type=Path, help="append JSON lines here as well")
        command.add_argument("--out", type=Path, required=True)
    sample.add_argument("--prompts", type=int, default=200_000, help="how many prompts to make, at most")
    sample.add_argument("--rows", type=int, help="sequences that decode together")
    sample.add_argument("--max-new", type=int, help="new tokens a response, at most")
    sample.add_argument("--long", action="store_true", help="prompts with a long context only")
    sample.set_defaults(run=_sample)
    train.add_argument("--kind", choices=("eagle3", "draft_model"), required=True)
    train.add_argument("--corpus", type=Path, nargs="+", required=True)
    train.add_argument("--batch-tokens", type=int)
    train.add_argument("--muon-lr", type=float)
    train.add_argument("--adam-lr", type=float)
    train.add_argument("--draft-vocab", type=int)
    train.add_argument("--steps", type=int)
    train.add_argument("--validate-every-s", type=float)
    train.set_defaults(run=_train)
    ship = commands.add_parser("ship", help="copy trained drafters into the package and write their hashes")
    ship.add_argument("trained", type=Path, help="folder that training wrote")
    ship.add_argument("--target", type=Path, required=True, help="folder of the target's checkpoint")
    ship.add_argument("--draft-vocab", type=int, help="cut the EAGLE-3 head's vocabulary to the most frequent tokens")
    ship.set_defaults(run=_ship)
    card = commands.add_parser("card", help="make the tables of docs/drafters.md from docs/results")
    card.add_argument("docs", type=Path)
    card.set_defaults(run=_card)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    options = parser().parse_args(argv)
    try:
        options.run(options)
    except SpecduelError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0
