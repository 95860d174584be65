"""Sampling on the CPU while speculating: a function of vLLM 0.32 that is broken there, found and mended.

The rejection sampler expands each request's temperature, top-p and top-k to one value a drafted token. Without
Triton, vLLM's CPU backend replaces that kernel by a C++ one that takes 64-bit integers, and hands it *copies* of
float tensors: the expanded values stay uninitialized memory, and sampled text is garbage. Greedy decoding never
expands anything and is right. Where the self-check shows this, the kernel is replaced by plain torch.
"""

from __future__ import annotations

import os
import random
from typing import Any, Literal

SWITCH = "SPECDUEL_CPU_MEND"
KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"

Outcome = Literal["vLLM's", "mended", "broken"]


def expand(
    output: Any,
    input_val: Any,
    cu_num_tokens: Any,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write one value a token into ``output``: request i's, for its share of the tokens.

    Takes the arguments of vLLM's kernel of this name.

    Args:
        output: [tokens], written in place.
        input_val: [requests], the values to repeat.
        cu_num_tokens: [requests], tokens up to and including each request.
        replace_from: a value to be replaced (0, the temperature of greedy decoding).
        replace_to: what it becomes.
        MAX_NUM_TOKENS: the kernel's loop bound, not needed here.
    """
    counts = cu_num_tokens.clone()
    counts[1:] -= cu_num_tokens[:-1]
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    output.copy_(values.repeat_interleave(counts.long()))


def expands_rightly() -> bool:
    """Call vLLM's own expansion with known values, and compare.

    The values are new each time: freed memory still holds what an earlier check wrote.
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    ends = torch.tensor([2, 5, 6], dtype=torch.int32)
    values = [random.uniform(0.1, 2.0) for _ in range(2)]  # noqa: S311 - no secret
    temperatures = torch.tensor([values[0], 0.0, values[1]], dtype=torch.float32)
    right = torch.tensor([values[0]] * 2 + [1.0] * 3 + [values[1]], dtype=torch.float32)
    got = rejection_sampler.expand_batch_to_tokens(temperatures, ends, 6, replace_from=0, replace_to=1)
    whole = [random.randrange(1, 1 << 20) for _ in range(3)]  # noqa: S311
    counts = torch.tensor(whole, dtype=torch.int32)
    got_counts = rejection_sampler.expand_batch_to_tokens(counts, ends, 6)
    right_counts = [whole[0]] * 2 + [whole[1]] * 3 + [whole[2]]
    return bool(torch.equal(got, right)) and got_counts.tolist() == right_counts


def ensure() -> Outcome:
    """Check the expansion in this process, and mend it where it is wrong.

    Returns:
        "vLLM's" where it is right as it is, "mended" where it had to be replaced, "broken" where it is wrong
        and the environment variable SPECDUEL_CPU_MEND is "off", or where the replacement did not help.
    """
    from vllm.triton_utils import dispatcher

    ours = getattr(dispatcher, "_registry", {}).get(KERNEL, (None, None))[1] is expand
    if expands_rightly():
        return "mended" if ours else "vLLM's"
    if os.environ.get(SWITCH) == "off":
        return "broken"
    dispatcher.register_kernels({KERNEL: expand})
    return "mended" if expands_rightly() else "broken"


def install() -> None:
    """Mend right after vLLM has put its CPU kernels in place, in this process. Idempotent."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = getattr(platform, "register_triton_kernel_overrides", None)
    if not current_platform.is_cpu() or original is None or hasattr(original, "__wrapped__"):
        return

    def register_triton_kernel_overrides(cls: type) -> None:
        original()
        ensure()

    register_triton_kernel_overrides.__wrapped__ = original  # type: ignore[attr-defined]
    platform.register_triton_kernel_overrides = classmethod(register_triton_kernel_overrides)
