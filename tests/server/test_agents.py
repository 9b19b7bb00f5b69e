"""Agents at work: twenty turns with tool calls by the official SDKs, on all three APIs, on a model whose template knows
tools and on one whose template does not. The models' words mean nothing; the grammar makes their calls valid."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import anthropic
import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel, Field

from tests.generate import templates
from tests.generate.tokenizers_ import byte_level
from tests.server.running import Server

TURNS = 20
BLOCK_TOKENS = 64  # at most so many tokens of a prefix are not kept, since the cache keeps whole blocks
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Oslo", "São Paulo"]},
        "day": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "day"],
    "additionalProperties": False,
}
NOTE = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["text"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "note": NOTE}
SYSTEM = "You plan a journey. Use the tools."


@dataclass
class Step:
    """One turn of an agent: the call that it got, and what the server counted."""

    id: str
    name: str
    arguments: Any
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int


def variant(store: Path, name: str, tokenizer: Any) -> Path:
    """The same model with another tokenizer and template."""
    made = store.parent / name
    shutil.copytree(store, made)
    (made / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def server(long_store: Path) -> Iterator[Server]:
    native = variant(long_store, "native", templates.tokenizer(templates.HERMES))
    # A few words less leave room for the marks, which are tokens of their own.
    tokenizer = byte_level(500, chat_template=templates.THINKER)
    tokenizer.add_tokens(["<think>", "</think>"])
    thinker = variant(long_store, "thinker", tokenizer)
    arguments = ("--memory", "2GiB", "--ctx-size", 12_000, "--parallel", 2)
    with Server(long_store, native, thinker, *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def openai_tools() -> list[Any]:
    return [
        {"type": "function", "function": {"name": n, "description": n, "parameters": s}} for n, s in SCHEMAS.items()
    ]


def result_of(name: str, turn: int) -> str:
    return json.dumps({"ok": True, "turn": turn, "from": name})


def chat_agent(url: str, model: str) -> list[Step]:
    """/v1/chat/completions; every other turn streamed."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Plan a week."}]
    steps = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for turn in range(TURNS):
            name = list(SCHEMAS)[turn % 3 // 2]
            choice: Any = "required" if turn % 3 == 1 else {"type": "function", "function": {"name": name}}
            asked: Any = {"model": model, "messages": messages, "tools": openai_tools(), "tool_choice": choice}
            asked |= {"parallel_tool_calls": False, "max_tokens": 200}
            if turn % 2:
                with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
                    done: Any = stream.get_final_completion()
            else:
                done = client.chat.completions.create(**asked)
            message, usage = done.choices[0].message, done.usage
            assert done.choices[0].finish_reason == "tool_calls" and not message.content
            (call,) = message.tool_calls
            arguments, cached = json.loads(call.function.arguments), usage.prompt_tokens_details.cached_tokens
            counted = (usage.prompt_tokens, cached, usage.completion_tokens)
            steps.append(Step(call.id, call.function.name, arguments, *counted))
            function = {"name": call.function.name, "arguments": call.function.arguments}
            kept = {"id": call.id, "type": "function", "function": function}
            output = result_of(call.function.name, turn)
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [kept]},
                {"role": "tool", "tool_call_id": call.id, "content": output},
            ]
        asked = {"model": model, "messages": messages, "tools": openai_tools(), "max_tokens": 12}
        last = client.chat.completions.create(**asked, tool_choice="none").choices[0]
        assert last.message.content and not last.message.tool_calls
    return steps


