"""Answers into parts: layouts learned from templates, calls read back as templates write them, any cut of the text."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.generate.answers.harmony import HarmonyParser
from stoker.generate.answers.json_text import JsonObjectText
from stoker.generate.answers.layout import HERMES, JsonArguments, Layout, TagArguments, Think
from stoker.generate.answers.learn import Dialect, learn, log
from stoker.generate.answers.parser import Parser
from stoker.generate.answers.parts import Answer, AnswerParser, ToolArguments, ToolStart
from tests.generate import templates

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "count": {"type": "integer"},
        "deep": {"type": "object"},
        "maybe": {"type": ["string", "null"]},
    },
}
TOOLS: dict[str, Mapping[str, Any]] = {"get": SCHEMA, "get_weather": SCHEMA, "a.b-c": SCHEMA}
ARGUMENTS: list[dict[str, Any]] = [
    {"city": 'Größe </p> "q"\n\n x\\', "count": 3, "deep": {"a": [1, {"b": "}"}]}, "maybe": None},
    {},
    {"city": "", "maybe": "12 a"},
    {"count": -2},
    {"city": "<tool_call>", "maybe": "null and void"},
]


@pytest.fixture(scope="module")
def dialects() -> dict[str, Dialect]:
    return {name: learn(templates.tokenizer(text)) for name, text in templates.NATIVE.items()}


def read(parser: AnswerParser, pieces: Sequence[str]) -> tuple[Answer, list[Any]]:
    """The whole answer, and the order of its parts with neighbours joined."""
    answer, order = Answer(), []
    for piece in [*pieces, None]:
        for part in parser.finish() if piece is None else parser.push(piece):
            answer.add([part])
            key = (type(part).__name__, getattr(part, "index", None))
            text = part.name if isinstance(part, ToolStart) else part.text
            if order and order[-1][0] == key and not isinstance(part, ToolStart):
                order[-1][1] += text
            else:
                order.append([key, text])
    return answer, order


def written(layout: Layout, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    style = layout.arguments
    separators = (style.item_separator, style.key_separator) if isinstance(style, JsonArguments) else None
    triples = [(name, json.dumps(each, ensure_ascii=False, separators=separators), "abcdefghi") for name, each in calls]
    return layout.text(triples)


def called(answer: Answer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def test_every_template_is_understood(dialects: dict[str, Dialect]) -> None:
    for name, dialect in dialects.items():
        assert dialect.native and dialect.described and dialect.system, name
    assert dialects["hermes"].layout == HERMES
    assert dialects["hermes"].raw_arguments and dialects["hermes"].think == Think("<think>", "</think>")
    assert dialects["nemo"].short_ids and dialects["nemo"].layout.close == (', "id": "', '"}]')
    assert dialects["llama"].layout.between is None and dialects["llama"].layout.at_start
    assert dialects["deepseek"].layout.trigger == "<｜tool▁calls▁begin｜>"
    tags = dialects["dsml"].layout.arguments
    assert isinstance(tags, TagArguments) and tags.text_key != tags.json_key
    assert dialects["mistral"].layout.between == ("[TOOL_CALLS]",)


@pytest.mark.parametrize("name", templates.NATIVE)
def test_what_the_template_writes_is_what_the_layout_says(name: str, dialects: dict[str, Dialect]) -> None:
    """Calls that come back are rendered as they were read: the next prompt begins with this answer."""
    dialect, tokenizer = dialects[name], templates.tokenizer(templates.NATIVE[name])
    chosen = [("get", ARGUMENTS[0]), ("a.b-c", {"count": 1})][: 1 if dialect.layout.between is None else 2]
    calls = [
        {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in chosen
    ]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    rendered = str(tokenizer.apply_chat_template(messages, tokenize=False)).removeprefix(str(prompt))
    text = written(dialect.layout, chosen)
    assert rendered.strip().removesuffix("<|im_end|>").strip() == text
    assert called(read(Parser(layout=dialect.layout, tools=TOOLS), [text])[0]) == chosen


@pytest.mark.parametrize("name", templates.NATIVE)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_cut_gives_the_same_parts(name: str, dialects: dict[str, Dialect], data: st.DataObject) -> None:
    layout, think = dialects[name].layout, dialects[name].think
    count = data.draw(st.integers(0, 1 if layout.between is None else 3))
    calls = [(data.draw(st.sampled_from(sorted(TOOLS))), data.draw(st.sampled_from(ARGUMENTS))) for _ in range(count)]
    content = (
        "" if layout.at_start and count else data.draw(st.sampled_from(["", "Let me see: a < b [x] {1}", "x\n", "\n"]))
    )
    text = content + (layout.lead if content.strip() and count else "") + (written(layout, calls) if count else "")
    if think is not None and data.draw(st.booleans()):
        text = f"{think.open}\nhm <tool_call> {{\n{think.close}\n\n{text}"
    text = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text

    def parser() -> Parser:
        return Parser(think, layout=layout, tools=TOOLS)

    whole, expected = read(parser(), [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(parser(), pieces)[1] == expected
    assert read(parser(), list(text))[1] == expected
    assert len({call.id for call in whole.calls}) == len(whole.calls)


@pytest.mark.parametrize("name", templates.NATIVE)
def test_calls_are_read_back(name: str, dialects: dict[str, Dialect]) -> None:
    layout, think = dialects[name].layout, dialects[name].think
    for count in (0, 1, 2, 3):
        for content in ("", "Let me see: a < b [x] {1}", "line\n"):
            if (layout.between is None and count > 1) or (layout.at_start and content and count):
                continue
            calls = [(random.choice(sorted(TOOLS)), ARGUMENTS[(count + index) % 5]) for index in range(count)]
            text = content + (layout.lead if content and count else "") + (written(layout, calls) if count else "")
            thought = f"{think.open}\nI could <tool_call>\n{think.close}\n\n" if think else ""
            answer, _ = read(Parser(think, layout=layout, tools=TOOLS), [thought + text])
            assert called(answer) == calls and answer.content == content, text
            assert answer.reasoning == ("I could <tool_call>" if think else "")


def test_arguments_stream(dialects: dict[str, Dialect]) -> None:
    for name, dialect in dialects.items():
        text = written(dialect.layout, [("get", {"city": "a long name of a city"})])
        parser, told = Parser(layout=dialect.layout, tools=TOOLS), ""
        for index, char in enumerate(text):
            told += "".join(part.text for part in parser.push(char) if isinstance(part, ToolArguments))
            if text[: index + 1].endswith("a long"):
                assert told.endswith("a long"), name
        assert json.loads(told) == {"city": "a long name of a city"}


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get", "arguments": "text"}\n</tool_call>',
        '<tool_call>\n{"name": "get", "argument',
        "<tool_call> is how one calls; </tool_call>",
        "<tool_cal",
        "a <tool_call><tool_call> b",
    ],
)
def test_what_only_looks_like_a_call_is_content(text: str) -> None:
    for pieces in ([text], list(text)):
        parser = Parser(layout=HERMES, tools=TOOLS)
        assert read(parser, pieces)[0].content == text and not parser.called_tools


def test_broken_arguments_are_told_as_they_are() -> None:
    text = '<tool_call>\n{"name": "get", "arguments": {"city": x}}\n</tool_call> after'
    answer, _ = read(Parser(layout=HERMES, tools=TOOLS), list(text))
    assert answer.calls[0].arguments.startswith('{"city": x}') and answer.content.strip() == "after"


def test_whitespace_may_differ() -> None:
    text = 'So:<tool_call>{"name":"get",\n "arguments":\n{"city":"x"} }</tool_call>\n'
    text += '<tool_call>{"name":"a.b-c","arguments":{}}</tool_call>\n'
    answer, _ = read(Parser(layout=HERMES, tools=TOOLS), list(text))
    assert called(answer) == [("get", {"city": "x"}), ("a.b-c", {})] and answer.content == "So:"


def test_reasoning() -> None:
    think = Think()
    opened, _ = read(Parser(think, thinking=True), list("so it is\n</think>\n\nYes.\n"))
    assert (opened.reasoning, opened.content) == ("so it is", "Yes.\n")
    itself, _ = read(Parser(think), list("\n<think>\nso\n</think>\nYes."))
    assert (itself.reasoning, itself.content) == ("so", "Yes.")
    none, _ = read(Parser(think), list("Yes, <think> is a tag."))
    assert (none.reasoning, none.content) == ("", "Yes, <think> is a tag.")
    cut, _ = read(Parser(think, thinking=True), list("so it</thin"))
    assert (cut.reasoning, cut.content) == ("so it</thin", "")


def test_templates_without_tools() -> None:
    thinker = learn(templates.tokenizer(templates.THINKER))
    assert not thinker.native and thinker.layout == HERMES and thinker.think == Think()
    strict = learn(templates.tokenizer(templates.STRICT))
    assert not strict.native and not strict.system and strict.think is None


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (templates.STRICT, None),
        (templates.THINKER, None),
        (templates.HERMES.replace("m.tool_calls or []", "m.tool_calls.nothing.at_all"), "has no attribute"),
        (templates.HERMES.replace("<tool_call>", "{{ raise_exception('no calls here') }}"), "no calls here"),
        (templates.HERMES.replace("a if a is string else a | tojson", "a | length"), "neither as JSON nor between"),
        (templates.HERMES.replace("{{ m.content }}\n</tool_response>", "</tool_response>"), "no results of calls"),
        (templates.HERMES, None),
    ],
)
def test_a_template_whose_way_cannot_be_learned_is_told(
    template: str, told: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    monkeypatch.setattr(log, "propagate", False)
    dialect = learn(templates.tokenizer(template))
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == (told is not None), lines
    assert told is None or (told in lines[0] and "by instruction" in lines[0] and not dialect.native)


HARMONY = [
    (
        "<|channel|>analysis<|message|>hm <| x<|end|><|start|>assistant<|channel|>final<|message|>Hi <|b",
        Answer("hm <| x", "Hi <|b", []),
        [],
    ),
    (
        "<|channel|>commentary<|message|>Now.<|end|><|start|>assistant<|channel|>commentary to=functions.get "
        '<|constrain|>json<|message|>{"city": "x"}',
        Answer("", "Now.", []),
        [("get", {"city": "x"})],
    ),
    (
        ' to=functions.a.b-c<|channel|>commentary json<|message|>{"count": 1}<|call|>',
        Answer(),
        [("a.b-c", {"count": 1})],
    ),
    ("<|channel|>commentary to=functions.other<|message|>{}", Answer("", "{}", []), []),
    ("plain", Answer("", "plain", []), []),
]


@pytest.mark.parametrize(("text", "expected", "calls"), HARMONY)
def test_harmony(text: str, expected: Answer, calls: list[Any]) -> None:
    first = read(HarmonyParser(TOOLS), [text])
    assert read(HarmonyParser(TOOLS), list(text))[1] == first[1]
    assert (first[0].reasoning, first[0].content, called(first[0])) == (expected.reasoning, expected.content, calls)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(), values, max_size=4), st.booleans(), st.sampled_from([None, 1]), st.data())
def test_json_ends_where_it_ends(
    value: dict[str, Any], ascii_only: bool, indent: int | None, data: st.DataObject
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    scanner = JsonObjectText()
    assert scanner.push(text + "}x") == len(text) and scanner.state == "done"
    at = data.draw(st.integers(0, len(text) - 1))
    broken = text[:at] + data.draw(st.sampled_from('{}[]",:0e.+-tfn\\ x\n')) + text[at + 1 :]
    scanner = JsonObjectText()
    taken = broken[: scanner.push(broken)]
    try:
        good = isinstance(json.loads(taken), dict)
    except ValueError:
        good = False
    assert good == (scanner.state == "done")
