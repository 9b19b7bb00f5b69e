"""One turn of a conversation: what every chat API becomes, and how it becomes a job and the parser of its answer.

Knows messages, tools and formats; no HTTP and no API's own names. `field` of the errors raised here names the field of
the turn; an API that calls it otherwise renames it.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from stoker.errors import OptionError
from stoker.generate.answers.harmony import HarmonyParser
from stoker.generate.answers.layout import Think, tool_parameters
from stoker.generate.answers.learn import Dialect, dialect_of
from stoker.generate.answers.parser import Parser
from stoker.generate.answers.parts import AnswerParser, Plain
from stoker.generate.chat_template import chat_text, has_chat_template
from stoker.generate.constraint import Channels, Guided, compile_grammar, reasoning_tokens
from stoker.generate.grammar import Function, Grammar, Shape, harmony_grammar
from stoker.generate.job import Constraint, Job
from stoker.generate.request import Request, SamplingOptions
from stoker.generate.schema_limits import check_schema
from stoker.generate.vocabulary import Vocabulary, special_tokens, vocabulary_of
from stoker.server.messages import for_template

log = logging.getLogger("stoker.server")

Message = dict[str, Any]
Tool = dict[str, Any]
# What a name may be in every layout: nothing that a tag or JSON would end at.
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
# Variables by which templates turn reasoning on and off.
_SWITCHES = ("enable_thinking", "thinking")


class Served(Protocol):
    """What is needed of a loaded model."""

    @property
    def model(self) -> Any: ...

    def encode(self, text: str) -> list[int]: ...

    def sampling(self, asked: Mapping[str, Any]) -> SamplingOptions: ...

    def limit_tokens(self, prompt_tokens: int, asked: int | None) -> int: ...


@dataclass(frozen=True)
class JsonObject:
    """The answer is any one JSON object."""


@dataclass(frozen=True)
class JsonSchema:
    """The answer is one JSON value that `schema` accepts."""

    schema: Mapping[str, Any]
    name: str = "response"
    strict: bool = True


@dataclass(frozen=True)
class Turn:
    """messages: as chat templates take them (role, content as text, tool_calls, tool_call_id, reasoning_content).

    tools: in OpenAI's form, {"type": "function", "function": {name, description, parameters}}. tool_choice: auto, none,
    required, or the name of a function. sampling: names of SamplingOptions, None where not asked. template: variables
    for the chat template, and reasoning_effort. thinking_tokens: the most tokens of reasoning.
    """

    messages: list[Message]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    format: JsonObject | JsonSchema | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    thinking_tokens: int | None = None


def refused(field_name: str, what: str, **more: Any) -> OptionError:
    """An OptionError about one field of the request."""
    error = OptionError(what, **more)
    error.field = field_name
    return error


def renamed(error: OptionError, names: Mapping[str, str]) -> OptionError:
    """`error`, with the field's name as an API has it. names: regular expressions to replacements; the first that
    matches counts."""
    for pattern, name in names.items():
        if error.field is not None and (match := re.match(pattern, error.field)):
            error.field = match.expand(name) + error.field[match.end() :]
            break
    return error


def prepare(service: Served, turn: Turn) -> tuple[Job, AnswerParser]:
    """The job that answers `turn`, and the parser of its text. Raises OptionError with `.field`.

    Takes from a millisecond to seconds (templates, tokens, grammars): run it off the event loop.
    """
    prompt, dialect, functions = _prompt(service, turn)
    ids = service.encode(prompt)
    think = dialect.think
    thinking = think is not None and prompt.rstrip().endswith(think.open)
    constraint, shape, budget = None, _shape(turn, functions), _thinking_tokens(service, dialect, turn)
    if shape is not None or budget is not None:
        runtime = service.model.runtime
        vocabulary = vocabulary_of(service.model.tokenizer, runtime.vocab_size, runtime.eos_token_ids)
        constraint = _constraint(vocabulary, dialect, shape, budget, thinking=thinking)
    marked = dialect.harmony or _has_marks(service.model.tokenizer, dialect, functions)
    request = Request(
        tuple(ids),
        service.sampling(turn.sampling),
        max_tokens=service.limit_tokens(len(ids), turn.max_tokens),
        stop=turn.stop,
    )
    callable_now = {} if turn.tool_choice == "none" else {each.name: each.parameters for each in functions}
    parser: AnswerParser = Plain()
    if dialect.harmony:
        parser = HarmonyParser(callable_now)
    elif think is not None or callable_now:
        layout = dialect.layout if callable_now else None
        parser = Parser(think, thinking=thinking, layout=layout, tools=callable_now)
    return Job(request, constraint, skip_special_tokens=not marked), parser


def prompt_ids(service: Served, turn: Turn) -> list[int]:
    """The token ids that `turn` begins with."""
    return service.encode(_prompt(service, turn)[0])


def _prompt(service: Served, turn: Turn) -> tuple[str, Dialect, tuple[Function, ...]]:
    tokenizer = service.model.tokenizer
    if not has_chat_template(tokenizer):
        raise refused(
            "messages", "this model has no chat template", remedy="use /v1/completions with a prompt of plain text"
        )
    dialect, template = dialect_of(tokenizer), str(tokenizer.chat_template)
    functions = _functions(turn)
    messages = for_template(dialect, template, turn.messages, turn.tools)
    variables = _variables(dialect, template, turn.template)
    if turn.tools and dialect.described:
        variables["tools"] = list(turn.tools)
    try:
        return chat_text(tokenizer, messages, **variables), dialect, functions
    except OptionError as error:
        error.field = "messages"
        raise


def _functions(turn: Turn) -> tuple[Function, ...]:
    """The tools, checked."""
    functions: list[Function] = []
    for index, tool in enumerate(turn.tools):
        where, function = f"tools[{index}].function", tool["function"]
        name = function["name"]
        if not _NAME.fullmatch(name):
            raise refused(f"{where}.name", "not a name", expected="letters, digits and _ . : / -", got=repr(name[:80]))
        if any(name == other.name for other in functions):
            raise refused(f"{where}.name", "two tools have this name", got=name)
        parameters = tool_parameters(tool)
        check_schema(parameters, f"{where}.parameters")
        if parameters.get("type", "object") != "object" or not isinstance(parameters.get("properties", {}), Mapping):
            raise refused(f"{where}.parameters", "arguments are one object", expected='"type": "object"')
        functions.append(Function(name, {"type": "object", **parameters}, bool(function.get("strict"))))
    known = ("auto", "none", "required", *(function.name for function in functions))
    if turn.tool_choice not in known:
        raise refused("tool_choice", "there is no such tool", got=turn.tool_choice, expected=", ".join(known))
    if turn.tool_choice not in ("auto", "none") and not functions:
        raise refused("tool_choice", "there are no tools to choose from", got=turn.tool_choice)
    return tuple(functions)


def _shape(turn: Turn, functions: tuple[Function, ...]) -> Shape | None:
    """What the answer may be; None: anything."""
    schema: Mapping[str, Any] | None = None
    if isinstance(turn.format, JsonObject):
        schema = {"type": "object"}
    elif isinstance(turn.format, JsonSchema):
        check_schema(turn.format.schema, "format")
        schema = turn.format.schema
    if not functions:
        return None if schema is None else Shape("none", schema=schema)
    if turn.tool_choice == "none":
        return Shape("none", functions, schema=schema)
    if turn.tool_choice == "auto":
        return Shape("free", functions, turn.parallel_tool_calls, schema)
    chosen = tuple(each for each in functions if turn.tool_choice in ("required", each.name))
    return Shape("only", chosen, turn.parallel_tool_calls and turn.tool_choice == "required")


def _constraint(
    vocabulary: Vocabulary, dialect: Dialect, shape: Shape | None, budget: int | None, *, thinking: bool
) -> Constraint | None:
    """budget: the most tokens of reasoning."""
    opens, closes = reasoning_tokens(vocabulary, dialect.think)
    gate = {"think_open": opens, "think_close": closes, "thinking": thinking} if closes is not None else {}
    guided = None
    if shape is not None:
        mark = dialect.think if closes is None else None
        matcher = _matcher(vocabulary, dialect, shape, mark, thinking=thinking)
        guided = Guided(vocabulary, matcher, thinking_tokens=budget, **gate)  # type: ignore[arg-type]
    if budget is None or (dialect.think is None and not dialect.harmony):
        return guided  # a model that does not reason spends none
    if dialect.harmony:
        return Channels(vocabulary, guided, budget)
    if closes is None:
        raise refused("thinking_tokens", "this model's reasoning cannot be bounded: its marks are no single tokens")
    return guided or Guided(vocabulary, None, thinking_tokens=budget, **gate)  # type: ignore[arg-type]


def _matcher(vocabulary: Vocabulary, dialect: Dialect, shape: Shape, mark: Think | None, *, thinking: bool) -> Any:
    """The compiled grammar. mark: of reasoning that the grammar itself must let through."""

    def text(shape: Shape) -> str:
        if dialect.harmony:
            return harmony_grammar(vocabulary, shape)
        space = dialect.think is not None
        return Grammar(vocabulary, dialect.layout, shape, space=space, think=mark, thinking=thinking).text()

    try:
        return compile_grammar(vocabulary, text(shape))
    except OptionError as whole:
        if shape.schema is not None:
            try:
                compile_grammar(vocabulary, text(Shape("none", schema=shape.schema)))
            except OptionError as error:
                raise refused("format", "this JSON schema cannot be enforced", got=error.got) from error
        lighter = replace(shape, functions=tuple(_held(vocabulary, text, each) for each in shape.functions))
        if lighter == shape:
            raise refused("tools", "these tools are too much for one grammar", got=whole.got) from whole
        return compile_grammar(vocabulary, text(lighter))


def _held(vocabulary: Vocabulary, text: Any, function: Function) -> Function:
    """The function, with any object as arguments where its schema cannot be held; a strict one is refused."""
    try:
        compile_grammar(vocabulary, text(Shape("only", (function,), several=False)))
        return function
    except OptionError as error:
        if function.strict:
            raise refused("tools", f"the schema of {function.name} cannot be enforced", got=error.got) from error
        log.info("the arguments of %s are not held to their schema: %s", function.name, error.got)
        return replace(function, parameters={"type": "object"})


def _has_marks(tokenizer: Any, dialect: Dialect, functions: tuple[Function, ...]) -> bool:
    """Whether the parser needs special tokens as text."""
    think, layout = dialect.think, dialect.layout
    marks = think.open + think.close if think is not None else ""
    if functions:
        marks += layout.text([("name", "{}", "id"), ("name", '{"key": "value"}', "id")])
    return any(token in marks for token in special_tokens(tokenizer))


def _variables(dialect: Dialect, template: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Variables for the template: those that it knows. A reasoning_effort turns reasoning on or off where the template
    has a switch and no effort; a model that does not reason spends none, whatever the effort."""
    given = dict(asked)
    effort = given.get("reasoning_effort")
    if effort is not None and "reasoning_effort" in template:
        if dialect.harmony:  # knows three
            given["reasoning_effort"] = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}.get(
                effort, effort
            )
    elif effort is not None:
        del given["reasoning_effort"]
        switch = _switch(template)
        if switch is not None:
            given.setdefault(switch, effort != "none")
    for name in given:
        if not _mentions(template, name):
            raise refused(f"template.{name}", "the model's chat template has no such variable", got=name)
    return given


def _thinking_tokens(service: Served, dialect: Dialect, turn: Turn) -> int | None:
    """The most tokens of reasoning. An effort of none is 0 where the template cannot turn reasoning off."""
    if turn.template.get("reasoning_effort") != "none":
        return turn.thinking_tokens
    reasons = dialect.harmony or dialect.think is not None
    return 0 if reasons and _switch(str(service.model.tokenizer.chat_template)) is None else turn.thinking_tokens


def _switch(template: str) -> str | None:
    return next((name for name in _SWITCHES if _mentions(template, name)), None)


def _mentions(template: str, name: str) -> bool:
    return re.search(rf"(?<![\w.'\"]){re.escape(name)}(?!\w)", template) is not None
