"""What clients ask of a server under load, and whether each answer is whole: all APIs, streams, tools, schemas.

Bodies follow from a random generator. An answer is `answered` in full, `refused` in its API's own shape, `left` by the
client on purpose, or bad, with the reason.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

APIS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
CHAT, COMPLETIONS, MESSAGES, RESPONSES = APIS
WORDS: list[str] = str.split(
    "river stone light garden window paper winter music bread forest engine letter island copper market silver morning "
    "candle bridge harbour mountain question answer number summer field machine story water valley"
)
KINDS: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 12}, {"type": "string", "pattern": "^[a-z]{1,9}(-[0-9]{1,4}){0,3}$"},
    {"type": "integer"}, {"type": "boolean"}, {"enum": ["red", "green", "blue"]}, {"type": "null"},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False},
)  # fmt: skip


@dataclass
class Outcome:
    """verdict: answered, refused, left or bad. text: what the model wrote, with the arguments of its calls."""

    verdict: str
    status: str = ""
    text: str = ""
    detail: str = ""
    retry_after_s: float = 0.0


@dataclass
class Ask:
    """One request to one of the APIs. check: the reason why an answer's text is wrong, if it is."""

    path: str
    body: dict[str, Any]
    check: Callable[[str, bool], str] = field(default=lambda text, whole: "")

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


# ---- bodies


def sentence(chance: random.Random, words: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(words)).capitalize() + "."


def schema(chance: random.Random, size: int = 5) -> dict[str, Any]:
    """A JSON schema of up to `size` properties that hardly any other request has."""
    names = [f"{chance.choice(WORDS)}_{chance.randrange(1000)}" for _ in range(chance.randint(1, size))]
    properties = {name: chance.choice(KINDS) for name in names}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def functions(chance: random.Random, count: int) -> list[dict[str, Any]]:
    """Tools: name, description, parameters."""
    return [
        {
            "name": f"{chance.choice(WORDS)}_{chance.choice(WORDS)}_{index}",
            "description": sentence(chance, 4),
            "parameters": schema(chance),
        }
        for index in range(count)
    ]


def ask(path: str, messages: list[dict[str, str]], tokens: int, stream: bool, **more: Any) -> Ask:
    """A request for a conversation, in the words of one API. `more` are fields that all of them know."""
    body: dict[str, Any] = {"model": "m", "stream": stream, **more}
    if path == COMPLETIONS:
        text = "\n".join(message["content"] for message in messages)
        return Ask(path, body | {"prompt": text, "max_tokens": tokens})
    if path == RESPONSES:
        return Ask(path, body | {"input": messages, "max_output_tokens": max(16, tokens)})
    return Ask(path, body | {"messages": messages, "max_tokens": tokens})


def with_tools(request: Ask, tools: list[dict[str, Any]], forced: bool) -> Ask:
    """The same request with tools; forced: the answer must be a call."""
    if request.path == MESSAGES:
        shown = [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in tools]
        choice: Any = {"type": "any" if forced else "auto"}
    else:
        shown = [{"type": "function", **t} for t in tools]
        if request.path == CHAT:
            shown = [{"type": "function", "function": tool} for tool in tools]
        choice = "required" if forced else "auto"
    return Ask(request.path, request.body | {"tools": shown, "tool_choice": choice}, _is_json if forced else _anything)


def with_schema(request: Ask, wanted: dict[str, Any]) -> Ask:
    """The same request, its answer held to a schema."""
    form = {"type": "json_schema", "name": "answer", "schema": wanted}
    body: dict[str, Any] = {
        CHAT: {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}},
        RESPONSES: {"text": {"format": form}},
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": wanted}}},
    }[request.path]

    def fits(text: str, whole: bool) -> str:
        wrong = _is_json(text, whole)
        missing = set(wanted["required"]) - set(json.loads(text)) if whole and not wrong else set()
        return wrong or (f"without {sorted(missing)}: {text[:200]}" if missing else "")

    return Ask(request.path, request.body | body, fits)


def _anything(text: str, whole: bool) -> str:
    return ""


def _is_json(text: str, whole: bool) -> str:
    """Whether a whole answer is JSON values one behind the other."""
    rest = text.strip() if whole else ""
    try:
        while rest:
            _, end = json.JSONDecoder().raw_decode(rest)
            rest = rest[end:].strip()
    except json.JSONDecodeError as error:
        return f"not JSON ({error}): {text[:200]}"
    return ""


