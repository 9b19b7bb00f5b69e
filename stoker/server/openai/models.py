"""GET /v1/models and /v1/models/{id}: what may be asked for, what it can hold, how it routes, what is loaded now."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import JSONResponse

from stoker.server.errors import RequestError
from stoker.server.openapi import answers
from stoker.server.registry import Entry, Registry, adapter_in
from stoker.server.settings import Settings


class Model(BaseModel):
    """context_length, max_model_len: tokens of prompt and answer together. routing: `exact` routes as the model's own
    gates do and changes nothing of the output; else the mode, K and the adapter with what was measured of it.
    resident_share: of the experts that memory has room for, when loaded. parent: of MODEL:NAME, which is the model
    with a LoRA."""

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
    parent: str | None = None


class Models(BaseModel):
    object: str
    data: list[Model]


def router(registry: Registry, settings: Settings) -> APIRouter:
    """Both paths."""
    routes = APIRouter(tags=["openai"])

    @routes.get("/v1/models", openapi_extra=answers(Models), summary="Models")
    async def models() -> JSONResponse:
        data = [describe(e, name) for e in registry.entries for name in (None, *e.spec.adapters)]
        listed = Models(object="list", data=data)
        return JSONResponse(listed.model_dump())

    @routes.get("/v1/models/{model:path}", openapi_extra=answers(Model), summary="One model")
    async def one(model: str) -> JSONResponse:
        for entry in registry.entries:
            adapter = adapter_in(entry.spec, model)
            if model in entry.spec.names or adapter is not None:
                return JSONResponse(describe(entry, adapter).model_dump())
        raise RequestError(f"there is no model {model[:200]!r} here", status=404, code="model_not_found", field="model")

    return routes


def describe(entry: Entry, adapter: str | None = None) -> Model:
    """What there is to know of a model, loaded or not, or of it with one of its LoRAs."""
    about, service = entry.spec.about, entry.service
    context = service.ctx_size if service is not None else about.get("context_length")
    share = float(service.model.ledger()["resident_share"]) if service is not None else None
    return Model(
        id=entry.spec.name if adapter is None else f"{entry.spec.name}:{adapter}",
        object="model",
        created=entry.created,
        owned_by="stoker",
        aliases=list(entry.spec.names[1:]) if adapter is None else [adapter],
        state=entry.state,
        loaded=service is not None,
        context_length=context,
        max_model_len=context,
        routing=entry.routing(adapter) | _promise(entry),
        formats=list(about.get("formats", ())),
        model_type=about.get("model_type"),
        fingerprint=about.get("fingerprint"),
        resident_share=share,
        parent=None if adapter is None else entry.spec.name,
    )


def _promise(entry: Entry) -> dict[str, Any]:
    """The bound that the mode was chosen by, where one was promised."""
    promise = None if entry.service is None else entry.service.model.promise
    return {} if promise is None else {"quality": promise.about()}
