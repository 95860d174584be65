"""specduel: a live, side-by-side demo of speculative decoding on vLLM."""

__version__ = "0.1.0"
