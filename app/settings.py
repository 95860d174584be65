"""Settings of one server, as one frozen value. ``create_app(settings)`` builds everything from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """What a server is started with; each field is an option of ``specduel serve``.

    ``pair`` is a catalogue name, a TOML file's path, "scripted", or None for the machine's default.
    ``method`` and ``num_speculative_tokens`` override the pair's. ``scripted`` configures the scripted
    lanes ("step_ms=20,speculative.step_ms=25"). ``abandon_after_s``: a run is cancelled when its last
    viewer left that long ago (0: never).
    """

    pair: str | None = None
    method: str | None = None
    num_speculative_tokens: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    cache_dir: Path | None = None
    prompts_dir: Path | None = None
    scripted: str = ""
    body_limit_bytes: int = 1_000_000
    max_tokens: int = 4096
    keep_runs: int = 32
    abandon_after_s: float = 60.0
    score_limit_tokens: int = 4096
    price_per_hour: float | None = None
    engine_logs: bool = False
