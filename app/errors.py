"""The errors specduel raises on purpose, as a tree.

    SpecduelError
    ├── BadRequestError          422  the request is malformed or out of range
    │   └── BodyTooLargeError    413
    ├── ForbiddenError           403  a write from a page of another origin
    ├── NotFoundError            404  no such run, prompt, page
    ├── RunActiveError           409  one run at a time
    ├── LaneNotFailedError       409  only a failed lane can be restarted
    ├── LaneNotReadyError        503  a lane is starting, failed, or stopped
    └── StartError                    the program can't start; the command line exits with 1
        ├── PairError                 a pair file, a model file, or a model that doesn't fit
        └── EngineError               an engine failed to load or died

Every message says what was wrong, what is allowed, and what to do.
"""

from __future__ import annotations

from typing import Any


class SpecduelError(Exception):
    """Base of all of them. ``status`` is the HTTP status; ``type`` the machine-readable name."""

    status = 500
    type = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def as_dict(self) -> dict[str, Any]:
        """The body of an error response: ``{"error": {"type", "message", "param"?}}``."""
        error: dict[str, Any] = {"type": self.type, "message": self.message}
        if self.param is not None:
            error["param"] = self.param
        return {"error": error}


class BadRequestError(SpecduelError):
    status = 422
    type = "invalid_request"


class BodyTooLargeError(BadRequestError):
    status = 413
    type = "body_too_large"


class ForbiddenError(SpecduelError):
    status = 403
    type = "forbidden"


class NotFoundError(SpecduelError):
    status = 404
    type = "not_found"


class RunActiveError(SpecduelError):
    status = 409
    type = "run_active"


class LaneNotFailedError(SpecduelError):
    status = 409
    type = "lane_not_failed"


class LaneNotReadyError(SpecduelError):
    status = 503
    type = "lane_not_ready"


class StartError(SpecduelError):
    status = 503
    type = "start_failed"


class PairError(StartError):
    type = "pair_invalid"


class EngineError(StartError):
    type = "engine_failed"
