"""Framing of server-sent events."""

import json

import pytest
from httpx_sse import ServerSentEvent
from httpx_sse._decoders import SSEDecoder

from headway.api.sse import DONE, HEARTBEAT, data_frame, event_frame, is_usage_only
from headway.shared.job import Reply


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
