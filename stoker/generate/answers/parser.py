"""The parser of answers: reasoning first, then content and tool calls in any order. See parts.py for what it promises.

Whitespace around reasoning and calls belongs to the layout, not to the content. What only looks like a call is content.
"""

from collections.abc import Mapping
from typing import Any

from stoker.generate.answers.calls import CallReader
from stoker.generate.answers.feed import FeedParser, Reader
from stoker.generate.answers.layout import Layout, Think
from stoker.generate.answers.parts import Content, Reasoning


class Parser(FeedParser):
    """Parses one answer.

    think: the marks of reasoning, None where the model does not reason; thinking: the prompt ended inside it. layout:
    of tool calls, None where none may be called; tools: JSON schema of the arguments by name.
    """

    def __init__(
        self,
        think: Think | None = None,
        *,
        thinking: bool = False,
        layout: Layout | None = None,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        self._think, self._thinking, self._layout = think, thinking, layout
        self._calls = CallReader(self._feed, layout, tools or {}, self._parts.append) if layout else None
        self._space = ""  # whitespace of the content that may turn out to belong to a call
        self._said = False

    @property
    def called_tools(self) -> bool:
        return self._calls is not None and self._calls.count > 0

    def _answer(self) -> Reader[None]:
        if self._think is not None:
            yield from self._reasoning(self._think)
        if self._calls is None or self._layout is None:
            while True:
                self._say_content(self._feed.take(len(self._feed.text)))
                if not (yield from self._feed.more()):
                    break
        elif self._layout.at_start:
            yield from self._call_at_start(self._layout, self._calls)
        else:
            yield from self._content_and_calls(self._layout, self._calls)
        if self._space and (self._said or not self.called_tools):
            self._parts.append(Content(self._space))

    def _reasoning(self, think: Think) -> Reader[None]:
        found = yield from self._feed.begins([think.open])
        if found is not None:
            self._feed.take(found[1])
        elif not self._thinking:
            return
        yield from self._feed.skip_space()
        held = ""

        def say(text: str) -> None:
            nonlocal held
            whole = held + text
            certain = whole.rstrip()
            held = whole[len(certain) :]
            if certain:
                self._parts.append(Reasoning(certain))

        closed = yield from self._feed.upto(think.close, say)
        if closed:
            self._feed.take(len(think.close))
            yield from self._feed.skip_space()
        elif held:
            self._parts.append(Reasoning(held))

    def _content_and_calls(self, layout: Layout, calls: CallReader) -> Reader[None]:
        while (yield from self._feed.upto(layout.trigger, self._say_content)):
            space = self._space
            if (yield from calls.read()):
                self._space = space.removesuffix(layout.lead) if self._said else ""
                self._flush_space()
                self._said = False
            else:
                self._say_content(self._feed.take(len(layout.trigger)))

    def _call_at_start(self, layout: Layout, calls: CallReader) -> Reader[None]:
        found = yield from self._feed.begins([layout.trigger])
        if found is not None:
            yield from calls.read()
        while True:
            self._say_content(self._feed.take(len(self._feed.text)))
            if not (yield from self._feed.more()):
                return

    def _say_content(self, text: str) -> None:
        whole = self._space + text
        certain = whole.rstrip()
        self._space = whole[len(certain) :]
        if certain:
            self._said = True
            self._parts.append(Content(certain))

    def _flush_space(self) -> None:
        if self._space:
            self._parts.append(Content(self._space))
        self._space = ""
