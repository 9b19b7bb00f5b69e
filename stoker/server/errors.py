"""What a client is told when something is wrong: status, JSON in its API's own shape, headers.

The one place that maps stoker's errors to HTTP. What is the server's own trouble is told without paths or internals;
the log has them.
"""

import logging
from typing import Any, Literal

from stoker.errors import BudgetError, Closing, ContextError, OptionError, QueueFull, StokerError
from stoker.server.held import current

log = logging.getLogger("stoker.server")

Dialect = Literal["openai", "anthropic"]
Rendered = tuple[int, dict[str, Any], dict[str, str]]


def dialect_of(path: str) -> Dialect:
    """The API that a path belongs to."""
    return "anthropic" if path == "/v1/messages" or path.startswith("/v1/messages/") else "openai"


_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class RequestError(StokerError):
    """A request that is refused. status: of HTTP; code: for programs; field: of the request's body, where one is wrong;
    retry_after_s: when it may be tried again."""

    def __init__(
        self,
        what: str,
        *,
        status: int = 400,
        code: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(what, where=field, **more)
        self.status, self.code, self.field = status, code, field
        self.retry_after_s, self.headers = retry_after_s, headers or {}


def refused(field: str, what: str, **more: Any) -> RequestError:
    """A 400 about one field of the body; code: invalid_value where `more` names no other."""
    return RequestError(what, field=field, **{"code": "invalid_value", **more})


def as_request_error(error: BaseException) -> RequestError:
    """What `error` is to a client."""
    match error:
        case RequestError():
            return error
        case ContextError():
            return RequestError(_context(error), code="context_length_exceeded")
        case OptionError():
            return RequestError(
                error.what, code="invalid_value", field=error.field or error.where, expected=error.expected,
                got=error.got, remedy=error.remedy,
            )  # fmt: skip
        case QueueFull():
            wait = max(1.0, error.retry_after_s)
            return RequestError(_one_line(error), status=429, code="queue_full", retry_after_s=wait)
        case Closing():
            return RequestError(error.what, status=503, code="server_closing", retry_after_s=5.0)
        case BudgetError():
            return RequestError(_one_line(error), status=503, code="memory_budget", retry_after_s=30.0)
    what = error.what if isinstance(error, StokerError) else "the server failed"
    return RequestError(f"{what}; the server's log says more", status=500, code="internal_error")


def render(error: BaseException, dialect: Dialect) -> Rendered:
    """(status, body, headers) of any error, in the API's own shape. Agents know a full context by Anthropic's words."""
    told = as_request_error(error)
    if isinstance(error, ContextError) and error.limit_tokens and dialect == "anthropic":
        told.what = f"prompt is too long: {error.asked_tokens} tokens > {error.limit_tokens} maximum"
    headers = dict(told.headers)
    if told.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(told.retry_after_s)))
    if told.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return told.status, _body(told, dialect), headers


def log_refusal(method: str, path: str, error: BaseException) -> None:
    """One line for a request that is refused; the whole error where it is the server's own trouble."""
    told, holder = as_request_error(error), current()
    id = holder.id if holder is not None else "-"
    if told.code == "internal_error":
        log.error("%s %r %s failed", method, path[:80], id, exc_info=error)
    else:
        log.info("%s %r %s refused: %d %s %s", method, path[:80], id, told.status, told.code, told.field or "")


def log_cut(method: str, path: str, error: BaseException) -> None:
    """One line for an answer that had begun, with its status, and could not be finished."""
    told, holder = as_request_error(error), current()
    id = holder.id if holder is not None else "-"
    trouble = error if told.code == "internal_error" else None
    level = logging.INFO if trouble is None else logging.ERROR
    words = "%s %r %s cut off after its beginning: %s"
    log.log(level, words, method, path[:80], id, told.code, exc_info=trouble)


def _body(told: RequestError, dialect: Dialect) -> dict[str, Any]:
    message = _one_line(told)
    if dialect == "anthropic":
        kind = _ANTHROPIC_TYPES.get(told.status, "api_error")
        error: dict[str, Any] = {"type": kind, "message": message}
        if told.code == "context_length_exceeded":
            error["code"] = told.code
        holder = current()
        return {"type": "error", "error": error, "request_id": holder.id if holder is not None else None}
    kind = _OPENAI_TYPES.get(told.status, "server_error")
    return {"error": {"message": message, "type": kind, "param": told.field, "code": told.code}}


def _context(error: ContextError) -> str:
    if not error.limit_tokens:
        return _one_line(error)
    return (
        f"this model's maximum context length is {error.limit_tokens} tokens (as served: --ctx-size), but the request "
        f"needs {error.asked_tokens} tokens; shorten the messages, or ask for less"
    )


def _one_line(error: StokerError) -> str:
    """`render` in one line: messages of HTTP errors are shown in logs and dialogs."""
    where = getattr(error, "field", None) or error.where
    parts = [error.what if where is None else f"{where}: {error.what}"]
    if error.expected is not None:
        parts.append(f"expected {error.expected}")
    if error.got is not None:
        parts.append(f"got {error.got}")
    text = parts[0] + (f" ({', '.join(parts[1:])})" if parts[1:] else "")
    return text if error.remedy is None else f"{text}; {error.remedy}"
