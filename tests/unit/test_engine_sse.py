"""Reading event streams: pure."""

import pytest

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
