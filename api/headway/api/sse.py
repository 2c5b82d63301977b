"""Framing of server-sent events. Pure."""

import json
import re

from headway.shared.job import Reply

MEDIA_TYPE = "text/event-stream"

#: Proxies that collect what they pass on would turn a stream into one late answer; the second line is nginx's.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

#: A comment: readers ignore it, and proxies see that the connection lives.
HEARTBEAT = b": waiting\n\n"

#: How an OpenAI stream ends when the answer is complete.
DONE = b"data: [DONE]\n\n"

_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')


def data_frame(data: bytes) -> bytes:
    """An event without a name, as in OpenAI's streams. A line end inside the JSON continues the data field."""
    return b"".join(b"data: " + line + b"\n" for line in data.splitlines()) + b"\n"


def event_frame(job_id: str, reply: Reply) -> bytes:
    """A reply as an event of `/v1/jobs/{id}/events`; its id is the offset, from which a reader resumes."""
    if reply.kind == "end":
        data = json.dumps({"id": job_id, "status": reply.data.decode()}, separators=(",", ":")).encode()
    else:
        data = reply.data or b"{}"
    return f"id: {reply.offset}\nevent: {reply.kind}\n".encode() + data_frame(data)


def is_usage_only(chunk: bytes) -> bool:
    """Whether a chunk is the one that carries the usage and no choices."""
    # Inside a JSON string the quotes would be escaped, so nearly every chunk is told by the pattern alone.
    return bool(_NO_CHOICES.search(chunk)) and json.loads(chunk).get("choices") == []
