"""What of an engine's HTTP answer has arrived: pure, bytes in, chunks and the end of the run out."""

import json
import re
from collections.abc import Mapping
from typing import Any

from headway.worker.engines.base import Chunk, Final
from headway.worker.engines.sse import DONE, EventReader


def error_body(status_code: int, message: str, kind: str = "InternalServerError") -> bytes:
    """An error object of our own, in the shape of the engine's."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status_code}}).encode()


#: The answer to a request whose answer stopped in the middle.
CUT_SHORT = error_body(500, "the engine's answer was cut short")


class Answer:
    """The answer to one request: a plain body, or an event stream that ends in `[DONE]` or in an error."""

    def __init__(self, status_code: int, content_type: str) -> None:
        self._status = status_code
        self._streams = content_type.lower().startswith("text/event-stream")
        self._complete = False
        self._any_chunk = False
        self._events = EventReader()
        self._body = bytearray()

    def feed(self, piece: bytes) -> list[Chunk]:
        """Takes the next bytes of the body; gives the chunks that they complete.

        Raises:
            ValueError: an event is no JSON, or is larger than any can be.
        """
        if self._streams:
            return [chunk for raw in self._events.feed(piece) if (chunk := self._event(raw))]
        self._body += piece
        return []

    def end(self) -> None:
        """The body has been read to its end, which says of a stream nothing yet: it tells its own."""
        self._complete |= not self._streams

    def _event(self, raw: bytes) -> Chunk | None:
        if raw == DONE:
            self._complete = True
            return None
        data = json.loads(raw)
        if error := data.get("error"):
            # The stream began with status 200; what went wrong since has its own code.
            self._status = _code(error)
            self._body[:] = raw
            self._complete = True
            return None
        self._any_chunk = True
        return Chunk(raw, data)

    def final(self) -> Final:
        """The end of the run: a server error where it stopped in the middle or said nothing, whatever its status."""
        says_nothing = self._status < 300 and not self._any_chunk and not self._body
        if not self._complete or says_nothing:
            return Final(500, CUT_SHORT)
        return Final(self._status, bytes(self._body) or None)


def _code(error: Any) -> int:
    """The HTTP status that an error object names; some servers have words there, or no object at all."""
    code = str(error.get("code")) if isinstance(error, Mapping) else ""
    return int(code) if re.fullmatch("[45][0-9][0-9]", code) else 500
