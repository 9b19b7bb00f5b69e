"""Learns a model's dialect from its chat template: a few made-up messages are rendered, and what stands around their
known words is how the model was trained to write.

So every template that renders tool calls as JSON or between tags is understood without a table of models, and what a
grammar lets the model write is what the template writes when the message comes back. Knows templates; no tokens.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from stoker.generate.answers.layout import HERMES, Fixed, JsonArguments, Layout, TagArguments, Think

log = logging.getLogger("stoker.generate")

_USER = {"role": "user", "content": "probe question"}
_SAID = "Probed content."
_THOUGHT = "Probed reasoning."
_NOTHING = ("", None)
_NAMES = ("probe_first", "twin_second", "last_third")
_IDS = ("probeid01", "probeid02", "probeid03")  # 9 letters and digits: the only ids that some templates take
_ARGUMENTS: dict[str, Any] = {"probe_key": "probe_value", "probe_n": 7, "probe_o": {"in": [1, "two"]}}
_RESULT = "Probed result."
_PURPOSE = "Probed purpose"
_HOLE = "\0"
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Dialect:
    """How one model takes and writes messages.

    layout: of tool calls. native: the template renders calls and their results by itself; described: and lists the
    tools. raw_arguments: it takes a call's arguments as text and leaves them as they are. short_ids: call ids must be 9
    letters and digits. no_content: the content of a message that only calls. system: it knows the system role;
    developer: and the developer role. harmony: the channels of gpt-oss.
    """

    think: Think | None
    layout: Layout
    native: bool
    described: bool
    raw_arguments: bool
    short_ids: bool
    no_content: str | None
    system: bool
    developer: bool
    harmony: bool


_learned: "WeakKeyDictionary[Any, tuple[str, Dialect]]" = WeakKeyDictionary()


def dialect_of(tokenizer: Any) -> Dialect:
    """The dialect of a tokenizer with a chat template, learned once."""
    template = str(tokenizer.chat_template)
    known = _learned.get(tokenizer)
    if known is None or known[0] != template:
        known = _learned[tokenizer] = (template, learn(tokenizer))
    return known[1]


def learn(tokenizer: Any) -> Dialect:
    """The dialect that the tokenizer's chat template speaks; HERMES for calls where it has no way of its own."""
    probe = _Probe(tokenizer)
    template = str(tokenizer.chat_template)
    layout = probe.layout()
    failures = probe.failures[:1] if layout is None else []
    probe.failures.clear()
    native = layout is not None and probe.shows_results()
    harmony = all(mark in template for mark in ("<|channel|>", "<|message|>", "to=functions."))
    if not (native or harmony):
        _tell(template, layout, failures or probe.failures)
    described = _PURPOSE in (probe.render([_USER], tools=True) or "")
    nothing = probe.no_content()
    short_ids = probe.render([_USER, probe.caller(nothing, 1, ids=["call_probe_of_a_long_id"])], tools=True) is None
    return Dialect(
        think=None if harmony else probe.think(template),
        layout=layout if native and layout is not None else HERMES,
        native=native or harmony,
        described=described and (native or harmony),
        raw_arguments=native and probe.takes_text(),
        short_ids=native and short_ids,
        no_content=nothing,
        system=_SAID in (probe.render([{"role": "system", "content": _SAID}, _USER]) or ""),
        developer="developer" in template,
        harmony=harmony,
    )


def _tell(template: str, layout: Layout | None, failures: list[str]) -> None:
    """Say why calls go by instruction, where the template looks as if it had a way of its own."""
    if "tool_calls" in template:
        reason = "it shows no results of calls" if layout else "it writes calls neither as JSON nor between tags"
    elif failures:
        reason = "it takes no message that calls"
    else:
        return  # it knows no tools, as the docs say of such models
    log.warning(
        "the chat template's own way to call tools is not used: %s%s; calls go by instruction",
        *(reason, f" ({failures[0]})" if failures else ""),
    )


