"""The HTTP contract of docs/http-api.md, but for the page itself."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse, Response

from app.engines.lane import LaneName
from app.errors import LaneNotFailedError
from app.web.bodies import MethodBody, RunBody
from app.web.duel import Duel
from app.web.sse import check_stream, run_stream

router = APIRouter()

ERROR = {
    "description": "What was wrong, what is allowed, what to do.",
    "content": {
        "application/json": {
            "example": {"error": {"type": "invalid_request", "message": "max_tokens is 0; …", "param": "max_tokens"}}
        }
    },
}


def duel_of(request: Request) -> Duel:
    duel: Duel = request.app.state.duel
    return duel


@router.get("/livez", tags=["health"])
async def livez() -> dict[str, bool]:
    """200 while the process serves."""
    return {"live": True}


@router.get("/readyz", tags=["health"], responses={503: {"description": "A lane is not ready yet, or failed."}})
async def readyz(request: Request) -> JSONResponse:
    """200 when both lanes are warm."""
    duel = duel_of(request)
    return JSONResponse({"ready": duel.ready, "lanes": duel.lane_states()}, status_code=200 if duel.ready else 503)


@router.get("/metrics", tags=["health"])
async def metrics(request: Request) -> Response:
    """Prometheus' text format; every name starts with specduel_."""
    return Response(duel_of(request).prometheus.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/api/state", tags=["state"])
async def state(request: Request) -> dict[str, Any]:
    """Lanes, pair, fairness, memory, active run, limits."""
    return duel_of(request).state()


@router.get("/api/prompts", tags=["state"])
async def prompts(request: Request) -> dict[str, Any]:
    """The prompt library."""
    return {"prompts": duel_of(request).prompts}


@router.post("/api/lanes/{lane}/restart", tags=["state"], status_code=202, responses={409: ERROR, 422: ERROR})
async def restart_lane(request: Request, lane: LaneName) -> dict[str, str]:
    """Start a failed lane again."""
    duel = duel_of(request)
    current = duel.fleet.lanes[lane]
    if current.state not in ("failed", "stopped"):
        raise LaneNotFailedError(
            f"The {lane} lane is {current.state}; only a failed lane can be restarted.", param="lane"
        )
    duel.restart(lane)
    return {"lane": lane, "state": "starting"}


@router.post("/api/lanes/speculative/method", tags=["state"], status_code=202, responses={409: ERROR, 422: ERROR})
async def switch_method(request: Request, body: MethodBody) -> dict[str, Any]:
    """Let the speculative lane speculate by another method, or draft another number of tokens. It starts again."""
    duel = duel_of(request)
    await duel.switch(body.method, body.num_speculative_tokens)
    return {"pair": duel.speculation.as_dict()}


@router.post("/api/runs", tags=["runs"], status_code=202, responses={409: ERROR, 413: ERROR, 422: ERROR, 503: ERROR})
async def start_run(request: Request, body: RunBody) -> dict[str, str]:
    """Start a run. One at a time; follow it at ``events_url``."""
    duel = duel_of(request)
    run_request = body.to_request(duel.library, max_tokens=duel.settings.max_tokens, prompt_chars=duel.prompt_chars)
    return duel.races.start(run_request).reference()


@router.get("/api/runs/{run_id}", tags=["runs"], responses={404: ERROR})
async def read_run(request: Request, run_id: str) -> dict[str, Any]:
    """A run's record; while the run is active, what there is of it."""
    return duel_of(request).races.get(run_id).record()


@router.delete("/api/runs/{run_id}", tags=["runs"], status_code=202, responses={200: {}, 404: ERROR})
async def cancel_run(request: Request, response: Response, run_id: str) -> dict[str, str]:
    """Cancel both lanes at once. 200 when the run had ended already."""
    run, was_active = await duel_of(request).races.cancel(run_id)
    response.status_code = 202 if was_active else 200
    return {"run_id": run.run_id, "status": run.status}


@router.get(
    "/api/runs/{run_id}/events",
    tags=["runs"],
    responses={200: {"content": {"text/event-stream": {}}}, 204: {"description": "All was sent before."}, 404: ERROR},
    response_class=Response,
)
async def run_events(
    request: Request,
    run_id: str,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[int, Query(ge=0)] = 0,
) -> Response:
    """A run's events. Resumes after ``Last-Event-ID`` (or ``after``) and never generates again."""
    run = duel_of(request).races.get(run_id)
    if last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit():
        after = int(last_event_id)
    return run_stream(run, after)


@router.get("/api/stream-check", tags=["state"], response_class=Response)
async def stream_check() -> Response:
    """Five events, 200 ms apart: who gets them all at once sits behind a buffering proxy."""
    return check_stream()
