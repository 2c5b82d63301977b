"""The micro-batch window. Pure but for the reads and the clock that it is given."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from headway.shared.job import Ticket

ClosedBy = Literal["immediate", "full", "tokens", "timeout"]

#: Reads at most so many tickets, waiting at most so many seconds for the first; None when there is no room for any.
Read = Callable[[int | None, float | None], Awaitable[list[Ticket] | None]]


@dataclass(frozen=True, slots=True)
class Window:
    """What closes a micro-batch.

    Attributes:
        max_wait_s: counted from the first job read; 0 admits what is there at once.
        max_jobs: None for no bound.
        max_tokens: prompt tokens; a single job may be over it, alone. None for no bound.
    """

    max_wait_s: float = 0.0
    max_jobs: int | None = None
    max_tokens: int | None = None

    def most(self, taken: int) -> int | None:
        """How many jobs one read may bring; one by one under `max_tokens`, since what is too much must go back."""
        if self.max_tokens is not None:
            return 1
        return None if self.max_jobs is None else self.max_jobs - taken


@dataclass(slots=True)
class MicroBatch:
    """The jobs that are admitted together; an admission, never a barrier.

    Attributes:
        surplus: tickets that were read but do not fit under `max_tokens`; they go back at once.
        opened_at: the monotonic instant at which the first job was read.
    """

    opened_at: float
    tickets: list[Ticket] = field(default_factory=list)
    surplus: list[Ticket] = field(default_factory=list)
    closed_by: ClosedBy | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(ticket.prompt_tokens for ticket in self.tickets)

    def add(self, tickets: list[Ticket], window: Window) -> None:
        """Takes what fits; closes the batch when it is full."""
        for ticket in tickets:
            over = window.max_tokens is not None and self.prompt_tokens + ticket.prompt_tokens > window.max_tokens
            if self.closed_by or (over and self.tickets):
                self.closed_by = self.closed_by or "tokens"
                self.surplus.append(ticket)
            else:
                self.tickets.append(ticket)
                self._close_if_full(window)

    def _close_if_full(self, window: Window) -> None:
        if window.max_jobs is not None and len(self.tickets) >= window.max_jobs:
            self.closed_by = "full"
        elif window.max_tokens is not None and self.prompt_tokens >= window.max_tokens:
            self.closed_by = "tokens"


async def collect(read: Read, window: Window, clock: Callable[[], float] = time.monotonic) -> MicroBatch | None:
    """Reads one micro-batch: waits for the first job, then until the batch is full or its window is over.

    Returns:
        None when the first read ended without a job.
    """
    first = await read(window.most(0), None)
    if not first:
        return None
    batch = MicroBatch(clock())
    batch.add(first, window)
    while batch.closed_by is None:
        left_s = batch.opened_at + window.max_wait_s - clock()
        if left_s <= 0:
            batch.closed_by = "timeout" if window.max_wait_s else "immediate"
            break
        more = await read(window.most(len(batch.tickets)), left_s)
        if more is None:
            batch.closed_by = "full"
        else:
            batch.add(more, window)
    return batch