# ---- answers


def send(client: httpx.Client, request: Ask) -> Outcome:
    """Ask, and read the whole answer."""
    if not request.stream:
        answer = client.post(request.path, json=request.body)
        return read_whole(request, answer) if answer.status_code == 200 else refusal(answer)
    with client.stream("POST", request.path, json=request.body) as answer:
        if answer.status_code != 200:
            answer.read()
            return refusal(answer)
        return read_stream(request, [line for line in answer.iter_lines() if line])


def refusal(answer: httpx.Response) -> Outcome:
    """An answer that is no success: whether it is a refusal that an SDK understands."""
    status = str(answer.status_code)
    try:
        body = answer.json()
        error = body["error"]
        proper = bool(error["message"]) and bool(error["type"])
    except (ValueError, KeyError, TypeError):
        return Outcome("bad", status, detail=f"no proper error: {answer.text[:300]}")
    if not proper or answer.status_code >= 500 or (status == "429" and "retry-after" not in answer.headers):
        return Outcome("bad", status, detail=f"{answer.text[:300]} {dict(answer.headers)}")
    return Outcome("refused", status, detail=str(error["message"])[:200], retry_after_s=_retry_after_s(answer))


def _retry_after_s(answer: httpx.Response) -> float:
    return float(answer.headers.get("retry-after", 0))


def read_whole(request: Ask, answer: httpx.Response) -> Outcome:
    """An answer that came at once."""
    body = answer.json()
    if request.path in (CHAT, COMPLETIONS):
        reasons = [choice["finish_reason"] for choice in body["choices"]]
        texts = [_choice_text(choice.get("message") or choice) for choice in body["choices"]]
    elif request.path == MESSAGES:
        reasons = [body["stop_reason"]]
        texts = ["".join(block.get("text") or json.dumps(block.get("input")) for block in body["content"])]
    else:
        reasons = [body["status"] if body["status"] in ("completed", "incomplete") else None]
        texts = ["".join(_item_text(item) for item in body["output"])]
    return _judged(request, texts, reasons)


def _choice_text(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls") or []
    return (message.get("content") or message.get("text") or "") + "".join(c["function"]["arguments"] for c in calls)


def _item_text(item: dict[str, Any]) -> str:
    return str(item.get("arguments") or "".join(part.get("text", "") for part in item.get("content", [])))


def read_stream(request: Ask, lines: list[str]) -> Outcome:
    """An answer that came as events. (With several choices their texts are read as one.)"""
    texts, reasons, ended = "", list[Any](), lines[-1:] == ["data: [DONE]"]
    for line in lines:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        kind = event.get("type", "")
        if event.get("error"):
            return Outcome("bad", "200", detail=f"error in the stream: {line[:300]}")
        for choice in event.get("choices", []):
            delta = choice.get("delta") or choice
            texts += (delta.get("content") or delta.get("text") or "") + "".join(
                call["function"].get("arguments") or "" for call in delta.get("tool_calls") or []
            )
            reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
        if kind == "content_block_delta":
            texts += event["delta"].get("text") or event["delta"].get("partial_json") or ""
        elif kind == "message_delta":
            reasons.append(event["delta"]["stop_reason"])
        elif kind in ("response.output_text.delta", "response.function_call_arguments.delta"):
            texts += event["delta"]
        elif kind in ("response.completed", "response.incomplete"):
            reasons.append(event["response"]["status"])
        ended = ended or kind in ("message_stop", "response.completed", "response.incomplete")
    if not ended:
        return Outcome("bad", "200", detail=f"the stream broke off: {lines[-1:]}")
    return _judged(request, [texts], reasons)


def _judged(request: Ask, texts: list[str], reasons: list[Any]) -> Outcome:
    if not reasons or None in reasons:
        return Outcome("bad", "200", detail=f"no reason for the end: {texts}")
    whole = not {"length", "max_tokens", "incomplete"} & set(reasons)
    wrong = next((reason for text in texts if (reason := request.check(text, whole))), "")
    return Outcome("bad" if wrong else "answered", "200", "".join(texts), wrong)
