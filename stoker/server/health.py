"""Whether the server lives and can answer: for process supervisors and load balancers.

`/health/live` answers as long as the event loop runs; `/health` is 200 while requests are taken, else 503.
"""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import JSONResponse

from stoker.server.openapi import answers
from stoker.server.registry import Entry, Registry
from stoker.server.settings import Settings


class ModelHealth(BaseModel):
    """One model. error: why its engine or its last load failed."""

    id: str
    state: str
    running: int
    waiting: int
    error: str | None


class Health(BaseModel):
    """status: ok, closing or failed."""

    status: str
    ready: bool
    models: list[ModelHealth]


def router(registry: Registry, settings: Settings) -> APIRouter:
    """/health and /health/live."""
    routes = APIRouter(tags=["health"])

    @routes.get("/health", openapi_extra=answers(Health), summary="Readiness")
    async def health() -> JSONResponse:
        models = [_model_health(entry) for entry in registry.entries]
        failed = all(model.error is not None and model.state != "loading" for model in models)
        status = "closing" if registry.closing else "failed" if failed else "ok"
        body = Health(status=status, ready=status == "ok", models=models)
        return JSONResponse(body.model_dump(), 200 if status == "ok" else 503)

    @routes.get("/health/live", openapi_extra=answers(), summary="Liveness")
    async def live() -> dict[str, Any]:
        return {"status": "alive"}

    return routes


def _model_health(entry: Entry) -> ModelHealth:
    if entry.service is None:
        return ModelHealth(id=entry.spec.name, state=entry.state, running=0, waiting=0, error=entry.error)
    status = entry.service.batcher.status()
    return ModelHealth(
        id=entry.spec.name, state=entry.state, running=status.running, waiting=status.waiting, error=status.error
    )
