"""Server-sent events: their frames, and the response that sends them."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.responses import StreamingResponse

from headway.api.following import end
from headway.shared.job import Reply

MEDIA_TYPE = "text/event-stream"

#: Proxies that collect what they pass on would turn a stream into one late answer; the second line is nginx's.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

#: A comment: readers ignore it, and proxies see that the connection lives.
HEARTBEAT = b": waiting\n\n"

#: Frames that wait for a slow client; more stay in the log.
_MOST = 16

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


def response(frames: AsyncGenerator[bytes, None], heartbeat_s: float, headers: Mapping[str, str]) -> StreamingResponse:
    """The response that sends frames as they come, and a heartbeat after each `heartbeat_s` seconds of silence."""
    return StreamingResponse(_together(frames, heartbeat_s), headers={**HEADERS, **headers}, media_type=MEDIA_TYPE)


async def _together(frames: AsyncGenerator[bytes, None], heartbeat_s: float) -> AsyncGenerator[bytes, None]:
    """What is there at one moment travels together: each message wakes the client, and costs a system call."""
    waiting: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST)
    collecting = asyncio.create_task(_collect(frames, waiting))
    try:
        last: bytes | None = b""
        while last is not None:
            try:
                async with asyncio.timeout(heartbeat_s):
                    parts = [await waiting.get()]
            except TimeoutError:
                yield HEARTBEAT
                continue
            while not waiting.empty():
                parts.append(waiting.get_nowait())
            last = parts[-1]
            yield b"".join(part for part in parts if part is not None)
        await collecting
    finally:
        await end(collecting)
        await frames.aclose()


async def _collect(frames: AsyncGenerator[bytes, None], waiting: "asyncio.Queue[bytes | None]") -> None:
    """Ends with None, also after an error, which is then its own."""
    try:
        # Here and not in the response alone, whose own end is cut short when its client hangs up.
        async with aclosing(frames):
            async for frame in frames:
                await waiting.put(frame)
    except Exception:
        await waiting.put(None)
        raise
    await waiting.put(None)


def is_usage_only(chunk: bytes) -> bool:
    """Whether a chunk is the one that carries the usage and no choices."""
    # Inside a JSON string the quotes would be escaped, so nearly every chunk is told by the pattern alone.
    return bool(_NO_CHOICES.search(chunk)) and json.loads(chunk).get("choices") == []
