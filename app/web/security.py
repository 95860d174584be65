"""What protects the page and the server: headers, a limit on bodies, no writes from other sites.

* A strict Content-Security-Policy: scripts, styles and connections from here only, nothing inline. Model
  output that slipped into the page as HTML could still run nothing.
* Bodies over the limit are refused with 413 before they are read whole.
* A browser's POST or DELETE from another origin is refused, so that no web page can drive a local server.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import BodyTooLargeError, ForbiddenError

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
DRAINED_BYTES = 32_000_000
WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class Security:
    """ASGI middleware for all of it.

    Args:
        app: the application.
        body_limit_bytes: the largest body accepted.
    """

    def __init__(self, app: ASGIApp, *, body_limit_bytes: int) -> None:
        self._app = app
        self._limit = body_limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        headers = Headers(scope=scope)
        if scope["method"] in WRITES and _is_foreign(headers):
            refusal = ForbiddenError("This call came from a page of another origin, which is not allowed.")
            response = JSONResponse(refusal.as_dict(), status_code=refusal.status)
            await response(scope, receive, send_with_headers)
            return
        too_large = BodyTooLargeError(f"The body is larger than {self._limit} bytes, which is the most allowed.")
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._limit:
            await _drain(receive)
            response = JSONResponse(too_large.as_dict(), status_code=413, headers={"connection": "close"})
            await response(scope, receive, send_with_headers)
            return
        received = 0

        async def receive_within_limit() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._limit:
                    raise HTTPException(413, too_large.message)
            return message

        await self._app(scope, receive_within_limit, send_with_headers)


async def _drain(receive: Receive) -> None:
    """Read a body away, up to a bound: a client that is still sending would miss the answer."""
    left = DRAINED_BYTES
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            return


def _is_foreign(headers: Headers) -> bool:
    """Whether a browser says that another origin made this request."""
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
    return urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
