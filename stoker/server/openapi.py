"""The OpenAPI description: bodies and answers of paths that read their bodies by hand.

Paths name their pydantic models with `json_body` and `json_answer`; `describe` gathers the models into one place.
"""

from collections.abc import Iterator
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel

from stoker.server.settings import Settings

_ERRORS = {
    "400": "Refused: malformed, unknown or out of range; the message names the field.",
    "401": "The key is missing or wrong.",
    "403": "A foreign Host or Origin.",
    "404": "There is no such model.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "429": "Too many requests wait; Retry-After says when to ask again.",
    "500": "The server failed.",
    "503": "The server is shutting down, or the model's memory is in use.",
}


def json_body(model: type[BaseModel], answer: type[BaseModel] | None = None, **more: Any) -> dict[str, Any]:
    """`openapi_extra` of a path: its body, its answer, and the errors that every such path has. stream=True: the answer
    may come as server-sent events."""
    schema = _schema(model, "validation")
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    return extra | answers(answer, **more)


def answers(answer: type[BaseModel] | None = None, *, stream: bool = False) -> dict[str, Any]:
    """The `responses` part of `openapi_extra`."""
    schema = _schema(answer, "serialization") if answer is not None else {}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if stream:
        content["text/event-stream"] = {"schema": {}}
    error = {"application/json": {"schema": {"type": "object"}}}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    responses |= {status: {"description": text, "content": error} for status, text in _ERRORS.items()}
    return {"responses": responses}


def _schema(model: type[BaseModel], mode: Literal["validation", "serialization"]) -> dict[str, Any]:
    """A model's schema. Its parts are named after it: every API has a Tool of its own."""
    name = f"{model.__module__.split('.')[2]}.{model.__name__}"
    schema = model.model_json_schema(ref_template=f"#/components/schemas/{name}.{{model}}", mode=mode)
    parts = {f"{name}.{part}": described for part, described in schema.pop("$defs", {}).items()}
    return schema | ({"$defs": parts} if parts else {})


def describe(app: FastAPI, settings: Settings) -> None:
    """Let the app's description hold every model that its paths name, once, and say how to send the key."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = plain()
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            for node in list(_objects(schema["paths"])):
                schemas.update(node.pop("$defs", {}))
            for responses in (node["responses"] for path in schema["paths"].values() for node in path.values()):
                responses.pop("422", None)  # FastAPI's own, which never comes
            if settings.api_key is not None:
                schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                schema["security"] = [{"key": []}]
        described: dict[str, Any] = app.openapi_schema or {}
        return described

    app.openapi = openapi  # type: ignore[method-assign]


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for child in list(value.values()):
            yield from _objects(child)
    elif isinstance(value, list):
        for child in value:
            yield from _objects(child)
