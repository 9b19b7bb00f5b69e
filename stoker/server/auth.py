"""Who may ask: the key, the Host that was meant, the site whose script asks. Decides; sends nothing.

A browser lets any site's script send requests to localhost. Against that: a foreign Host is refused (DNS rebinding),
and so is a foreign Origin unless --cors names it, whatever CORS would have let the script read. Plain reading (GET) of
what holds no use of the server is let through: without CORS, a browser keeps the answer from the script.
"""

import hashlib
import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from stoker.server.errors import RequestError
from stoker.server.settings import Settings, is_loopback

# What holds neither models nor conversations: whether the server lives, and the page's own files.
OPEN_PATHS = ("/health", "/health/live", "/", "/favicon.ico")
OPEN_PREFIXES = ("/static/",)
# What tells how the server is used: not even to be asked for by another site's script.
WATCH_PATHS = ("/metrics", "/live", "/live/stream")


def check_key(headers: Headers, path: str, settings: Settings) -> None:
    """Raises RequestError (401) where a key is demanded and not given, as Bearer or as x-api-key."""
    if settings.api_key is None or path in OPEN_PATHS or path.startswith(OPEN_PREFIXES):
        return
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    if not given:
        raise RequestError(
            "a key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
            status=401, code="invalid_api_key",
        )  # fmt: skip
    if not same_key(given, settings.api_key):
        raise RequestError("the key is wrong", status=401, code="invalid_api_key")


def same_key(given: str, key: str) -> bool:
    """Whether they are equal, in a time that depends on neither's content nor length. `given` is a header's value: each
    character stands for a byte, and what the bytes stand for (UTF-8, Latin-1) is up to the client."""
    forms = [_digest(key, "utf-8")]
    if all(ord(letter) < 256 for letter in key):
        forms.append(_digest(key, "latin-1"))
    sent = _digest(given, "latin-1")
    return any([hmac.compare_digest(sent, form) for form in forms])


def _digest(text: str, encoding: str) -> bytes:
    return hashlib.sha256(text.encode(encoding, errors="backslashreplace")).digest()


def check_host(headers: Headers, settings: Settings) -> None:
    """Raises RequestError (403) where a server on the loopback is called by the name of another host."""
    if not settings.loopback:
        return
    name = host_name(headers.get("host", ""))
    if name and not is_loopback(name):
        raise RequestError(
            "this server answers to localhost alone", status=403, code="foreign_host", expected="Host: localhost",
            got=repr(name[:80]), remedy="start it with --host to serve other names",
        )  # fmt: skip


def host_name(host: str) -> str:
    """`localhost:8080` -> localhost, `[::1]:80` -> ::1; lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")


def check_origin(headers: Headers, method: str, path: str, settings: Settings) -> None:
    """Raises RequestError (403) where a script of another site asks for more than plain reading, or for WATCH_PATHS,
    and --cors names it not."""
    origin = headers.get("origin")
    reads = method == "OPTIONS" or (method in ("GET", "HEAD") and path not in WATCH_PATHS)
    if origin is None or reads or allowed_origin(origin, settings):
        return
    if urlsplit_netloc(origin) == headers.get("host", "").lower():
        return
    raise RequestError(
        "scripts of this origin may not use the server", status=403, code="foreign_origin", got=repr(origin[:80]),
        remedy="name it with --cors",
    )  # fmt: skip


def allowed_origin(origin: str, settings: Settings) -> bool:
    """Whether --cors names `origin`."""
    return "*" in settings.cors or origin in settings.cors


def urlsplit_netloc(origin: str) -> str:
    """Host and port of an origin; nothing where it is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
