"""How many jobs of each lane the engine may hold: a static share of its slots and KV tokens. Pure but for the clock."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from headway.shared.job import Ticket
from headway.shared.lanes import Lane
from headway.worker.engines.base import Capacity

#: The part of the KV cache that admission leaves free: overcommitting means preemption, which computes twice.
KV_HEADROOM = 0.1

#: Seconds that a lane is kept for a job that did not fit and went back: another worker may have taken it meanwhile.
RESERVED_S = 2.0


@dataclass(frozen=True, slots=True)
class Held:
    """What the jobs of a lane hold."""

    jobs: int
    slots: int
    tokens: int


@dataclass(slots=True)
class _Account:
    slots: int
    tokens: int
    held_jobs: int = 0
    held_slots: int = 0
    held_tokens: int = 0
    #: The job that did not fit, for which the lane is kept, and until when.
    waiting: Ticket | None = None
    waiting_until: float = 0.0

    def fits(self, ticket: Ticket) -> bool:
        """A job alone in its lane always fits, even if it is larger than the lane."""
        return not self.held_slots or (
            self.held_slots + ticket.choices <= self.slots and self.held_tokens + ticket.reserve_tokens <= self.tokens
        )

    def kept(self, now: float) -> bool:
        return self.waiting is not None and now < self.waiting_until and not self.fits(self.waiting)


class Budget:
    """Slots and KV tokens by lane. Jobs stay in Redis until there is room, where other workers can take them."""

    def __init__(self, capacity: Capacity, lanes: Iterable[Lane], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._longest = capacity.max_model_len
        usable = int(capacity.kv_tokens * (1 - KV_HEADROOM))
        self._accounts: dict[str, _Account] = defaultdict(lambda: _Account(1, 0))
        for lane in lanes:
            slots = max(1, int(capacity.slots * lane.share))
            self._accounts[lane.name] = _Account(slots, int(usable * lane.share))

    def room(self, lane: str) -> int:
        """Slots that are free for this lane; none while a job that came first waits for more than there are.

        A lane that is no longer configured gets one job at a time.
        """
        account = self._accounts[lane]
        return 0 if account.kept(self._clock()) else max(0, account.slots - account.held_slots)

    def take(self, ticket: Ticket) -> bool:
        """Reserves for a job what it may need; False when it does not fit, and then the lane is kept for it."""
        account, ticket = self._accounts[ticket.lane], self._capped(ticket)
        if account.kept(self._clock()):
            return False
        if not account.fits(ticket):
            account.waiting, account.waiting_until = ticket, self._clock() + RESERVED_S
            return False
        account.waiting = None
        account.held_jobs += 1
        account.held_slots += ticket.choices
        account.held_tokens += ticket.reserve_tokens
        return True

    def release(self, ticket: Ticket) -> None:
        """Frees what `take` has reserved."""
        account, ticket = self._accounts[ticket.lane], self._capped(ticket)
        account.held_jobs -= 1
        account.held_slots -= ticket.choices
        account.held_tokens -= ticket.reserve_tokens

    def held(self) -> dict[str, Held]:
        """What is reserved now, by lane."""
        return {lane: Held(each.held_jobs, each.held_slots, each.held_tokens) for lane, each in self._accounts.items()}

    def _capped(self, ticket: Ticket) -> Ticket:
        # Who did not know the model's length may have reserved more than the engine will ever grant.
        return replace(ticket, reserve_tokens=min(ticket.reserve_tokens, self._longest * ticket.choices))
