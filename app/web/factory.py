"""``create_app``: a server from its settings."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from fastapi.templating import Jinja2Templates
from starlette.exceptions import HTTPException

from app import __version__, prompts, resources
from app.engines.lane import Fleet
from app.errors import BadRequestError, SpecduelError
from app.pairs.speculation import ScriptedSpeculation, Speculation
from app.settings import Settings
from app.web import api, pages
from app.web.bodies import first_error
from app.web.duel import Duel
from app.web.security import Security

log = logging.getLogger(__name__)

ERROR_TYPES = {403: "forbidden", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}

DOCS_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>specduel: HTTP API</title>
<link rel="stylesheet" href="/docs/assets/swagger-ui.css">
<link rel="icon" href="data:,">
</head>
<body>
<div id="swagger-ui"></div>
<script src="/docs/assets/swagger-ui-bundle.js"></script>
<script src="/static/api-docs.js"></script>
</body>
</html>
"""


def create_app(settings: Settings, fleet: Fleet, speculation: Speculation | ScriptedSpeculation) -> FastAPI:
    """Build the app. Its engines start with its lifespan, in the background: the page is up before they are.

    Args:
        settings: the server's settings.
        fleet: both lanes, not started.
        speculation: the pair, and the methods that it can use.

    Raises:
        StartError: a prompt file is wrong.
    """
    duel = Duel(
        settings,
        fleet,
        speculation=speculation,
        library=prompts.load(settings.prompts_dir or resources.prompts()),
        templates=Jinja2Templates(resources.templates()),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        duel.start()
        try:
            yield
        finally:
            await duel.close()

    app = FastAPI(
        title="specduel",
        version=__version__,
        description="Races of two vLLM engines, with and without speculative decoding. See docs/http-api.md.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.duel = duel
    app.add_middleware(Security, body_limit_bytes=settings.body_limit_bytes)
    app.add_exception_handler(SpecduelError, _specduel_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)
    app.include_router(api.router)
    app.include_router(pages.router, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=resources.static()), name="static")
    app.mount("/docs/assets", StaticFiles(directory=resources.swagger_ui()), name="docs_assets")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(DOCS_PAGE)

    return app


def _answer(error: SpecduelError, status: int | None = None) -> JSONResponse:
    body = error.as_dict()
    for key, value in body["error"].items():  # what a client sent can stand in a message, broken characters too
        body["error"][key] = value.encode("utf-8", "replace").decode()
    return JSONResponse(body, status_code=status or error.status)


async def _specduel_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, SpecduelError):
        raise error
    return _answer(error)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        raise error
    return _answer(first_error(error))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's own errors in this API's form. Its 400 (a body that can't be read) is a 422 here."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 400:
        return _answer(BadRequestError("The body can't be read as JSON: it is malformed, or nested too deeply."))
    status = error.status_code
    answer = SpecduelError(str(error.detail).rstrip(".") + ".")
    answer.type = ERROR_TYPES.get(status, "invalid_request" if status < 500 else "internal_error")
    return _answer(answer, status)


async def _unexpected_error(request: Request, error: Exception) -> JSONResponse:
    """A bug: the client gets no details, the log has them."""
    return _answer(SpecduelError("The server made a mistake; its log has the details."))
