"""Reads the tool calls of one answer by a layout: from its trigger to its end, part by part as they arrive.

Knows layouts and the names and schemas of the tools; nothing of reasoning or of where the text comes from.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from stoker.generate.answers.feed import Feed, Reader
from stoker.generate.answers.json_text import JsonObjectText
from stoker.generate.answers.layout import Fixed, JsonArguments, Layout, TagArguments, split_after
from stoker.generate.answers.parts import Part, ToolArguments, ToolStart, new_call_id
from stoker.generate.answers.tags import TagReader

# An id or a number that the model writes where a layout has a hole.
_ID = re.compile(r"[A-Za-z0-9_-]{0,64}")


class CallReader:
    """Reads calls from `feed` and says their parts. tools: JSON schema of the arguments by name."""

    def __init__(
        self, feed: Feed, layout: Layout, tools: Mapping[str, Mapping[str, Any]], say: Callable[[Part], None]
    ) -> None:
        self._feed, self._layout, self._tools, self._say = feed, layout, tools, say
        self.count = 0

    def read(self) -> Reader[bool]:
        """One run of calls, taken from the feed; False, with nothing taken, where the text is no call of a tool."""
        name = yield from self._head(self._layout.open)
        if name is None:
            return False
        while name is not None:
            yield from self._arguments(name)
            yield from self._end()
            name = None if self._layout.between is None else (yield from self._head(self._next()))
        yield from self._fixed(split_after(self._layout.close, self._layout.call_end))
        return True

    def _next(self) -> Fixed:
        between = self._layout.between
        assert between is not None
        return split_after(between, self._layout.call_end)

    def _head(self, before: Fixed) -> Reader[str | None]:
        """Take what comes before a call's arguments, with its name; None, with nothing taken, where it is not there."""
        style = self._layout.arguments
        after = style.before if isinstance(style, JsonArguments) else (style.before,)
        taken = yield from self._fixed(before)
        if taken is None:
            return None
        found = yield from self._name(after[0])
        if found is not None:
            name, text = found
            taken += text
            rest = yield from self._fixed(("", *after[1:]))
            taken += rest or ""
            if rest is not None and (isinstance(style, TagArguments) or (yield from self._feed.begins(["{"]))):
                self._say(ToolStart(self.count, new_call_id(), name))
                self.count += 1
                return name
        self._feed.text = taken + self._feed.text
        return None

    def _name(self, after: str) -> Reader[tuple[str, str] | None]:
        """A tool's name with the text that must follow it."""
        found = yield from self._feed.begins([name + after for name in self._tools])
        if found is None:
            return None
        head, length = found
        return head[: len(head) - len(after)], self._feed.take(length)

    def _fixed(self, fixed: Fixed) -> Reader[str | None]:
        """Take fixed text and the ids in its holes; None, with nothing taken, where it is not there."""
        taken = ""
        for index, piece in enumerate(fixed):
            if index:
                taken += yield from self._id()
            found = yield from self._feed.begins([piece])
            if found is None:
                self._feed.text = taken + self._feed.text
                return None
            taken += self._feed.take(found[1])
        return taken

    def _id(self) -> Reader[str]:
        while True:
            found = _ID.match(self._feed.text)
            assert found is not None
            if found.end() < len(self._feed.text) or not (yield from self._feed.more()):
                return self._feed.take(found.end())

    def _arguments(self, name: str) -> Reader[None]:
        index = self.count - 1

        def say(text: str) -> None:
            if text:
                self._say(ToolArguments(index, text))

        if isinstance(self._layout.arguments, TagArguments):
            yield from TagReader(self._feed, self._layout.arguments, self._tools[name], say).read()
        else:
            yield from self._json(say)

    def _json(self, say: Callable[[str], None]) -> Reader[None]:
        """An object; where it is broken, all that stands before the end of the call is its arguments, as it is."""
        yield from self._feed.skip_space()
        scanner = JsonObjectText()
        while scanner.state == "open":
            say(self._feed.take(scanner.push(self._feed.text)))
            if scanner.state == "open" and not (yield from self._feed.more()):
                return
        if scanner.state == "broken":
            end = self._layout.call_end[0].strip()
            yield from self._feed.upto(end or self._layout.trigger, say)

    def _end(self) -> Reader[None]:
        """What follows the arguments; further fields of a JSON object around them say nothing that is needed."""
        end = self._layout.call_end
        if (yield from self._fixed(end)) is None and end[0].lstrip().startswith("}"):
            scanner, taken = JsonObjectText(inside=True), ""
            while scanner.state == "open":
                taken += self._feed.take(scanner.push(self._feed.text))
                if scanner.state == "open" and not (yield from self._feed.more()):
                    break
            if scanner.state != "done":
                self._feed.text = taken + self._feed.text
                return
            yield from self._fixed((end[0].lstrip()[1:], *end[1:]))