class _Probe:
    """Renders made-up messages by one template; what the template refuses is None. failures: its reasons, of messages
    with calls; that it wants text beside them is none."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.failures: list[str] = []

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: bool = False, begin: bool = False) -> str | None:
        kinds = {"probe_key": "string", "probe_n": "integer", "probe_o": "object"}
        properties = {key: {"type": kind, "description": "Probed."} for key, kind in kinds.items()}
        kind = {"type": "object", "properties": properties, "required": list(kinds)}
        names = [{"name": name, "description": _PURPOSE, "parameters": kind} for name in _NAMES]
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[{"type": "function", "function": each} for each in names] if tools else None,
                tokenize=False,
                add_generation_prompt=begin,
            )
        except Exception as error:  # a template is a program of the checkpoint: it may fail in any way
            if any("tool_calls" in message and message["content"] is not None for message in messages):
                self.failures.append(f"{type(error).__name__}: {error}".splitlines()[0][:200])
            return None
        return str(text)

    def caller(
        self, content: str | None, calls: int, *, arguments: Any = None, ids: Sequence[str] = _IDS
    ) -> dict[str, Any]:
        """An assistant's message with so many calls."""
        chosen = _ARGUMENTS if arguments is None else arguments
        functions = [{"name": name, "arguments": chosen} for name in _NAMES[:calls]]
        listed = [
            {"id": call_id, "type": "function", "function": each} for call_id, each in zip(ids, functions, strict=False)
        ]
        return {"role": "assistant", "content": content, "tool_calls": listed}

    def think(self, template: str) -> Think | None:
        """The tags around reasoning."""
        message = {"role": "assistant", "content": _SAID, **dict.fromkeys(_REASONING, _THOUGHT)}
        text = self.render([_USER, message]) or ""
        before, found, after = text.partition(_THOUGHT)
        tag = r"<[^<>\s]{1,40}>|\[/?[A-Z_]{1,40}\]"
        opens, closes = re.search(rf"({tag})\s*$", before), re.match(rf"\s*({tag})\s*{re.escape(_SAID)}", after)
        if found and opens and closes and re.search("think|reason", opens[1], re.IGNORECASE):
            return Think(opens[1], closes[1])
        return Think() if "</think>" in template else None

    def shows_results(self) -> bool:
        result = {"role": "tool", "tool_call_id": _IDS[0], "name": _NAMES[0], "content": _RESULT}
        return _RESULT in (self.render([_USER, self.caller(self.no_content(), 1), result], tools=True) or "")

    def takes_text(self) -> bool:
        """Whether arguments given as JSON text come out as the object would."""
        nothing = self.no_content()
        as_object = self.render([_USER, self.caller(nothing, 1)], tools=True)
        as_text = self.render([_USER, self.caller(nothing, 1, arguments=json.dumps(_ARGUMENTS))], tools=True)
        return as_object == as_text

    def layout(self) -> Layout | None:
        """The layout that gives exactly what the template renders, for one, two and three calls."""
        found = [each for each in map(self._layout, (_SAID, *_NOTHING)) if each is not None]
        return min(found, key=lambda layout: len("".join(layout.open)), default=None)

    def no_content(self) -> str | None:
        """What the template takes as the content of a message that only calls."""
        return next((each for each in _NOTHING if self._calls(each, 1) is not None), "")

    def _layout(self, content: str | None) -> Layout | None:
        one = self._calls(content, 1)
        if one is None or one.count(_NAMES[0]) != 1:
            return None
        opening, _, rest = one.partition(_NAMES[0])
        opened = _fixed(opening.lstrip())
        found = _json_arguments(rest) or _tag_arguments(rest, self._calls(content, 1, arguments={}))
        if not opened[0] or found is None:
            return None
        arguments, close = found
        lead = opening[: len(opening) - len(opening.lstrip())] if content else ""
        single = Layout(opened, close, None, arguments, lead, at_start=opened[0].startswith("{"))
        if not self._renders(single, content, 1):
            return None
        several = self._several(single, content)
        good = several is not None and all(self._renders(several, content, calls) for calls in (2, 3))
        return several if good else single

    def _several(self, single: Layout, content: str | None) -> Layout | None:
        """`single` with what stands between two calls: from the end of the arguments to the second's name."""
        two = self._calls(content, 2)
        start = single.lead + self._written(single, 1).removesuffix(_HOLE.join(single.close))
        if two is None or not two.startswith(start) or _NAMES[1] not in two:
            return None
        between, _, second = two[len(start) :].partition(_NAMES[1])
        arguments, again = single.arguments, _json_arguments(second)
        if isinstance(arguments, JsonArguments) and again is not None:
            before = _same(arguments.before, again[0].before)
            arguments = JsonArguments(before, arguments.item_separator, arguments.key_separator)
        return replace(single, between=_fixed(between), arguments=arguments)

    def _renders(self, layout: Layout, content: str | None, calls: int) -> bool:
        rendered, written = self._calls(content, calls), self._written(layout, calls)
        if isinstance(layout.arguments, JsonArguments) and len(layout.arguments.before) > 1:
            rendered = re.sub(r"(?<=:)\d", _HOLE, rendered or "")  # calls that are counted
        return rendered is not None and rendered.strip() == written.strip()

    def _written(self, layout: Layout, calls: int) -> str:
        style = layout.arguments
        separators = (style.item_separator, style.key_separator) if isinstance(style, JsonArguments) else None
        arguments = json.dumps(_ARGUMENTS, separators=separators)
        return layout.text([(name, arguments, _HOLE) for name in _NAMES[:calls]])

    def _calls(self, content: str | None, calls: int, arguments: Any = None) -> str | None:
        """The text of an answer's calls alone, with holes for ids: from the end of its content to the end of it."""
        plain = self.render([_USER, {"role": "assistant", "content": _SAID}], tools=True)
        text = self.render([_USER, self.caller(content, calls, arguments=arguments)], tools=True)
        begun = self.render([_USER], tools=True, begin=True)
        if text is None or plain is None or begun is None or (content and content not in text):
            return None
        start = text.index(content) + len(content) if content else len(_tags(_shared_start(text, begun)))
        end = text.rfind(plain.partition(_SAID)[2].strip() or "\1")
        text = text[start : end if end > text.rfind(_NAMES[calls - 1]) else None]
        if _NAMES[0] not in text:
            return None
        for call_id in _IDS:
            text = text.replace(call_id, _HOLE)
        last = max(text.rfind(word) for word in (_NAMES[calls - 1], "two"))
        ends = [text.find(token, last) for token in ("<|eom_id|>", "<|eot_id|>", self._tokenizer.eos_token or "</s>")]
        return text[: min((end for end in ends if end >= 0), default=len(text))]


