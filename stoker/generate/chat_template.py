"""Messages to the text that the model was trained on, by the model's own chat template.

The template is code from the checkpoint: transformers runs it in jinja2's immutable sandbox, and nothing here goes
around that. Knows messages and a tokenizer, no model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.errors import OptionError

Message = Mapping[str, Any]


def has_chat_template(tokenizer: Any) -> bool:
    """Whether the model came with a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_text(tokenizer: Any, messages: Sequence[Message], **variables: Any) -> str:
    """`messages` as prompt text that ends where the assistant's answer begins. `variables` go to the template.

    Raises OptionError when the model has no template, a message is malformed, or the template refuses the messages
    (some know no system role, or insist that user and assistant alternate).
    """
    from jinja2 import TemplateError

    _check(messages)
    if not has_chat_template(tokenizer):
        raise OptionError(
            "this model has no chat template", where="messages",
            expected="a chat_template in tokenizer_config.json or chat_template.jinja",
            remedy="give a plain text prompt instead of messages (on the command line: --raw)",
        )  # fmt: skip
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **variables
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise OptionError(
            f"the model's chat template refuses these messages: {error}", where="messages", got=f"roles {roles}"
        ) from error
    return str(text)


def chat_ids(tokenizer: Any, messages: Sequence[Message], **variables: Any) -> list[int]:
    """The token ids of `chat_text`. The template writes special tokens itself, so the tokenizer adds none."""
    return list(tokenizer.encode(chat_text(tokenizer, messages, **variables), add_special_tokens=False))


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise OptionError("there are no messages", where="messages", expected="at least one")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise OptionError("not a message", where=where, expected='{"role": ..., "content": ...}', got=repr(message))
        if "content" not in message and "tool_calls" not in message:
            raise OptionError("a message without content", where=where, expected="content", got=", ".join(message))
