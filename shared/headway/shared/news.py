"""What a follower has heard since it last looked: the replies themselves, or only that there are some. No I/O."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Literal, cast

from headway.shared.job import Reply

#: Replies that wait for a slow reader. More stay in the log, which is where it finds them.
_MOST = 100


class News:
    """Collects the notices of one reply channel."""

    def __init__(self) -> None:
        self._heard = asyncio.Event()
        self._told: list[Reply] = []
        self._incomplete = False

    def take(self, notice: bytes | None) -> None:
        """Takes a notice; None says that some may have been missed."""
        replies = list(parse(notice or b""))
        self._told += replies
        if not replies or len(self._told) > _MOST:
            self.look()
        self._heard.set()

    def look(self) -> None:
        """From now on, and until `behind` is asked next, only the log has it all."""
        self._told.clear()
        self._incomplete = True
        self._heard.set()

    async def wait(self, timeout_s: float) -> None:
        """Returns when there is news, or when there was none for so long that the log must be asked."""
        # Not asyncio.wait_for: in Python 3.11 it loses a cancellation that comes together with the news.
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._heard.wait()
        if not self._heard.is_set():
            self.look()
        self._heard.clear()

    def behind(self, offset: int) -> Sequence[Reply] | None:
        """All replies behind an offset, as far as they were told; None when the log must be read."""
        told, incomplete = self._told, self._incomplete
        self._told, self._incomplete = [], False
        new = [reply for reply in told if reply.offset > offset]
        offsets = [offset, *(reply.offset for reply in new)]
        gap = any(later != earlier + 1 for earlier, later in pairwise(offsets))
        return None if incomplete or gap else new


def parse(notice: bytes) -> Iterator[Reply]:
    """The replies in a notice, as append.lua writes it: `<first offset> <kind>:<length> …`, a line end, their data.

    There are none in a notice that only says that there is something new.
    """
    header, _, data = notice.partition(b"\n")
    first, *parts = header.decode().split(" ")
    begin = 0
    for offset, part in enumerate(parts, int(first or 0)):
        kind, length = part.split(":")
        end = begin + int(length)
        yield Reply(offset, cast(Literal["chunk", "restarted"], kind), data[begin:end])
        begin = end
