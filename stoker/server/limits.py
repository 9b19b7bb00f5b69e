"""From the bytes of a request to checked data: size, time, UTF-8, nesting, duplicates, unknown fields.

Nothing larger than the limits is ever held, whatever the client claims or sends. Knows JSON and pydantic, no API.
"""

import asyncio
import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from stoker.server.errors import RequestError
from stoker.server.held import held
from stoker.server.memory import trim
from stoker.server.settings import Settings

M = TypeVar("M", bound=BaseModel)

LARGE_BYTES = 256 << 10
# One thread: each that allocates keeps memory of its own.
_PARSER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stoker-parse")
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\Z)', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Room:
    """Bytes that all bodies together may take while they are read and parsed; who finds none waits.

    Large bodies leave malloc with memory that nothing else asks for: when the last one has gone it is given back.
    """

    def __init__(self, total_bytes: int) -> None:
        self._free = self._total = total_bytes
        self._large = False
        self._freed = asyncio.Condition()

    async def take(self, nbytes: int) -> None:
        async with self._freed:
            await self._freed.wait_for(lambda: self._free >= nbytes)
            self._free -= nbytes

    async def give(self, nbytes: int) -> None:
        async with self._freed:
            self._free += nbytes
            self._large = self._large or nbytes > LARGE_BYTES
            if self._large and self._free == self._total:
                self._large = False
                await asyncio.get_running_loop().run_in_executor(_PARSER, trim)
            self._freed.notify_all()


async def read_body(request: Request, settings: Settings) -> dict[str, Any]:
    """The body as a JSON object.

    Raises RequestError: 413 for too much (chunked or not, told before it is read where the header says so), 408 for too
    slow, 400 for what is not UTF-8, not JSON, not an object, nested too deeply, or names a key twice.
    """
    most_bytes = settings.max_body_bytes
    if int(request.headers.get("content-length") or 0) > most_bytes:
        raise _too_large(most_bytes)
    try:
        async with asyncio.timeout(settings.body_s):
            body = await _read(request, request.app.state.room, most_bytes)
    except TimeoutError as error:
        raise RequestError("the body did not arrive in time", status=408, code="body_timeout") from error
    except ClientDisconnect as error:
        raise RequestError("the client left", code="client_gone") from error
    # A large body takes a while to parse: the other requests' events go on meanwhile.
    if len(body) > LARGE_BYTES:
        return await asyncio.get_running_loop().run_in_executor(_PARSER, parse_object, body, settings)
    return parse_object(body, settings)


async def _read(request: Request, room: Room, most_bytes: int) -> bytes:
    parts: list[bytes] = []
    total = 0

    async def give_back() -> None:
        await room.give(total)

    held().add(give_back, until_answer=True)
    async for part in request.stream():
        if total + len(part) > most_bytes:
            raise _too_large(most_bytes)
        await room.take(len(part))
        total += len(part)
        parts.append(part)
    return b"".join(parts)


def _too_large(most_bytes: int) -> RequestError:
    expected = f"at most {most_bytes} bytes"
    return RequestError("the body is too large", status=413, code="body_too_large", expected=expected)


def parse_object(body: bytes, settings: Settings) -> dict[str, Any]:
    """JSON bytes to an object, inside the limits."""
    if not body.strip():
        raise _malformed("the body is empty", "a JSON object")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _malformed(f"the body is not UTF-8: byte {error.start} is wrong", "UTF-8") from error
    bare = _STRINGS.sub(b"", body)
    if bare.count(b",") + bare.count(b":") + bare.count(b"[") + bare.count(b"{") > settings.max_values:
        raise _malformed("the body holds too many values", f"at most {settings.max_values}")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError as error:
        raise _too_deep(settings.max_depth) from error
    except ValueError as error:
        raise _malformed(f"the body is not JSON: {error}", "a JSON object") from error
    if not isinstance(value, dict):
        raise _malformed(f"the body is a JSON {_kind(value)}", "a JSON object")
    _check(value, settings.max_depth, texts=_SURROGATE.search(text) is not None)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise RequestError("a key is there twice", code="duplicate_key", got=repr(twice[:80]))
    return made


def _constant(name: str) -> NoReturn:
    raise _malformed(f"{name} is not JSON", "a number")


def _check(value: Any, max_depth: int, *, texts: bool) -> None:
    """Depth, infinite numbers, and (where escapes hint at them) halves of surrogate pairs, which are no text."""
    waiting = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, dict | list):
            if depth > max_depth:
                raise _too_deep(max_depth)
            waiting.extend((child, depth + 1) for child in _children(item))
        elif isinstance(item, float) and math.isinf(item):
            raise _malformed("a number is too large", "a finite number")
        elif texts and isinstance(item, str) and not _is_text(item):
            raise _malformed("a string holds half of a surrogate pair", "text")


def _children(item: dict[str, Any] | list[Any]) -> Iterator[Any]:
    if isinstance(item, dict):
        yield from item
        yield from item.values()
    else:
        yield from item


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _too_deep(max_depth: int) -> RequestError:
    return _malformed("the body is nested too deeply", f"at most {max_depth} levels")


def _malformed(what: str, expected: str) -> RequestError:
    return RequestError(what, code="invalid_json", expected=expected)


def _kind(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names[type(value)]


def parse(model: type[M], body: dict[str, Any]) -> M:
    """`body` as a `model`; RequestError (400) that names the first field that is wrong, and what it may be."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _invalid(model, error) from error


def _invalid(model: type[BaseModel], error: ValidationError) -> RequestError:
    problems = error.errors(include_url=False, include_context=False)
    # An unknown field says more than what else it caused; a value out of range more than the side of a union that it
    # is not.
    same = [p for p in problems if p["loc"][:1] == problems[0]["loc"][:1]]
    first = next((p for p in same if not p["type"].endswith("_type")), problems[0])
    first = next((p for p in problems if p["type"] == "extra_forbidden"), first)
    field = field_path(first["loc"])
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])[:80]
        near = get_close_matches(name, _field_names(model), n=1) if len(first["loc"]) == 1 else []
        remedy = f"did you mean {near[0]}?" if near else "leave it out"
        return RequestError("unknown field", code="unknown_field", field=field, remedy=remedy)
    if first["type"] == "missing":
        return RequestError("this field is missing", code="missing_field", field=field)
    message = str(first["msg"]).removeprefix("Value error, ")
    return RequestError(
        message[:1].lower() + message[1:], code="invalid_value", field=field, got=_shown(first["input"])
    )


def field_path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content`, without the names that pydantic gives to the sides of a union."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and not part[:1].isupper() and part not in ("str", "int", "float", "bool"):
            path += f".{part}" if path else part
    return path[:200] or "body"


def _field_names(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _shown(value: Any) -> str:
    """A short form of what was given; texts may be long and private."""
    if isinstance(value, str):
        return "a string" if len(value) > 40 else repr(value)
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    return repr(value)[:40]