def messages_agent(url: str, model: str) -> list[Step]:
    """/v1/messages; every other turn streamed."""
    tools: Any = [{"name": n, "description": n, "input_schema": s} for n, s in SCHEMAS.items()]
    messages: list[Any] = [{"role": "user", "content": "Plan a week."}]
    steps = []
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for turn in range(TURNS):
            name = list(SCHEMAS)[turn % 3 // 2]
            choice: Any = {"type": "any"} if turn % 3 == 1 else {"type": "tool", "name": name}
            asked: Any = {"model": model, "max_tokens": 200, "system": SYSTEM, "messages": messages, "tools": tools}
            asked["tool_choice"] = choice | {"disable_parallel_tool_use": True}
            if turn % 2:
                with client.messages.stream(**asked) as stream:
                    done: Any = stream.get_final_message()
            else:
                done = client.messages.create(**asked)
            assert done.stop_reason == "tool_use" and [block.type for block in done.content] == ["tool_use"]
            call, usage = done.content[0], done.usage
            cached = usage.cache_read_input_tokens
            steps.append(Step(call.id, call.name, call.input, usage.input_tokens + cached, cached, usage.output_tokens))
            result = {"type": "tool_result", "tool_use_id": call.id, "content": result_of(call.name, turn)}
            messages += [{"role": "assistant", "content": done.content}, {"role": "user", "content": [result]}]
        asked = {"model": model, "max_tokens": 12, "system": SYSTEM, "messages": messages, "tools": tools}
        last = client.messages.create(**asked, tool_choice={"type": "none"})
        assert {block.type for block in last.content} <= {"text"}
    return steps


def responses_agent(url: str, model: str) -> list[Step]:
    """/v1/responses; every other turn streamed."""
    tools: Any = [
        {"type": "function", "name": n, "description": n, "parameters": s, "strict": True} for n, s in SCHEMAS.items()
    ]
    items: list[Any] = [{"role": "user", "content": "Plan a week."}]
    steps = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for turn in range(TURNS):
            name = list(SCHEMAS)[turn % 3 // 2]
            choice: Any = "required" if turn % 3 == 1 else {"type": "function", "name": name}
            asked: Any = {"model": model, "instructions": SYSTEM, "input": items, "tools": tools, "tool_choice": choice}
            asked |= {"max_output_tokens": 200, "parallel_tool_calls": False, "store": False}
            if turn % 2:
                with client.responses.stream(**asked) as stream:
                    done: Any = stream.get_final_response()
            else:
                done = client.responses.create(**asked)
            (call,) = done.output
            assert done.status == "completed" and call.type == "function_call"
            usage = done.usage
            cached = usage.input_tokens_details.cached_tokens
            arguments = json.loads(call.arguments)
            steps.append(Step(call.call_id, call.name, arguments, usage.input_tokens, cached, usage.output_tokens))
            kept = call.model_dump(exclude_none=True, exclude={"parsed_arguments"})
            output = {"type": "function_call_output", "call_id": call.call_id, "output": result_of(call.name, turn)}
            items += [kept, output]
        last = client.responses.create(
            model=model, instructions=SYSTEM, input=items, tools=tools, tool_choice="none", max_output_tokens=12
        )
        assert all(item.type == "message" for item in last.output)
    return steps


@pytest.mark.parametrize(
    ("agent", "model"),
    [(chat_agent, "native"), (messages_agent, "long"), (responses_agent, "native")],
    ids=["chat", "messages", "responses"],
)
def test_twenty_turns(agent: Callable[[str, str], list[Step]], model: str, server: Server) -> None:
    steps = agent(server.url, model)
    assert len(steps) == TURNS and len({step.id for step in steps}) == TURNS
    for turn, step in enumerate(steps):
        jsonschema_rs.validate(SCHEMAS[step.name], step.arguments)
        if turn % 3 != 1:
            assert step.name == list(SCHEMAS)[turn % 3 // 2], "a named tool is the one that is called"
    for before, after in pairwise(steps):
        assert after.prompt_tokens > before.prompt_tokens + before.answer_tokens - 8
        if after.cached_tokens < before.prompt_tokens - BLOCK_TOKENS:
            pytest.fail(f"a turn computed again what the last one had: {before}, {after}")


# ---- formats, cuts, reasoning ---------------------------------------------------------------------------------------


class Stay(BaseModel):
    """An answer in a form."""

    nights: int = Field(ge=1, le=9)
    city: Literal["Rome", "Oslo"]
    breakfast: bool | None


def test_formats_through_the_sdk(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "A stay, as JSON."}]
    asked: Any = {"model": "native", "messages": messages, "max_tokens": 300}
    parsed = client.chat.completions.parse(**asked, response_format=Stay)
    assert isinstance(parsed.choices[0].message.parsed, Stay) and parsed.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**asked, response_format=Stay) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed
    with_tools = client.chat.completions.create(
        **asked, tools=openai_tools(), temperature=1.0, seed=3,
        response_format={"type": "json_schema", "json_schema": {"name": "stay", "schema": Stay.model_json_schema()}},
    )  # fmt: skip
    message = with_tools.choices[0].message
    assert message.tool_calls or Stay.model_validate_json(message.content or "")


def test_what_is_cut_says_so(client: openai.OpenAI, server: Server) -> None:
    asked: Any = {"model": "native", "messages": [{"role": "user", "content": "x"}], "max_tokens": 40}
    cut = client.chat.completions.create(**asked, tools=openai_tools(), tool_choice="required").choices[0]
    assert cut.finish_reason == "length"
    json_object: Any = {"max_tokens": 6, "response_format": {"type": "json_object"}}
    cut = client.chat.completions.create(**asked | json_object).choices[0]
    assert cut.finish_reason == "length" and (cut.message.content or "").lstrip().startswith("{")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as messages:
        tools: Any = [{"name": n, "description": n, "input_schema": s} for n, s in SCHEMAS.items()]
        choice: Any = {"type": "tool", "name": "get_weather"}
        short = messages.messages.create(**asked | {"max_tokens": 52}, tools=tools, tool_choice=choice)
        calls = [block for block in short.content if block.type == "tool_use"]
        assert short.stop_reason == "max_tokens" and all(isinstance(call.input, dict) for call in calls)


def test_reasoning_on_all_apis(client: openai.OpenAI, server: Server) -> None:
    """The template opens it; a budget closes it; what comes back is taken."""
    question: Any = [{"role": "user", "content": "Why?"}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as messages:
        asked: Any = {"model": "thinker", "messages": question, "max_tokens": 24}
        with messages.messages.stream(**asked, thinking={"type": "enabled", "budget_tokens": 6}) as stream:
            kinds = [event.type for event in stream]
            thought = stream.get_final_message()
        assert [block.type for block in thought.content] == ["thinking", "text"], thought.content
        assert thought.content[0].type == "thinking" and thought.content[0].signature and "thinking" in kinds
        again = [*question, {"role": "assistant", "content": thought.content}, *question]
        off = messages.messages.create(**asked | {"messages": again}, thinking={"type": "disabled"})
        assert [block.type for block in off.content] == ["text"]
    chat = client.chat.completions.create(model="thinker", messages=question, max_tokens=6)
    message: Any = chat.choices[0].message
    assert message.reasoning_content and not message.content and chat.usage is not None
    details = chat.usage.completion_tokens_details
    assert details is not None and details.reasoning_tokens == 6
    sealed = client.responses.create(
        model="thinker", input=question, max_output_tokens=6, include=["reasoning.encrypted_content"]
    )
    (item,) = sealed.output
    assert item.type == "reasoning" and item.content and item.content[0].text == message.reasoning_content
    kept = {"type": "reasoning", "id": item.id, "summary": [], "encrypted_content": item.encrypted_content}
    items: Any = [*question, kept, {"role": "assistant", "content": "So."}, *question]
    answer = client.responses.create(model="thinker", input=items, max_output_tokens=8, reasoning={"effort": "none"})
    assert [each.type for each in answer.output] == ["message"]
    form = {"type": "json_schema", "json_schema": {"name": "stay", "schema": Stay.model_json_schema()}}
    formed = client.chat.completions.create(
        model="thinker",
        messages=question,
        max_tokens=300,
        reasoning_effort="none",
        response_format=form,  # type: ignore
    )
    assert Stay.model_validate_json(formed.choices[0].message.content or "")
