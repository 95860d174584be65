from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app import doctor
from app.doctor import Finding
from app.engines.machine import Gpu, Machine
from app.engines.plan import LaneSpec
from app.settings import Settings

CPU = Machine("cpu", "A CPU (2 cores)", (0, 1))
GPU = Machine("cuda", "A GPU", (0, 1), (Gpu("0", "A GPU", 80 << 30),))

BASELINE = LaneSpec("baseline", "m", "cpu", {"kv_cache_memory_bytes": 1 << 30}, target_weights_bytes=2 << 30)
LANES = (BASELINE, replace(BASELINE, name="speculative", draft_weights_bytes=1 << 30))


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM and torch are fine, whatever is installed where the test runs."""
    monkeypatch.setattr(doctor, "check_vllm", lambda: Finding("ok", "vllm", "0.32.0"))
    monkeypatch.setattr(doctor, "check_torch", lambda: Finding("ok", "torch", "2.13.0"))
    monkeypatch.setattr(doctor, "check_device", lambda machine: Finding("ok", "device", machine.name))
    monkeypatch.setattr(doctor, "detect", lambda: CPU)


def report(settings: Settings) -> tuple[int, list[str]]:
    lines: list[str] = []
    code = doctor.run(settings, write=lines.append)
    return code, lines


def test_a_missing_model_fails_and_says_what_to_do(healthy: None, tmp_path: Path) -> None:
    code, lines = report(Settings(pair="embedded", method="ngram", port=0, cache_dir=tmp_path))
    assert code == 1
    (line,) = [line for line in lines if line.startswith("fail")]
    assert "models" in line and "specduel pairs build embedded" in line
    assert lines[-1] == "\nThe demo would not start here: 1 thing to mend."


def test_a_whole_pair_is_fine(healthy: None, tmp_path: Path) -> None:
    from tests.pairs.checkpoints import write_model

    write_model(tmp_path / "target", num_attention_heads=2, max_position_embeddings=64)
    pair = tmp_path / "mine.toml"
    pair.write_text('title = "Mine"\nmethod = "ngram"\nnum_speculative_tokens = 2\n[target]\npath = "target"\n')
    code, lines = report(Settings(pair=str(pair), port=0))
    assert (code, lines[-1]) == (0, "\nThe demo can start here.")
    assert any(line.startswith("  ok  target") and str(tmp_path) in line for line in lines)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(pair="embeded"), "did you mean 'embedded'?"),
        (Settings(pair="embedded", method="medusa"), "the method 'medusa' is unknown"),
        (Settings(pair="qwen3-8b"), "needs an NVIDIA GPU"),
    ],
)
def test_a_mistake_in_the_choice_is_a_finding(healthy: None, settings: Settings, message: str) -> None:
    code, lines = report(replace(settings, port=0))
    assert code == 1
    assert any(line.startswith("fail  models") and message in line for line in lines)


def test_a_port_in_use_fails(port: int) -> None:
    code, lines = report(Settings(pair="scripted", port=port))
    assert code == 1
    assert any(line.startswith("fail  port") and "Choose another with --port" in line for line in lines)


def test_scripted_lanes_need_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "check_vllm", lambda: pytest.fail("asked for vLLM"))
    assert report(Settings(pair="scripted", port=0))[0] == 0


@pytest.mark.parametrize(("free", "status"), [(12, "ok"), (8, "fail")])
def test_memory_counts_both_lanes(monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    # 2 + 1 GiB and 2 + 1 + 1 GiB, and two engines' processes: 7 GiB + 3.0 GB
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": free << 30}))
    found = doctor.check_memory(LANES, CPU)
    assert found.status == status
    assert f"about 9.8 GiB needed, {free}.0 GiB free" in found.detail


def test_memory_is_counted_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    both = (replace(LANES[0], kind="cuda", gpu="0"), replace(LANES[1], kind="cuda", gpu="1"))
    two = replace(GPU, gpus=(Gpu("0", "A", None), Gpu("1", "B", None)))
    monkeypatch.setattr(doctor, "gpu_free_bytes", {"0": 6 << 30, "1": 5 << 30}.get)
    found = doctor.check_memory(both, two)
    assert found.status == "fail"
    assert "GPU 0: about 4.9 GiB needed, 6.0 GiB free" in found.detail
    assert "GPU 1: about 5.9 GiB needed, 5.0 GiB free" in found.detail


def test_memory_that_cannot_be_read_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpu_free_bytes", lambda visible: None)
    lanes = (replace(LANES[0], gpu="0"), replace(LANES[1], gpu="0"))
    assert doctor.check_memory(lanes, GPU).status == "ok"
    assert doctor.check_memory((replace(LANES[0], target_weights_bytes=None), LANES[1]), CPU).status == "note"


def test_a_cuda_build_without_a_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cpu_build", lambda: False)
    found = doctor.check_device(CPU)
    assert (found.status, "nvidia-smi" in found.detail) == ("fail", True)


def test_an_unused_gpu_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cpu_build", lambda: True)
    monkeypatch.setattr(doctor, "cpu_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setattr(doctor, "find_gpus", lambda: GPU.gpus)
    found = doctor.check_device(CPU)
    assert found.status == "ok" and "A GPU is not used" in found.detail


def test_a_cpu_without_avx2_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cpu_build", lambda: True)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(doctor, "cpu_flags", lambda: frozenset({"sse4_2"}))
    assert doctor.check_device(CPU).status == "fail"


def test_a_torchvision_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
    monkeypatch.setattr(doctor, "cpu_build", lambda: True)
    monkeypatch.setattr(doctor, "find_spec", lambda name: name == "torchvision" or None)
    monkeypatch.setattr(doctor, "importable", lambda name: False)
    found = doctor.check_torch()
    assert found.status == "fail"
    assert "torchvision can't be imported" in found.detail and "pip uninstall torchvision" in found.detail


def test_importable_asks_another_process() -> None:
    assert doctor.importable("json")
    assert not doctor.importable("no_such_module_anywhere")


def test_the_subjects_of_a_report_are_those_of_a_start(healthy: None, tmp_path: Path) -> None:
    subjects = [finding.subject for finding in doctor.examine(Settings(pair="embedded", cache_dir=tmp_path, port=0))]
    assert subjects == ["python", "vllm", "torch", "device", "pair", "models", "port", "chromium"]
