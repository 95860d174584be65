"""The command line: bad input ends in one line and an exit code, never in a traceback."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from app.cli import build_parser, main, settings_from
from app.settings import Settings


def run(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = one_line(run("serve", "--pair", "scripted", "--port", str(port)))
    assert str(port) in line
    assert "--port" in line


def test_an_address_of_another_machine() -> None:
    assert "192.0.2.1" in one_line(run("serve", "--pair", "scripted", "--host", "192.0.2.1"))


def test_an_unknown_pair_names_the_nearest() -> None:
    assert "embedded" in one_line(run("serve", "--pair", "embeded", "--port", "0"))


def test_a_pair_file_that_is_not_there(tmp_path: Path) -> None:
    assert "pair.toml" in one_line(run("serve", "--pair", str(tmp_path / "pair.toml"), "--port", "0"))


def test_a_pair_file_with_an_unknown_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('title = "x"\nmetod = "ngram"\nnum_speculative_tokens = 3\n[target]\npath = "/nowhere"\n')
    line = one_line(run("serve", "--pair", str(file), "--port", "0"))
    assert "metod" in line
    assert "method" in line


def test_an_unknown_scripted_option_names_the_nearest() -> None:
    line = one_line(run("serve", "--pair", "scripted", "--scripted", "step_m=3", "--port", "0"))
    assert "step_ms" in line


def test_scripted_options_need_scripted_lanes() -> None:
    assert "--pair scripted" in one_line(run("serve", "--scripted", "step_ms=3", "--port", "0"))


def test_a_damaged_model_is_found_before_anything_loads(tmp_path: Path) -> None:
    """A model folder with a wrong byte: one line that says how to build it again."""
    from app.pairs import embedded

    folder = embedded.path(tmp_path)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"not a model")
    line = one_line(run("serve", "--pair", "embedded", "--cache-dir", str(tmp_path), "--port", "0"))
    assert "pairs build embedded" in line


@pytest.mark.parametrize("arguments", [["serve", "--port", "70000"], ["serve", "-k", "0"], ["nothing"], []])
def test_wrong_options_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_every_setting_is_an_option_of_serve() -> None:
    """No setting that only the source knows; the defaults agree."""
    options = build_parser().parse_args(["serve"])
    assert settings_from(options) == Settings()
    names = {name.replace("abandon_after_s", "abandon_after") for name in Settings.__dataclass_fields__}
    missing = names - set(vars(options)) - {"body_limit_bytes", "keep_runs", "score_limit_tokens"}
    assert not missing


def test_the_page_is_up_within_seconds_and_ctrl_c_ends_it() -> None:
    """Engines that take a minute to start don't hold up the page; the interrupt ends all of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "serve", "--pair", "scripted", "--scripted", "start_s=60", "--port", str(port)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stderr is not None
        while f"http://127.0.0.1:{port}" not in process.stderr.readline():
            assert process.poll() is None
        for _ in range(100):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
                    assert answer.status == 200
                break
            except OSError:
                time.sleep(0.1)
        else:
            raise AssertionError("the page did not come up")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) in (0, -signal.SIGINT, 130)
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
