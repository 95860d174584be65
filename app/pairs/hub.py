"""Models of the Hugging Face hub: found in the local cache, or their small files fetched.

The weights themselves are vLLM's to fetch. The small files come first, so that a gated or misspelt repository ends in
one line before anything is loaded.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from app.errors import PairError
from app.pairs.checkpoint import weight_files
from app.pairs.pair import ModelRef

# What the checks before loading read; a repository without one of the optional ones is fine.
CONFIG = "config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")

TOKEN_PAGE = "https://huggingface.co/settings/tokens"  # noqa: S105 - the page, not a token


def cache_folder() -> Path:
    """Where the hub's library keeps what it fetches."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def cached(ref: ModelRef) -> Path | None:
    """The folder of a repository that lies whole in the local cache; None when it doesn't."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(ref.name, revision=ref.revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None
    try:
        whole = bool(weight_files(folder)) or any(folder.glob("*.bin"))
    except PairError:  # a shard is missing: vLLM fetches the rest
        return None
    return folder if whole and (folder / CONFIG).is_file() else None


def small_files(ref: ModelRef, *, endpoint: str | None = None) -> Path:
    """Fetch config.json and the tokenizer of a repository; returns the folder they lie in.

    Args:
        ref: the repository.
        endpoint: another hub than the one that ``HF_ENDPOINT`` or its default names.

    Raises:
        PairError: gated, unknown, or the hub can't be reached; one line with what to do.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        # One question without retries: an unreachable hub is told at once, not after half a minute.
        url = hf_hub_url(ref.name, CONFIG, revision=ref.revision, endpoint=endpoint)
        get_hf_file_metadata(url, token=True if _has_token() else None, endpoint=endpoint)
        folder = Path(hf_hub_download(ref.name, CONFIG, revision=ref.revision, endpoint=endpoint)).parent
        for name in TOKENIZERS:
            with contextlib.suppress(errors.RemoteEntryNotFoundError):
                hf_hub_download(ref.name, name, revision=ref.revision, endpoint=endpoint)
    except errors.GatedRepoError as error:
        raise PairError(_gated(ref)) from error
    except errors.RepositoryNotFoundError as error:
        raise PairError(
            f"The hub has no repository {ref.name!r}, or it is private. Check the name; for a private one set HF_TOKEN "
            f"to a token that may read it ({TOKEN_PAGE})."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise PairError(
            f"The repository {ref.name} has no revision {ref.revision!r}. Check the pair's file."
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise PairError(
            f"The repository {ref.name} has no {CONFIG}: it holds no model that vLLM can load. Check the name."
        ) from error
    except errors.HFValidationError as error:
        raise PairError(f"{ref.name!r} is not a repository id ({_one_line(error)}).") from error
    except Exception as error:  # no network, a proxy, a bad answer: the HTTP client's errors have no common base
        raise PairError(
            f"{ref.name} is not in the local cache, and the hub can't be reached ({_reason(error)}). Connect to the "
            f"internet once and run `hf download {ref.name}`, or use --pair embedded, which needs no hub."
        ) from error
    return folder


def _has_token() -> bool:
    from huggingface_hub import get_token

    return bool(get_token())


def _gated(ref: ModelRef) -> str:
    page = ref.licence_url or f"https://huggingface.co/{ref.name}"
    if _has_token():
        return (
            f"{ref.name} is gated, and the account of your token has no access. Accept the licence at {page} with that "
            "account, and wait until access is granted."
        )
    return (
        f"{ref.name} is gated. Accept its licence at {page}, then set the variable HF_TOKEN to a token of that account "
        f"({TOKEN_PAGE})."
    )


def _reason(error: BaseException) -> str:
    """The innermost cause: what the hub's library raises on top says only that nothing was found locally."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        return "HF_HUB_OFFLINE is set"
    cause = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    return _one_line(cause)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
