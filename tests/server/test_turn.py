"""How turns become prompts: tools by template or by instruction, calls and results that come back, reasoning, refusals.

A model of its own is not needed: templates and tokenizers are real, and nothing is generated.
"""

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import OptionError
from stoker.generate.answers.layout import HERMES
from stoker.generate.answers.parts import Plain
from stoker.generate.constraint import Guided
from stoker.generate.request import SamplingOptions, resolve_sampling
from stoker.server.turn import JsonSchema, Turn, prepare, prompt_ids, refused, renamed
from tests.generate import templates

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather", "parameters": PARAMETERS},
}
USER = {"role": "user", "content": "Weather in Rome?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":  "Rome"}'}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "12 C"}


class Model:
    """What prepare needs of a loaded model."""

    def __init__(self, template: str, *special: str, added: tuple[str, ...] = ()) -> None:
        self.tokenizer = templates.tokenizer(template, *special)
        if added:
            self.tokenizer.add_tokens(list(added))
        runtime = SimpleNamespace(vocab_size=len(self.tokenizer), eos_token_ids=(2,))
        self.model = SimpleNamespace(tokenizer=self.tokenizer, runtime=runtime)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def sampling(self, asked: Mapping[str, Any]) -> SamplingOptions:
        return resolve_sampling(asked)

    def limit_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        return asked or 100

    def prompt(self, turn: Turn) -> str:
        return str(self.tokenizer.decode(prompt_ids(self, turn)))


def test_a_template_that_knows_tools_gets_them() -> None:
    prompt = Model(templates.HERMES).prompt(Turn([USER, CALLED, RESULT, USER], tools=(TOOL,)))
    assert '"description": "The weather"' in prompt and prompt.count("get_weather") == 2
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Rome"}}\n</tool_call>' in prompt, "as written"
    assert "<tool_response>\n12 C\n</tool_response>" in prompt and "# Tools" not in prompt
    coder = Model(templates.QWEN_CODER).prompt(Turn([USER, CALLED, RESULT], tools=(TOOL,)))
    assert "<function=get_weather>\n<parameter=city>\nRome\n</parameter>" in coder


def test_a_template_that_knows_none_gets_instructions() -> None:
    prompt = Model(templates.THINKER).prompt(Turn([USER, CALLED, RESULT, USER], tools=(TOOL,)))
    system, _, rest = prompt.partition("<|im_end|>")
    assert system.startswith("<|im_start|>system\n# Tools") and json.dumps(TOOL["function"]) in system
    assert HERMES.text([("NAME", '{"KEY": "VALUE"}', "")]) in system
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Rome"}}\n</tool_call><|im_end|>' in rest
    assert "user\n<tool_response>\n12 C\n</tool_response>\nWeather in Rome?<|im_end|>" in rest
    told = Model(templates.THINKER).prompt(Turn([{"role": "system", "content": "Be brief."}, USER], tools=(TOOL,)))
    assert told.startswith("<|im_start|>system\nBe brief.\n\n# Tools")


def test_a_template_that_takes_no_system_message() -> None:
    prompt = Model(templates.STRICT).prompt(Turn([USER, CALLED, RESULT, USER], tools=(TOOL,)))
    assert prompt.startswith("<|im_start|>user\n# Tools") and "\n\nWeather in Rome?<|im_end|>" in prompt
    with pytest.raises(OptionError) as error:
        Model(templates.STRICT).prompt(Turn([{"role": "system", "content": "x"}, USER]))
    assert error.value.field == "messages"


def test_ids_that_a_template_insists_on() -> None:
    prompt = Model(templates.NEMO).prompt(Turn([USER, CALLED, RESULT], tools=(TOOL,)))
    call_id = prompt.partition('"id": "')[2].partition('"')[0]
    assert len(call_id) == 9 and call_id.isalnum()
    kept = {**CALL, "id": "abc123XYZ"}
    prompt = Model(templates.NEMO).prompt(Turn([USER, {**CALLED, "tool_calls": [kept]}], tools=(TOOL,)))
    assert '"id": "abc123XYZ"' in prompt


