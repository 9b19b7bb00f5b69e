"""The ASGI app: the routers of every API and of the page behind one guard.

Puts together; decides nothing itself.
"""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from stoker import __version__
from stoker.errors import StokerError
from stoker.server import anthropic, health, live, metrics, openai, openapi, page, responses
from stoker.server.errors import RequestError, dialect_of, log_refusal, render
from stoker.server.guard import Guard
from stoker.server.limits import Room
from stoker.server.registry import Registry
from stoker.server.settings import Settings

# No path reads its body by FastAPI's own rules: the schema says what it is, limits.py reads it.
_ABOUT = "Mixture-of-Experts models that do not fit in memory, served. Unknown fields are refused by name."


def create_app(registry: Registry, settings: Settings) -> FastAPI:
    """Everything under one door; run it with any ASGI server."""
    app = FastAPI(
        title="stoker", version=__version__, description=_ABOUT, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.room = Room(settings.bodies_bytes)
    for part in (openai, responses, anthropic, health, live, metrics, page):
        app.include_router(part.router(registry, settings))
    for kind in (StokerError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _told)
    openapi.describe(app, settings)
    app.add_middleware(Guard, settings=settings)
    app.add_middleware(metrics.RequestCounter)  # around the guard: what is refused counts too
    return app


async def _told(request: Request, error: Exception) -> JSONResponse:
    """The answer to an error that left an endpoint, in the shape of the path's API."""
    error = _ours(error)
    log_refusal(request.method, request.url.path, error)
    status, body, headers = render(error, dialect_of(request.url.path))
    return JSONResponse(body, status, headers)


def _ours(error: Exception) -> Exception:
    """Starlette's and FastAPI's own errors in our words."""
    if isinstance(error, RequestValidationError):
        problem: dict[str, Any] = error.errors()[0]
        return RequestError(str(problem["msg"]), field=".".join(map(str, problem["loc"][1:])), code="invalid_value")
    if isinstance(error, HTTPException):
        words = {404: "there is no such path", 405: "this path does not take that method"}
        codes = {404: "unknown_path", 405: "method_not_allowed"}
        return RequestError(
            words.get(error.status_code, str(error.detail)), status=error.status_code,
            code=codes.get(error.status_code), headers=dict(error.headers or {}),
        )  # fmt: skip
    return error
