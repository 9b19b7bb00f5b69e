"""The page at `/`: a chat and the server's live figures. Files are read once, at start; a request never names a path.

Nothing of it comes from elsewhere: the policy lets scripts, styles and requests reach this server alone.
"""

import hashlib
from dataclasses import dataclass
from importlib import resources

from fastapi import APIRouter, Request, Response

from stoker.server.registry import Registry
from stoker.server.settings import Settings

TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """One file of the page, as it is sent."""

    content: bytes
    type: str
    tag: str


def page_files() -> dict[str, PageFile]:
    """Every file of the page by name."""
    found = {}
    for file in resources.files(__name__).joinpath("static").iterdir():
        kind = TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            content = file.read_bytes()
            found[file.name] = PageFile(content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
    return found


def router(registry: Registry, settings: Settings) -> APIRouter:
    """`GET /` and `GET /static/NAME`; both without a key: they hold nothing of the models or of anyone's words."""
    files = page_files()
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def index(request: Request) -> Response:
        return _answer(request, files["index.html"])

    @routes.get("/static/{name}")
    async def static(request: Request, name: str) -> Response:
        file = files.get(name)
        return Response("no such file", 404, HEADERS, "text/plain") if file is None else _answer(request, file)

    return routes


def _answer(request: Request, file: PageFile) -> Response:
    headers = HEADERS | {"ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(None, 304, headers)
    return Response(file.content, 200, headers, file.type)
