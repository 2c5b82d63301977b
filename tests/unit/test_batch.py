"""The window of a micro-batch: by hand, without Redis and without time."""

import pytest

from headway.shared.job import Ticket
from headway.worker.batch import MicroBatch, Read, Window, collect


def _ticket(name: str, tokens: int = 10) -> Ticket:
    return Ticket(name, "stream", "1-0", "short", tokens, tokens, 1)


class _Lanes:
    """Arrivals by the clock: (second, ticket) pairs, and a clock that stands still but for the waits."""

    def __init__(self, *arrivals: tuple[float, Ticket]) -> None:
        self._arrivals = list(arrivals)
        self.now = 0.0
        self.asked: list[int | None] = []
        self.full_after: int | None = None

    async def read(self, most: int | None, wait_s: float | None) -> list[Ticket] | None:
        self.asked.append(most)
        if self.full_after is not None and len(self.asked) > self.full_after:
            return None
        due = self._due(most)
        if not due and self._arrivals and (wait_s is None or self._arrivals[0][0] <= self.now + wait_s):
            self.now = self._arrivals[0][0]
            due = self._due(most)
        elif not due:
            self.now += wait_s or 0
        return due

    def _due(self, most: int | None) -> list[Ticket]:
        due = [ticket for at, ticket in self._arrivals if at <= self.now][:most]
        self._arrivals = [(at, ticket) for at, ticket in self._arrivals if ticket not in due]
        return due


async def _collect(lanes: _Lanes, window: Window) -> MicroBatch:
    read: Read = lanes.read
    batch = await collect(read, window, clock=lambda: lanes.now)
    assert batch is not None
    return batch


async def test_without_a_window_what_is_there_leaves_at_once() -> None:
    # Given two jobs that are there and one that comes later
    lanes = _Lanes((0, _ticket("a")), (0, _ticket("b")), (0.01, _ticket("c")))

    # If I collect without a window, I expect the first two
    batch = await _collect(lanes, Window())
    assert [ticket.job_id for ticket in batch.tickets] == ["a", "b"]
    assert batch.closed_by == "immediate"


async def test_the_wait_counts_from_the_first_job() -> None:
    # Given jobs that begin to come after a long while, 40 ms apart
    lanes = _Lanes(*((100 + 0.04 * n, _ticket(str(n))) for n in range(5)))

    # If I collect with 100 ms, I expect what came within 100 ms of the first
    batch = await _collect(lanes, Window(max_wait_s=0.1))
    assert [ticket.job_id for ticket in batch.tickets] == ["0", "1", "2"]
    assert (batch.closed_by, batch.opened_at) == ("timeout", 100)
    assert lanes.now == pytest.approx(100.1)


async def test_max_jobs_bounds_each_read() -> None:
    # Given five jobs
    lanes = _Lanes(*((0.01 * n, _ticket(str(n))) for n in range(5)))

    # If I collect at most three, I expect three, and never to have asked for more than is missing
    batch = await _collect(lanes, Window(max_wait_s=1, max_jobs=3))
    assert len(batch.tickets) == 3
    assert batch.closed_by == "full"
    assert lanes.asked == [3, 2, 1]


async def test_max_tokens_is_exact() -> None:
    # Given jobs of 40 tokens that are all there
    lanes = _Lanes(*((0, _ticket(str(n), 40)) for n in range(4)))

    # If I collect at most 100 tokens, I expect two, one as surplus, and the last not to have been read at all
    batch = await _collect(lanes, Window(max_wait_s=1, max_tokens=100))
    assert (batch.prompt_tokens, batch.closed_by) == (80, "tokens")
    assert [ticket.job_id for ticket in batch.surplus] == ["2"]
    assert lanes.asked == [1, 1, 1]


async def test_max_tokens_closes_when_it_is_reached() -> None:
    # Given two jobs of 50 tokens; if I collect at most 100 with a long window, I expect no wait for a third
    lanes = _Lanes((0, _ticket("a", 50)), (0, _ticket("b", 50)))
    batch = await _collect(lanes, Window(max_wait_s=60, max_tokens=100))
    assert (batch.closed_by, lanes.now) == ("tokens", 0)


async def test_a_job_over_max_tokens_goes_alone() -> None:
    # Given a job of 500 tokens before one of 10; if I collect at most 100, I expect the long one alone
    lanes = _Lanes((0, _ticket("long", 500)), (0, _ticket("short")))
    batch = await _collect(lanes, Window(max_wait_s=60, max_tokens=100))
    assert [ticket.job_id for ticket in batch.tickets] == ["long"]
    assert batch.closed_by == "tokens"


async def test_no_room_closes_the_window() -> None:
    # Given an engine that is full after the first job
    lanes = _Lanes((0, _ticket("a")), (0.01, _ticket("b")))
    lanes.full_after = 1

    # If I collect with a window, I expect the job to leave at once: nothing more could join it
    batch = await _collect(lanes, Window(max_wait_s=1))
    assert (batch.closed_by, lanes.now) == ("full", 0)


async def test_a_read_without_a_job_is_no_batch() -> None:
    assert await collect(_Lanes().read, Window(max_wait_s=1), clock=lambda: 0.0) is None
