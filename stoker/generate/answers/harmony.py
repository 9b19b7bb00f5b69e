"""The parser of gpt-oss answers: messages on channels, as OpenAI's harmony format describes them.

analysis is reasoning; commentary without a recipient and final are content; a message to functions.NAME is a call. The
prompt ends behind `<|start|>assistant`. A message to anyone else is content, so that nothing is lost.
"""

import re
from collections.abc import Mapping
from typing import Any

from stoker.generate.answers.feed import FeedParser, Reader
from stoker.generate.answers.parts import Content, Reasoning, ToolArguments, ToolStart, new_call_id

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class HarmonyParser(FeedParser):
    """Parses one answer. tools: JSON schema of the arguments by name."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__()
        self._tools = tools or {}
        self._count = 0

    @property
    def called_tools(self) -> bool:
        return self._count > 0

    def _answer(self) -> Reader[None]:
        while True:
            header: list[str] = []
            if not (yield from self._feed.upto(MESSAGE, header.append)):
                self._leftover("".join(header))
                return
            self._feed.take(len(MESSAGE))
            yield from self._message("".join(header))

    def _message(self, header: str) -> Reader[None]:
        recipient = _RECIPIENT.search(header)
        if recipient and recipient[1] in self._tools:
            index = self._count
            self._count += 1
            self._parts.append(ToolStart(index, new_call_id(), recipient[1]))
            yield from self._body(lambda text: self._parts.append(ToolArguments(index, text)))
        elif re.search(rf"{re.escape(CHANNEL)}\s*analysis", header) and not recipient:
            yield from self._body(lambda text: self._parts.append(Reasoning(text)))
        else:
            yield from self._body(lambda text: self._parts.append(Content(text)))

    def _body(self, say: Any) -> Reader[None]:
        """The text of a message, up to a mark that ends it; the mark is taken."""

        def tell(text: str) -> None:
            if text:
                say(text)

        while (yield from self._feed.upto("<|", tell)):
            found = yield from self._feed.begins([END, CALL, RETURN, START], loose=False)
            if found is None:
                tell(self._feed.take(2))
                continue
            if found[0] != START:
                self._feed.take(found[1])
            return

    def _leftover(self, header: str) -> None:
        """A header that no message follows: nothing, or text that was written outside every message."""
        rest = re.sub(r"(<\|start\|>)?assistant|<\|(start|channel|constrain)\|>.*", "", header, flags=re.DOTALL).strip()
        if rest:
            self._parts.append(Content(rest))
