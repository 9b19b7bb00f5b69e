"""GET /v1/models and /v1/models/{id}: what may be asked for, what it can hold, how it routes, what is loaded now."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import JSONResponse

from stoker.server.errors import RequestError
from stoker.server.openapi import answers
from stoker.server.registry import Entry, Registry
from stoker.server.settings import Settings


class Model(BaseModel):
    """context_length, max_model_len: tokens of prompt and answer together. routing: `exact` routes as the model's own
    gates do and changes nothing of the output; else the mode, K and the adapter with what was measured of it.
    resident_share: of the experts that memory has room for, when loaded."""

    id: str
    object: str
    created: int
    owned_by: str
    aliases: list[str]
    state: str
    loaded: bool
    context_length: int | None
    max_model_len: int | None
    routing: dict[str, Any]
    formats: list[str]
    model_type: str | None
    fingerprint: str | None
    resident_share: float | None


class Models(BaseModel):
    object: str
    data: list[Model]


def router(registry: Registry, settings: Settings) -> APIRouter:
    """Both paths."""
    routes = APIRouter(tags=["openai"])

    @routes.get("/v1/models", openapi_extra=answers(Models), summary="Models")
    async def models() -> JSONResponse:
        listed = Models(object="list", data=[describe(entry) for entry in registry.entries])
        return JSONResponse(listed.model_dump())

    @routes.get("/v1/models/{model:path}", openapi_extra=answers(Model), summary="One model")
    async def one(model: str) -> JSONResponse:
        for entry in registry.entries:
            if model in entry.spec.names:
                return JSONResponse(describe(entry).model_dump())
        raise RequestError(f"there is no model {model[:200]!r} here", status=404, code="model_not_found", field="model")

    return routes


def describe(entry: Entry) -> Model:
    """What there is to know of a model, loaded or not."""
    about, service = entry.spec.about, entry.service
    context = service.ctx_size if service is not None else about.get("context_length")
    share = float(service.model.ledger()["resident_share"]) if service is not None else None
    return Model(
        id=entry.spec.name,
        object="model",
        created=entry.created,
        owned_by="stoker",
        aliases=list(entry.spec.names[1:]),
        state=entry.state,
        loaded=service is not None,
        context_length=context,
        max_model_len=context,
        routing=service.model.runtime.mode.about() if service is not None else {"mode": "exact", "lossless": True},
        formats=list(about.get("formats", ())),
        model_type=about.get("model_type"),
        fingerprint=about.get("fingerprint"),
        resident_share=share,
    )