def test_the_next_prompt_begins_with_this_answer() -> None:
    """What the grammar lets the model write is what the template makes of it."""
    for template in (templates.HERMES, templates.THINKER.replace("<think>\n", "")):
        model = Model(template)
        first = model.prompt(Turn([USER], tools=(TOOL,)))
        answer = HERMES.text([("get_weather", '{"city": "Rome"}', "")])
        call = {**CALL, "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
        second = model.prompt(Turn([USER, {**CALLED, "tool_calls": [call]}, RESULT], tools=(TOOL,)))
        assert second.startswith(first + answer)


def test_parsers_and_constraints_are_there_where_they_are_needed() -> None:
    job, parser = prepare(Model(templates.STRICT), Turn([USER]))
    assert isinstance(parser, Plain) and job.constraint is None and job.skip_special_tokens
    job, parser = prepare(Model(templates.HERMES), Turn([USER], tools=(TOOL,)))
    assert isinstance(job.constraint, Guided) and job.skip_special_tokens
    marked = Model(templates.MISTRAL, "[TOOL_CALLS]", "[ARGS]")
    job, parser = prepare(marked, Turn([USER], tools=(TOOL,)))
    assert not job.skip_special_tokens, "the parser must see the marks"
    (start, arguments) = parser.push('[TOOL_CALLS]get_weather[ARGS]{"city"')
    assert start.name == "get_weather" and arguments.text == '{"city"'  # type: ignore[union-attr]
    job, parser = prepare(marked, Turn([USER], tools=(TOOL,), tool_choice="none"))
    assert parser.push("[TOOL_CALLS]x") and not parser.called_tools


def thinker(template: str = templates.THINKER) -> Model:
    return Model(template, added=("<think>", "</think>"))


def test_reasoning_begins_in_the_prompt() -> None:
    job, parser = prepare(thinker(), Turn([USER], format=JsonSchema(PARAMETERS)))
    (thought,) = parser.push("so")
    assert type(thought).__name__ == "Reasoning"
    assert isinstance(job.constraint, Guided) and not job.constraint.ended


def allowed(job: Any) -> int:
    mask = job.constraint.mask()
    return sum(int(word).bit_count() for word in mask)


def test_effort_and_budget() -> None:
    """An effort of none closes reasoning at once where the template has no switch; a budget is a bound."""
    for turn in (Turn([USER], template={"reasoning_effort": "none"}), Turn([USER], thinking_tokens=0)):
        assert allowed(prepare(thinker(), turn)[0]) == 1
    assert prepare(thinker(), Turn([USER], template={"reasoning_effort": "high"}))[0].constraint is None
    switched = thinker(templates.THINKER.replace("<think>\n", "{{ '' if enable_thinking else '<think>\n\n</think>' }}"))
    assert switched.prompt(Turn([USER], template={"reasoning_effort": "none"})).endswith("</think>")
    assert not switched.prompt(Turn([USER], template={"reasoning_effort": "low"})).endswith("</think>")
    effort = Model(templates.STRICT + "{{ reasoning_effort }}")
    assert effort.prompt(Turn([USER], template={"reasoning_effort": "low"})).endswith("low")
    several = Model(templates.THINKER)
    with pytest.raises(OptionError) as error:
        prepare(several, Turn([USER], thinking_tokens=5))
    assert error.value.field == "thinking_tokens"
    assert prepare(Model(templates.STRICT), Turn([USER], thinking_tokens=5))[0].constraint is None


@pytest.mark.parametrize(
    ("turn", "field"),
    [
        (Turn([USER], tools=(TOOL, TOOL)), "tools[1].function.name"),
        (Turn([USER], tools=({"type": "function", "function": {"name": 'a"b'}},)), "tools[0].function.name"),
        (Turn([USER], tools=(TOOL,), tool_choice="other"), "tool_choice"),
        (Turn([USER], tool_choice="required"), "tool_choice"),
        (Turn([USER], template={"unknown": 1}), "template.unknown"),
        (Turn([USER], format=JsonSchema({"not": {}})), "format"),
        (Turn([USER], tools=(TOOL,), format=JsonSchema({"not": {}})), "format"),
    ],
)
def test_refusals_name_the_field(turn: Turn, field: str) -> None:
    with pytest.raises(OptionError) as error:
        prepare(Model(templates.HERMES), turn)
    assert error.value.field == field


def test_schemas_of_tools_are_held_as_far_as_they_can_be() -> None:
    def tool(**more: Any) -> dict[str, Any]:
        schema = {
            "type": "object",
            "properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"$ref": "http://x/y"}},
        }
        return {"type": "function", "function": {"name": "f", "parameters": schema, **more}}

    job, _ = prepare(Model(templates.HERMES), Turn([USER], tools=(tool(), TOOL), tool_choice="required"))
    assert isinstance(job.constraint, Guided)
    with pytest.raises(OptionError) as error:
        prepare(Model(templates.HERMES), Turn([USER], tools=(TOOL, tool(strict=True))))
    assert error.value.field == "tools" and "f" in error.value.what


def test_fields_get_the_names_of_an_api() -> None:
    names = {r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema", "format": "text.format"}
    assert renamed(refused("tools[3].function.parameters", "x"), names).field == "tools[3].input_schema"
    assert renamed(refused("format", "x"), names).field == "text.format"
    assert renamed(refused("messages", "x"), names).field == "messages"
