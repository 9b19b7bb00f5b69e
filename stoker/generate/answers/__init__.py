"""From the text of an answer to its parts: reasoning, content, tool calls. One file a format of tool calls."""
