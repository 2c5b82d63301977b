"""Reading a server-sent event stream: pure, bytes in, payloads out."""

#: The payload with which OpenAI-compatible servers end a stream that was told to its end.
DONE = b"[DONE]"


class EventReader:
    """Cuts a byte stream into the `data` payloads of its events, wherever the pieces were cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The payloads that this piece completes; events without data (comments, heartbeats) have none.

        Some servers end their lines in CR LF. Neither stands inside a payload: JSON escapes both.
        """
        *events, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        return [payload for event in events if (payload := _data(event))]


def _data(event: bytes) -> bytes:
    lines = (line.removeprefix(b"data:").removeprefix(b" ") for line in event.split(b"\n") if line[:5] == b"data:")
    return b"\n".join(lines)
