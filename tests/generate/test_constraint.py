"""Grammars over a real vocabulary: whatever is drawn from their masks parses and validates; what cannot be held is
refused in time, with the reason.

Tokens are drawn by a made-up model that favours what ends things, so that answers stay short.
"""

import json
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from transformers import AutoTokenizer

from stoker.errors import OptionError
from stoker.generate.answers.harmony import HarmonyParser
from stoker.generate.answers.layout import HERMES, Think
from stoker.generate.answers.learn import Dialect, learn
from stoker.generate.answers.parser import Parser
from stoker.generate.answers.parts import Answer
from stoker.generate.constraint import Channels, Guided, compile_grammar, reasoning_tokens
from stoker.generate.grammar import Function, Grammar, Shape, harmony_grammar
from stoker.generate.schema_limits import check_schema, pattern_weight
from stoker.generate.vocabulary import Vocabulary
from tests.generate import templates
from tests.generate.schemas import PERSON, SCHEMAS, UNSUPPORTED, attacks, closed, of

END = 2  # <|im_end|>


@pytest.fixture(scope="session")
def vocabulary(demo_store: Path) -> Vocabulary:
    return Vocabulary(AutoTokenizer.from_pretrained(demo_store), 49_152, [END, 0])


def draw(vocabulary: Vocabulary, constraint: Guided, seed: int, most: int = 150) -> tuple[str, bool]:
    """Text of tokens drawn from the masks, and whether it ended by itself; lengths are bounded by preferring ends."""
    chance, tokens = random.Random(seed), []
    closers = np.unique([token for text in ('"', "}", "]", '"}') for token in vocabulary.ll.tokenize_str(text)])
    for step in range(most):
        mask = constraint.mask()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")) if mask is not None else []
        assert len(allowed), "nothing may follow"
        if END in allowed and (chance.random() < 0.5 or step > 40):
            return vocabulary.ll.decode_str(tokens), True
        ends = np.intersect1d(closers, allowed) if chance.random() < step / 40 else []
        token = int(chance.choice(ends) if len(ends) else chance.choice(allowed))
        if token in (END, 0):
            continue
        constraint.accept(token)
        tokens.append(token)
        if constraint.ended:
            return vocabulary.ll.decode_str(tokens), True
    return vocabulary.ll.decode_str(tokens), False


def value_grammar(vocabulary: Vocabulary, schema: Mapping[str, Any]) -> str:
    return Grammar(vocabulary, HERMES, Shape("none", schema=schema)).text()


def test_there_are_enough_schemas() -> None:
    assert len(SCHEMAS) >= 50


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_what_is_drawn_validates(schema: dict[str, Any], vocabulary: Vocabulary) -> None:
    check_schema(schema, "schema")
    ended = 0
    for seed in range(3):
        matcher = compile_grammar(vocabulary, value_grammar(vocabulary, schema))
        text, whole = draw(vocabulary, Guided(vocabulary, matcher), seed)
        if whole:
            ended += 1
            jsonschema_rs.validate(schema, json.loads(text))
    assert ended, "no answer came to its end"


@pytest.mark.parametrize(("schema", "reason"), UNSUPPORTED, ids=lambda part: json.dumps(part)[:40])
def test_what_cannot_be_enforced_is_named(schema: dict[str, Any], reason: str, vocabulary: Vocabulary) -> None:
    check_schema(schema, "schema")
    with pytest.raises(OptionError) as error:
        compile_grammar(vocabulary, value_grammar(vocabulary, schema))
    assert reason in str(error.value.got)


