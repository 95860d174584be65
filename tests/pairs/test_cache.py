from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from app.errors import PairError
from app.pairs import cache


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SPECDUEL_CACHE": "/data/duel", "XDG_CACHE_HOME": "/c", "HOME": "/home/u"}, "/data/duel"),
        ({"XDG_CACHE_HOME": "/c", "HOME": "/home/u"}, "/c/specduel"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/u"}, "/home/u/.cache/specduel"),
        ({"SPECDUEL_CACHE": "", "HOME": "/home/u"}, "/home/u/.cache/specduel"),
    ],
)
def test_cache_dir(environ: dict[str, str], expected: str) -> None:
    assert cache.cache_dir(environ) == Path(expected)


def test_replacing_swaps_at_the_end_only(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "old").touch()
    with cache.replacing(folder) as partial:
        (partial / "new").touch(0o600)
        assert (folder / "old").exists()
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "new").stat().st_mode & 0o777 == 0o644


def test_replacing_keeps_the_old_one_on_failure(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(RuntimeError), cache.replacing(folder):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == [folder]


def test_replacing_removes_what_a_killed_build_left(tmp_path: Path) -> None:
    (tmp_path / ".model.abc.partial").mkdir()
    with cache.replacing(tmp_path / "model"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_unwritable_cache_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PairError, match=r"can't be written.*SPECDUEL_CACHE"), cache.locked(tmp_path / "file", "x"):
        pass


def _hold(folder: Path, log: Path) -> None:
    with cache.locked(folder, "x"):
        with log.open("a") as stream:
            stream.write("in ")
        time.sleep(0.2)
        with log.open("a") as stream:
            stream.write("out ")


def test_two_processes_take_turns(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    workers = [context.Process(target=_hold, args=(tmp_path, log)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert log.read_text() == "in out in out "
