"""The page and its partials. Everything else on the page comes from the JSON and SSE routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from fastapi.templating import Jinja2Templates

from app.errors import NotFoundError
from app.web import contexts

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


class Duel(Protocol):
    """What the pages need of ``app.state.duel``."""

    @property
    def templates(self) -> Jinja2Templates: ...

    @property
    def prompts(self) -> Sequence[Mapping[str, Any]]:
        """The library, as in ``GET /api/prompts``."""
        ...

    def state(self) -> Mapping[str, Any]:
        """The JSON of ``GET /api/state``."""
        ...


def _duel(request: Request) -> Duel:
    duel: Duel = request.app.state.duel
    return duel


def _render(request: Request, name: str, context: contexts.Context) -> HTMLResponse:
    return _duel(request).templates.TemplateResponse(request, name, contexts.as_context(context))


@router.get("/")
async def index(request: Request) -> HTMLResponse:
    duel = _duel(request)
    return _render(request, "index.html", contexts.index_context(duel.state(), duel.prompts))


@router.get("/partials/library")
async def library(request: Request) -> HTMLResponse:
    """The prompt library, grouped."""
    groups = contexts.prompt_groups(_duel(request).prompts)
    return _render(request, "_library.html", contexts.LibraryContext(groups))


@router.get("/partials/prompt-form")
async def prompt_form(request: Request, prompt_id: str = "") -> HTMLResponse:
    """The form's fields as a prompt of the library fills them; blank without ``prompt_id``.

    Raises:
        NotFoundError: the library has no such prompt.
    """
    duel = _duel(request)
    form = contexts.BLANK_FORM
    if prompt_id:
        found = next((p for p in duel.prompts if p["id"] == prompt_id), None)
        if found is None:
            known = ", ".join(str(p["id"]) for p in duel.prompts)
            raise NotFoundError(f"The library has no prompt {prompt_id!r}. It has: {known}.", param="prompt_id")
        form = contexts.prompt_form(found)
    return _render(request, "_prompt_form.html", contexts.PromptFormContext(form, contexts.limits(duel.state())))


@router.get("/partials/settings")
async def settings(request: Request) -> HTMLResponse:
    """Both lanes' resolved engine settings, side by side."""
    return _render(request, "_settings.html", contexts.settings_context(_duel(request).state().get("fairness")))


@router.get("/partials/method")
async def method(request: Request) -> HTMLResponse:
    """The methods that the speculative lane can be switched to."""
    return _render(request, "_method.html", contexts.method_context(_duel(request).state()["pair"]))
