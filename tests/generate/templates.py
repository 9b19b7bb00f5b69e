"""Chat templates in the customs of published models, as short as they can be: each writes tool calls its own way.

What they write was compared with the templates of the models that they are named after.
"""

from transformers import PreTrainedTokenizerFast

from tests.generate.tokenizers_ import byte_level

_HEAD = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n"
    "<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
)
_TAIL = (
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_CALLS = "{% for c in m.tool_calls or [] %}"

HERMES = (
    _HEAD
    + _THINK
    + (
        "{{ m.content }}" + _CALLS + "{% if m.content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": '
        "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}}"
        "\n</tool_call>{% endfor %}"
    )
    + _TAIL
)
QWEN_CODER = (
    _HEAD
    + (
        "{{ m.content }}" + _CALLS + "{{ '\n' }}<tool_call>\n<function={{ c.function.name }}>\n"
        "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    )
    + _TAIL
)
GLM = (
    _HEAD
    + _THINK
    + (
        "{{ m.content }}" + _CALLS + "{{ '\n' }}<tool_call>{{ c.function.name }}\n"
        "{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    )
    + _TAIL
)
MISTRAL = (
    _HEAD
    + (
        "{{ m.content }}"
        + _CALLS
        + "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
    )
    + _TAIL
)
NEMO = (
    _HEAD
    + (
        "{% if m.tool_calls %}[TOOL_CALLS]["
        + _CALLS
        + "{% if c.id | length != 9 %}{{ raise_exception('9') }}{% endif %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
        "{{ '' if loop.last else ', ' }}{% endfor %}]{% else %}{{ m.content }}{% endif %}"
    )
    + _TAIL
)
DEEPSEEK = (
    _HEAD
    + (
        "{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
        + _CALLS
        + "<｜tool▁call▁begin｜>{{ c.function.name }}"
        "<｜tool▁sep｜>{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}"
        "<｜tool▁calls▁end｜>{% endif %}"
    )
    + _TAIL
)
DSML = (
    _HEAD
    + (
        "{{ m.content }}{% if m.tool_calls %}\n\n<DSML|calls>\n"
        + _CALLS
        + '<DSML|invoke name="{{ c.function.name }}">\n'
        '{% for k, v in c.function.arguments | items %}<DSML|parameter name="{{ k }}" '
        "string=\"{{ 'true' if v is string else 'false' }}\">"
        "{{ v if v is string else v | tojson }}</DSML|parameter>\n{% endfor %}</DSML|invoke>\n{% endfor %}"
        "</DSML|calls>{% endif %}"
    )
    + _TAIL
)
LLAMA = (
    _HEAD
    + (
        "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
        + _CALLS
        + '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
        "{% else %}{{ m.content }}{% endif %}"
    )
    + _TAIL
)
APRIEL = (
    _HEAD
    + (
        "{{ m.content }}{% if m.tool_calls %}\n<tool_calls>["
        + _CALLS
        + '{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}{{ '' if loop.last else ', ' }}{% endfor %}]</tool_calls>{% endif %}"
    )
    + _TAIL
)
# Knows no tools at all, and opens the reasoning in the prompt, as many distilled models do.
THINKER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Refuses a system message and two messages of one role in a row.
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

NATIVE = {
    "hermes": HERMES, "qwen_coder": QWEN_CODER, "glm": GLM, "mistral": MISTRAL, "nemo": NEMO, "deepseek": DEEPSEEK,
    "dsml": DSML, "llama": LLAMA, "apriel": APRIEL,
}  # fmt: skip


def tokenizer(template: str, *special: str) -> PreTrainedTokenizerFast:
    """A small real tokenizer with that template; `special` are special tokens beside its own."""
    made = byte_level(chat_template=template)
    if special:
        made.add_special_tokens({"additional_special_tokens": list(special)})
    return made
