"""Server-sent events: their frames, and how they are sent."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest
from httpx_sse import ServerSentEvent
from httpx_sse._decoders import SSEDecoder

from headway.api.sse import DONE, HEARTBEAT, data_frame, event_frame, is_usage_only, response
from headway.shared.job import Reply
from helpers import PATIENCE_S


def decode(frames: bytes) -> list[ServerSentEvent]:
    """What a reader makes of it."""
    decoder = SSEDecoder()
    events = [decoder.decode(line) for line in frames.decode().removesuffix("\n").split("\n")]
    return [event for event in events if event is not None]


def test_a_chunk_is_an_event_with_its_offset() -> None:
    frame = event_frame("job-0-a", Reply(7, "chunk", b'{"a":1}'))
    assert frame == b'id: 7\nevent: chunk\ndata: {"a":1}\n\n'


def test_the_end_names_the_job_and_its_status() -> None:
    [event] = decode(event_frame("job-0-a", Reply(8, "end", b"failed")))
    assert (event.id, event.event, event.json()) == ("8", "end", {"id": "job-0-a", "status": "failed"})


def test_an_event_without_data_has_an_empty_object() -> None:
    [event] = decode(event_frame("job-0-a", Reply(3, "restarted", b"")))
    assert (event.event, event.json()) == ("restarted", {})


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_json_over_several_lines_stays_one_event(end: str) -> None:
    # Given an engine that writes its JSON over several lines, and a text with a line separator of Unicode
    chunk = f'{{{end}  "text": "a\u2028b"{end}{end}}}'.encode()
    # I expect one event that is still the same JSON
    [event] = decode(data_frame(chunk))
    assert event.json() == json.loads(chunk) == {"text": "a\u2028b"}


def test_a_heartbeat_is_no_event() -> None:
    assert decode(HEARTBEAT) == []
    assert [event.data for event in decode(HEARTBEAT + data_frame(b"1") + HEARTBEAT + DONE)] == ["1", "[DONE]"]


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        (b'{"choices":[],"usage":{}}', True),
        (b'{"usage": {}, "choices" : [ ] }', True),
        (b'{"choices":[{"delta":{}}]}', False),
        (rb'{"choices":[{"delta":{"content":"{\"choices\":[]}"}}]}', False),
        (b'{"choices":[{"delta":{"x":{"choices":[]}}}]}', False),
        (b'{"error":{}}', False),
    ],
)
def test_which_chunk_has_the_usage_alone(chunk: bytes, expected: bool) -> None:
    assert is_usage_only(chunk) is expected


async def made(*steps: bytes | float | Exception, closed: asyncio.Event | None = None) -> AsyncGenerator[bytes, None]:
    """Frames, pauses in seconds, and an error at the end."""
    try:
        for step in steps:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, bytes):
                yield step
            else:
                await asyncio.sleep(step)
    finally:
        if closed:
            closed.set()


def parts_of(frames: AsyncGenerator[bytes, None], heartbeat_s: float = PATIENCE_S) -> Any:
    """What a response sends."""
    return response(frames, heartbeat_s, {}).body_iterator


async def sent(frames: AsyncGenerator[bytes, None], heartbeat_s: float = PATIENCE_S) -> list[bytes]:
    return [part async for part in parts_of(frames, heartbeat_s) if part]


async def test_frames_that_are_there_travel_together() -> None:
    assert await sent(made(b"a", b"b", 0.02, b"c")) == [b"ab", b"c"]


async def test_a_slow_client_gets_all_frames_in_order() -> None:
    frames = [b"%d;" % number for number in range(1000)]

    assert b"".join(await sent(made(*frames))) == b"".join(frames)


async def test_silence_is_filled_with_heartbeats() -> None:
    parts = await sent(made(b"a", 0.2, b"b"), heartbeat_s=0.05)

    assert (parts[0], parts[-1]) == (b"a", b"b")
    assert len(parts) > 2
    assert set(parts[1:-1]) == {HEARTBEAT}


async def test_a_fault_comes_behind_what_was_there() -> None:
    # Given frames that break off
    parts = parts_of(made(b"a", ZeroDivisionError()))

    # If they are sent, I expect what was there, and then the fault
    assert await anext(parts) == b"a"
    with pytest.raises(ZeroDivisionError):
        await anext(parts)


async def test_a_client_that_leaves_ends_the_frames() -> None:
    # Given a response of which the client has had the first part
    closed = asyncio.Event()
    parts = parts_of(made(b"a", PATIENCE_S, closed=closed))
    assert await anext(parts) == b"a"

    # If it leaves, I expect the frames to end
    await parts.aclose()
    assert closed.is_set()


async def test_a_client_that_hangs_up_ends_the_frames() -> None:
    # Given a client that waits for the next frame, in the scope in which Starlette cancels
    closed = asyncio.Event()
    parts = parts_of(made(b"a", PATIENCE_S, closed=closed))
    assert await anext(parts) == b"a"
    async with anyio.create_task_group() as group:
        group.start_soon(anext, parts)
        await asyncio.sleep(0.05)
        # If it hangs up
        group.cancel_scope.cancel()

    # I expect the frames to end
    async with asyncio.timeout(PATIENCE_S):
        await closed.wait()
