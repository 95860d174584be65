"""Models made from the embedded target: its drafters, and the stand-in for a large target.

Each has a parent that is built first, and a recipe that writes a checkpoint from it. Around the recipe stands what all
built models share: a lock, a temporary folder, a manifest of hashes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from app.errors import PairError
from app.pairs import builders, cache


@dataclass(frozen=True, slots=True)
class Derived:
    """A model that is made from another built one.

    ``recipe(parent, scratch)`` writes the checkpoint into a folder of its own under ``scratch`` and returns it;
    ``identity()`` is what decides its bytes beside the parent. ``hashed`` is False where reading every byte at each
    start would take too long: then only the files' sizes are checked.
    """

    name: str
    parent: str
    recipe: Callable[[Path, Path], Path]
    identity: Callable[[], Mapping[str, Any]]
    disk_bytes: int
    hashed: bool = True

    @property
    def remedy(self) -> str:
        return f"Build it again with `specduel pairs build {self.name}`."

    def path(self, cache_dir: Path) -> Path:
        """Where the model lies, or would lie, in a cache folder."""
        return cache_dir / "models" / self.name

    def about(self) -> Mapping[str, Any]:
        """What the manifest says of the model's origin."""
        return {"model": self.name, "parent": builders.builder(self.parent).about(), **self.identity()}

    def check(self, folder: Path) -> None:
        """Check a built model. Raises PairError: one line, with what to do."""
        cache.check_manifest(folder, self.about(), remedy=self.remedy, hashes=self.hashed)

    def build(self, cache_dir: Path, *, report: Callable[[str], None], source: Path | None = None) -> Path:
        """Build the model, and its parent first, unless they are there and whole.

        Raises:
            PairError: a file it is made from is missing or damaged, or there is no space.
        """
        if source is not None:
            raise PairError(f"{self.name} is made from the built model {self.parent}; it takes no --source.")
        parent = builders.builder(self.parent).build(cache_dir, report=report)
        folder = self.path(cache_dir)
        with cache.locked(cache_dir, self.name):
            try:
                self.check(folder)
            except PairError:
                pass
            else:
                report(f"{self.name}: there and whole ({folder})")
                return folder
            cache.require_space(cache_dir, self.disk_bytes, self.name)
            report(f"making {self.name} from {self.parent}")
            try:
                with cache.replacing(folder) as partial:
                    scratch = partial / "scratch"
                    scratch.mkdir()
                    for made in list(self.recipe(parent, scratch).iterdir()):
                        made.rename(partial / made.name)
                    shutil.rmtree(scratch)
                    cache.write_manifest(partial, self.about())
            except OSError as error:
                raise PairError(
                    f"{self.name} couldn't be written to {cache_dir} ({error.strerror or error}). "
                    "Free some space, or set SPECDUEL_CACHE to another folder."
                ) from error
            except ImportError as error:
                raise PairError(f"Building {self.name} needs the package {error.name}. Run `make setup`.") from error
        report(f"{self.name}: built ({folder})")
        return folder


def shipped_weights(kind: str, folder: Path | None = None) -> Mapping[str, Any]:
    """The SHA-256 of a shipped drafter's weights, as the manifest beside them has it; read without torch.

    Raises:
        PairError: the drafter doesn't ship with this version, or its manifest is damaged.
    """
    path = (folder or Path(__file__).parent.parent / "drafters" / "weights") / "manifest.json"
    try:
        return {"weights_sha256": str(json.loads(path.read_text(encoding="utf-8"))[kind]["sha256"])}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise PairError(f"{path} is missing, damaged, or has no {kind!r} drafter. Install specduel again.") from error


def _drafter(kind: Literal["eagle3", "draft_model"]) -> Callable[[Path, Path], Path]:
    def recipe(parent: Path, scratch: Path) -> Path:
        from app.drafters import install

        return install.build(parent, scratch, kind)

    return recipe


def _stand_in(parent: Path, scratch: Path) -> Path:
    from app.pairs import standin

    return standin.build(parent, scratch / "wide")


def _stand_in_head(parent: Path, scratch: Path) -> Path:
    from app.pairs import standin

    return standin.build_head(parent, scratch / "wide")


EAGLE3 = Derived("embedded-eagle3", "embedded", _drafter("eagle3"), lambda: shipped_weights("eagle3"), 400_000_000)
DRAFT = Derived(
    "embedded-draft", "embedded", _drafter("draft_model"), lambda: shipped_weights("draft_model"), 400_000_000
)
STAND_IN = Derived(
    "stand-in", "embedded", _stand_in, lambda: {"shape": "4096 x 30", "builder": 1}, 17_000_000_000, hashed=False
)
STAND_IN_EAGLE3 = Derived(
    "stand-in-eagle3", "embedded-eagle3", _stand_in_head, lambda: {"shape": "4096 x 1", "builder": 1}, 1_500_000_000
)
