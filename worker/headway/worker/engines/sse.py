"""Reading a server-sent event stream: pure, bytes in, payloads out."""

#: The payload with which OpenAI-compatible servers end a stream that was told to its end.
DONE = b"[DONE]"


#: Bytes that one event may have. Who sends more without an end to it has lost its way, and would fill the memory.
MAX_EVENT_BYTES = 64 * 2**20


class EventReader:
    """Cuts a byte stream into the `data` payloads of its events, wherever the pieces were cut."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """The payloads that this piece completes; events without data (comments, heartbeats) have none.

        Some servers end their lines in CR LF. Neither stands inside a payload: JSON escapes both.

        Raises:
            ValueError: an event is larger than `MAX_EVENT_BYTES`.
        """
        # What was searched before has no end of an event, but its last byte may be half of one.
        searched = max(0, len(self._rest) - 1)
        self._rest += piece.replace(b"\r", b"")
        if (cut := self._rest.rfind(b"\n\n", searched)) < 0:
            if len(self._rest) > MAX_EVENT_BYTES:
                raise ValueError("an event of the stream has no end")
            return []
        events, self._rest = bytes(self._rest[:cut]), self._rest[cut + 2 :]
        return [payload for event in events.split(b"\n\n") if (payload := _data(event))]


def _data(event: bytes) -> bytes:
    lines = (line.removeprefix(b"data:").removeprefix(b" ") for line in event.split(b"\n") if line[:5] == b"data:")
    return b"\n".join(lines)