def _json_arguments(rest: str) -> tuple[JsonArguments, Fixed] | None:
    """rest: from behind the name."""
    for separators in ((", ", ": "), (",", ":")):
        before, found, close = rest.partition(json.dumps(_ARGUMENTS, separators=separators))
        if found:
            return JsonArguments(_fixed(before), *separators), _fixed(close.rstrip())
    return None


def _tag_arguments(rest: str, none: str | None) -> tuple[TagArguments, Fixed] | None:
    """rest: from behind the name; none: the same call without arguments, from its beginning."""
    nested = re.escape(json.dumps(_ARGUMENTS["probe_o"])).replace(r",\ ", r",\ ?").replace(r":\ ", r":\ ?")
    words = ("probe_key", "probe_value", "probe_n", "7", "probe_o", nested)
    match = re.fullmatch("(.*?)" + "(.*?)".join(words) + "(.*)", rest, re.DOTALL)
    if match is None or none is None or _HOLE in rest:
        return None
    first, text_key, next_a, json_key, next_b, json_again, last = match.groups()
    value_close = _tags(_shared_start(next_a, last))
    key_open, after = next_a[len(value_close) :], last[len(value_close) :].rstrip()
    before = first.removesuffix(key_open)
    tagged = len(value_close.strip()) >= 4 and key_open and next_a == next_b and json_key == json_again
    if not tagged or not first.endswith(key_open) or none.partition(_NAMES[0])[2].rstrip() != before + after:
        return None
    return TagArguments(before, key_open, text_key, json_key, value_close, ""), (after,)


def _tags(shared: str) -> str:
    """`shared` without a tag at its end that is not whole."""
    return shared if "<" not in shared.rpartition(">")[2] else shared[: shared.rindex("<")]


def _shared_start(a: str, b: str) -> str:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _same(first: Fixed, second: Fixed) -> Fixed:
    """The text before arguments that two calls share: a number that counts the calls is a hole."""
    if first == second or len(first) != 1:
        return first
    return _fixed(re.sub(r"\d+", _HOLE, first[0]))


def _fixed(text: str) -> Fixed:
    return tuple(text.split(_HOLE))