@pytest.mark.parametrize("name", attacks())
def test_attacks_cost_little(name: str, vocabulary: Vocabulary) -> None:
    """Refused or compiled, in bounded time; and then no step takes long either."""
    schema, begin, constraint = attacks()[name], time.process_time(), None
    try:
        check_schema(schema, "schema")
        constraint = Guided(vocabulary, compile_grammar(vocabulary, value_grammar(vocabulary, schema)))
    except OptionError as error:
        assert name not in ("many items",), error
    assert time.process_time() - begin < 10
    if constraint is not None:
        chance, begin = random.Random(1), time.process_time()
        with suppress(OptionError):  # it may also turn out later, as an error that names the grammar
            for _ in range(40):
                mask = constraint.mask()
                assert mask is not None
                allowed = [t for t in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")) if t > 16]
                if not allowed:
                    break
                constraint.accept(int(chance.choice(allowed)))
                if constraint.ended:
                    break
        assert time.process_time() - begin < 10


def test_weight_of_patterns() -> None:
    assert pattern_weight("^[0-9a-f]{8}-[0-9a-f]{4}$") == 15
    assert pattern_weight("((ab){10}c){10}") == 210
    assert pattern_weight(r"\{3}[}{2}]a{x}") == 8
    assert pattern_weight("(a{1000}){1000}") == 10**6


# ---- calls ----------------------------------------------------------------------------------------------------------

FUNCTIONS = (
    Function(
        "get",
        closed(
            ["city", "count"],
            city=of("string", maxLength=8),
            count=of("integer", minimum=-5, maximum=50),
            maybe={"type": ["string", "null"], "maxLength": 4},
            colour=of("string", enum=["red", "dark blue"]),
        ),
    ),
    Function("get_weather", closed(where=PERSON)),
    Function("a.b-c", of("object", properties={})),
)
TOOLS = {function.name: function.parameters for function in FUNCTIONS}
# Without strings: between tags these end by their tag alone, which nobody draws by chance.
DRAWN = (
    Function(
        "get", closed(["n"], n=of("integer", minimum=-5, maximum=50), colour=of("string", enum=["red", "dark blue"]))
    ),
    Function(
        "get_weather", closed(at=closed(x=of("integer", maximum=9, minimum=0)), maybe={"type": ["boolean", "null"]})
    ),
    Function("a.b-c", of("object", properties={})),
)
MARKS = {
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
}


def dialect(name: str) -> Dialect:
    return learn(templates.tokenizer(templates.NATIVE[name]))


def accepts(vocabulary: Vocabulary, grammar: str, text: str) -> bool:
    constraint = Guided(vocabulary, compile_grammar(vocabulary, grammar))
    for token in vocabulary.ll.tokenize_str(text, parse_special=True):
        mask = constraint.mask()
        if mask is None or not mask[token // 32] >> np.uint32(token % 32) & 1:
            return False
        constraint.accept(token)
    mask = constraint.mask()
    return mask is not None and bool(mask[0] >> np.uint32(END) & 1)


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    triples = [(function, json.dumps(arguments, ensure_ascii=False), "abcdefghi") for function, arguments in calls]
    return dialect(name).layout.text(triples)


@pytest.mark.parametrize("name", templates.NATIVE)
def test_grammars_take_what_templates_write(name: str, vocabulary: Vocabulary) -> None:
    layout = dialect(name).layout
    calls = [("get", {"city": "Gr\n<é", "count": 3, "maybe": None}), ("a.b-c", {}), ("get", {"city": "x", "count": -5})]
    for count in range(1, 2 if layout.between is None else 4):
        for kind in ("only", "free"):
            grammar = Grammar(vocabulary, layout, Shape(kind, FUNCTIONS)).text()
            assert accepts(vocabulary, grammar, written(name, *calls[:count])), (kind, count)
            single = Grammar(vocabulary, layout, Shape(kind, FUNCTIONS, several=False)).text()
            assert accepts(vocabulary, single, written(name, *calls[:count])) == (count == 1), (kind, count)
    free = Grammar(vocabulary, layout, Shape("free", FUNCTIONS)).text()
    quiet = Grammar(vocabulary, layout, Shape("none", FUNCTIONS)).text()
    for grammar in (free, quiet):
        assert accepts(vocabulary, grammar, "Just text: a < b, [x], {1} and <tool")
    assert not accepts(vocabulary, free, written(name, ("get", {"city": "x"}))), "count is missing"
    assert not accepts(vocabulary, free, written(name, ("other", {})))
    assert not accepts(vocabulary, quiet, written(name, calls[1]))
    if not layout.at_start:
        assert accepts(vocabulary, free, "Let me see." + layout.lead + written(name, calls[0]))
        assert not accepts(vocabulary, free, "x " + layout.trigger + " nonsense")


@pytest.mark.parametrize("name", templates.NATIVE)
def test_calls_that_are_drawn_are_read_and_validate(name: str, vocabulary: Vocabulary) -> None:
    layout, ended = dialect(name).layout, 0
    tools = {function.name: function.parameters for function in DRAWN}
    for seed in range(6):
        grammar = Grammar(vocabulary, layout, Shape("only", DRAWN, several=False)).text()
        text, whole = draw(vocabulary, Guided(vocabulary, compile_grammar(vocabulary, grammar)), seed)
        if not whole:
            continue
        ended += 1
        parser, answer = Parser(layout=layout, tools=tools), Answer()
        for piece in [text[i : i + 3] for i in range(0, len(text), 3)]:
            answer.add(parser.push(piece))
        answer.add(parser.finish())
        assert len(answer.calls) == 1 and not answer.content.strip(), text
        jsonschema_rs.validate(dict(tools[answer.calls[0].name]), json.loads(answer.calls[0].arguments))
    assert ended >= 3


@pytest.mark.parametrize("name", MARKS)
def test_marks_that_are_special_tokens(name: str) -> None:
    """Free text cannot hold them, and the grammar asks for the tokens themselves."""
    tokenizer = templates.tokenizer(templates.NATIVE[name], *MARKS[name])
    vocabulary = Vocabulary(tokenizer, len(tokenizer), [END])
    layout = learn(tokenizer).layout
    mark = tokenizer.convert_tokens_to_ids(MARKS[name][0])
    assert vocabulary.pieces("a" + MARKS[name][0]) == ["a", mark] and vocabulary.pieces("[TOOL") == ["[TOOL"]
    only, quiet = (Grammar(vocabulary, layout, Shape(kind, FUNCTIONS)).text() for kind in ("only", "none"))
    constraint = Guided(vocabulary, compile_grammar(vocabulary, only))
    mask = constraint.mask()
    assert mask is not None and np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [mark]
    text, whole = draw(vocabulary, constraint, 1)
    assert text.startswith(MARKS[name][0]) or not whole
    mask = Guided(vocabulary, compile_grammar(vocabulary, quiet)).mask()
    assert mask is not None and not mask[mark // 32] >> np.uint32(mark % 32) & 1


def harmony_vocabulary() -> Vocabulary:
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>")
    tokenizer = templates.tokenizer(templates.HERMES, *marks)
    return Vocabulary(tokenizer, len(tokenizer), [END])


def test_harmony() -> None:
    vocabulary = harmony_vocabulary()
    only, free = (harmony_grammar(vocabulary, Shape(kind, FUNCTIONS)) for kind in ("only", "free"))
    analysis = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"city": "x", "count":1}'
    final = "<|channel|>final<|message|>Hi."
    for grammar in (only, free):
        assert accepts(vocabulary, grammar, call) and accepts(vocabulary, grammar, analysis + analysis + call)
    assert accepts(vocabulary, free, analysis + final) and not accepts(vocabulary, only, final)
    assert not accepts(vocabulary, free, call.replace("get", "other"))
    value = harmony_grammar(vocabulary, Shape("none", schema=PERSON))
    assert accepts(vocabulary, value, analysis + final.replace("Hi.", '{"name": "x", "age": 3}'))
    assert not accepts(vocabulary, value, analysis + final)
    answer = Answer()
    parser = HarmonyParser(TOOLS)
    answer.add([*parser.push(analysis + call), *parser.finish()])
    assert answer.reasoning == "hm" and json.loads(answer.calls[0].arguments) == {"city": "x", "count": 1}


# ---- reasoning ------------------------------------------------------------------------------------------------------


def thinking_vocabulary() -> Vocabulary:
    tokenizer = templates.tokenizer(templates.HERMES)
    tokenizer.add_tokens(["<think>", "</think>"])
    return Vocabulary(tokenizer, len(tokenizer), [END])


def test_reasoning_is_free_and_bounded() -> None:
    vocabulary = thinking_vocabulary()
    opens, closes = reasoning_tokens(vocabulary, Think())
    assert opens is not None and closes is not None
    grammar = Grammar(vocabulary, HERMES, Shape("none", schema=PERSON), space=True).text()

    def guided(**more: Any) -> Guided:
        matcher = compile_grammar(vocabulary, grammar)
        return Guided(vocabulary, matcher, think_open=opens, think_close=closes, **more)

    def allowed(constraint: Guided) -> set[int]:
        mask = constraint.mask()
        assert mask is not None
        return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())

    def feed(constraint: Guided, text: str) -> None:
        for token in vocabulary.ll.tokenize_str(text):
            assert token in allowed(constraint), text
            constraint.accept(token)

    brace = vocabulary.ll.tokenize_str("{")[0]
    itself = guided()
    assert {opens, brace} <= allowed(itself) and END not in allowed(itself)
    itself.accept(opens)
    assert END not in allowed(itself), "reasoning does not end the answer"
    feed(itself, 'free {"x" text')
    itself.accept(closes)
    feed(itself, '\n\n{"name": "x", "age": 3}')
    assert itself.ended
    opened = guided(thinking=True, thinking_tokens=3)
    feed(opened, "abc")
    assert not opened.ended
    while allowed(opened) != {closes}:
        opened.accept(vocabulary.ll.tokenize_str("x")[0])
    opened.accept(closes)
    assert brace in allowed(opened)
    free = Guided(vocabulary, None, think_open=opens, think_close=closes, thinking=True, thinking_tokens=1)
    free.accept(brace)
    assert allowed(free) == {closes}
    free.accept(closes)
    assert free.mask() is None and not free.ended


def test_marks_of_several_tokens_are_in_the_grammar(vocabulary: Vocabulary) -> None:
    assert reasoning_tokens(vocabulary, Think()) == (None, None)
    shape = Shape("none", schema=PERSON)
    person = '{"name": "x", "age": 3}'
    itself = Grammar(vocabulary, HERMES, shape, space=True, think=Think()).text()
    assert accepts(vocabulary, itself, "<think>hm { </think>\n" + person) and accepts(vocabulary, itself, person)
    opened = Grammar(vocabulary, HERMES, shape, space=True, think=Think(), thinking=True).text()
    assert accepts(vocabulary, opened, "hm { </think>\n" + person) and not accepts(vocabulary, opened, person)


def test_the_reasoning_of_channels_is_bounded() -> None:
    vocabulary = harmony_vocabulary()
    end = vocabulary.token("<|end|>")
    text = "<|channel|>analysis<|message|>abcdefghijklmnopqrstuvwxyz"
    inner = Guided(vocabulary, compile_grammar(vocabulary, harmony_grammar(vocabulary, Shape("free", FUNCTIONS))))
    for constraint in (Channels(vocabulary, inner, 4), Channels(vocabulary, None, 4)):
        spent = 0
        for token in vocabulary.ll.tokenize_str(text, parse_special=True):
            mask = constraint.mask()
            if mask is not None and not mask[token // 32] >> np.uint32(token % 32) & 1:
                break
            constraint.accept(token)
            spent += 1
        assert spent == len(vocabulary.ll.tokenize_str(text[:30], parse_special=True)) + 4
        mask = constraint.mask()
        assert mask is not None and end is not None
        assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [end]
        for token in vocabulary.ll.tokenize_str(
            "<|end|><|start|>assistant<|channel|>final<|message|>Yes", parse_special=True
        ):
            mask = constraint.mask()
            assert mask is None or mask[token // 32] >> np.uint32(token % 32) & 1
            constraint.accept(token)
        assert not constraint.ended
