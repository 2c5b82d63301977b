"""Reading event streams: pure."""

import time

import pytest

from headway.worker.engines import sse
from headway.worker.engines.sse import DONE, EventReader

STREAM = b': hello\n\ndata: {"a": 1}\n\nevent: x\ndata:two\ndata: lines\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_payloads_come_out_whole_wherever_the_bytes_are_cut(size):
    # Given a stream in pieces of any size, if I feed them, I expect each payload once, and no comment
    reader = EventReader()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    payloads = [payload for piece in pieces for payload in reader.feed(piece)]
    assert payloads == [b'{"a": 1}', b"two\nlines", DONE]


@pytest.mark.parametrize("size", range(1, 40))
def test_lines_may_end_in_cr_lf(size):
    # Given the same stream from a server that ends its lines in CR LF, I expect the same payloads
    stream = STREAM.replace(b"\n", b"\r\n")
    reader = EventReader()
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    payloads = [payload for piece in pieces for payload in reader.feed(piece)]
    assert payloads == [b'{"a": 1}', b"two\nlines", DONE]


def test_a_large_event_takes_as_long_as_its_bytes():
    # Given an event of 32 MiB in pieces of 16 KiB, which took minutes when each piece searched all before it
    reader = EventReader()
    began_at = time.monotonic()
    reader.feed(b"data: ")
    for _ in range(2048):
        assert reader.feed(b"a" * 16384) == []
    (payload,) = reader.feed(b"\n\n")
    assert len(payload) == 32 * 2**20
    assert time.monotonic() - began_at < 5


def test_an_event_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch):
    # Given at most 20 bytes an event
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 20)
    reader = EventReader()
    # If whole events come, I expect no limit on all together; if one has no end, an error
    assert len(reader.feed(b"data: 12345\n\n" * 10)) == 10
    with pytest.raises(ValueError, match="no end"):
        reader.feed(b"data: 123456789012345")
