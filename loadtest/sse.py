"""Server-sent events out of a stream of bytes, cut anywhere (WHATWG HTML, section 9.2).

Of the fields only ``data`` matters here: comments, which servers send to keep connections open,
and ``event``, ``id`` and ``retry`` are passed over. Knows nothing about what the data means.
"""


class EventParser:
    """Feed it bytes as they come; it gives the data of each event that they complete."""

    def __init__(self) -> None:
        self._rest = b""  # of a line that has not ended
        self._lines: list[bytes] = []  # data of the event that has not ended

    def feed(self, received: bytes) -> list[str]:
        """Raises UnicodeDecodeError when the data is not UTF-8."""
        text = self._rest + received if self._rest else received
        half = b""
        if b"\r" in text:
            if text.endswith(b"\r"):  # perhaps half of a line's end
                text, half = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        self._rest = rest + half
        return [event for line in lines if (event := self._take(line)) is not None]

    def close(self) -> list[str]:
        """The stream is over. An event whose blank line is missing counts all the same."""
        return self.feed(b"\n\n")

    def _take(self, line: bytes) -> str | None:
        """The event that this line ends, if it does."""
        if line.startswith(b"data:"):
            self._lines.append(line[6:] if line.startswith(b"data: ") else line[5:])
        elif not line and self._lines:
            event = b"\n".join(self._lines).decode()
            self._lines.clear()
            return event
        return None
