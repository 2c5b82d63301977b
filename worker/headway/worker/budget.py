"""How many jobs of each lane the engine may hold: a static share of its slots and KV tokens. Pure."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from headway.shared.job import Ticket
from headway.shared.lanes import Lane
from headway.worker.engines.base import Capacity

#: The part of the KV cache that admission leaves free: overcommitting means preemption, which computes twice.
KV_HEADROOM = 0.1


@dataclass(slots=True)
class _Account:
    slots: int
    tokens: int
    held_slots: int = 0
    held_tokens: int = 0
    #: Tokens that the lane's next job needs; 0 when nobody is known to wait for room.
    needed: int = 0

    @property
    def room(self) -> int:
        if self.held_slots and self.needed > self.tokens - self.held_tokens:
            return 0
        return max(0, self.slots - self.held_slots)


class Budget:
    """Slots and KV tokens by lane. Jobs stay in Redis until there is room, where other workers can take them."""

    def __init__(self, capacity: Capacity, lanes: Iterable[Lane]) -> None:
        usable = int(capacity.kv_tokens * (1 - KV_HEADROOM))
        self._accounts: dict[str, _Account] = defaultdict(lambda: _Account(1, 0))
        for lane in lanes:
            slots = max(1, int(capacity.slots * lane.share))
            self._accounts[lane.name] = _Account(slots, int(usable * lane.share))

    def room(self, lane: str) -> int:
        """Slots that are free for this lane. A lane that is no longer configured gets one at a time."""
        return self._accounts[lane].room

    def take(self, ticket: Ticket) -> bool:
        """Reserves for a job what it may need; False when it does not fit. A job alone in its lane always fits."""
        account = self._accounts[ticket.lane]
        fits = (
            account.held_slots + ticket.choices <= account.slots
            and account.held_tokens + ticket.reserve_tokens <= account.tokens
        )
        if account.held_slots and not fits:
            account.needed = ticket.reserve_tokens
            return False
        account.held_slots += ticket.choices
        account.held_tokens += ticket.reserve_tokens
        account.needed = 0
        return True

    def release(self, ticket: Ticket) -> None:
        """Frees what `take` has reserved."""
        account = self._accounts[ticket.lane]
        account.held_slots -= ticket.choices
        account.held_tokens -= ticket.reserve_tokens
