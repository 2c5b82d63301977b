"""Static shares of slots and KV tokens."""

import pytest

from headway.shared.job import Ticket
from headway.shared.lanes import make_lanes
from headway.worker.budget import RESERVED_S, Budget
from headway.worker.engines.base import Capacity

LANES = make_lanes(256, 1024, (0.5, 0.3, 0.2))


def _ticket(lane: str = "short", tokens: int = 10, choices: int = 1) -> Ticket:
    return Ticket("job", "stream", "1-0", lane, tokens, tokens, choices)


@pytest.fixture
def budget() -> Budget:
    """10 slots and 10,000 KV tokens, a tenth of which stays free: 4,500 for lane short."""
    return Budget(Capacity(10, 10_000, 8192), LANES)


def test_each_lane_has_its_share(budget: Budget) -> None:
    assert [budget.room(lane.name) for lane in LANES] == [5, 3, 2]


def test_a_lane_has_at_least_one_slot() -> None:
    # Given an engine with two slots, I expect a slot for each of the three lanes all the same
    assert [Budget(Capacity(2, 100, 100), LANES).room(lane.name) for lane in LANES] == [1, 1, 1]


def test_what_is_taken_comes_back(budget: Budget) -> None:
    # If I take all slots of a lane, I expect no room there, and unchanged room elsewhere; then all of it again
    tickets = [_ticket() for _ in range(5)]
    assert all(budget.take(ticket) for ticket in tickets)
    assert (budget.room("short"), budget.room("mid")) == (0, 3)
    assert not budget.take(_ticket())
    for ticket in tickets:
        budget.release(ticket)
    assert budget.room("short") == 5


def test_choices_count_as_slots(budget: Budget) -> None:
    assert budget.take(_ticket(choices=4))
    assert budget.room("short") == 1
    assert not budget.take(_ticket(choices=2))


@pytest.mark.parametrize("large", [_ticket(tokens=2000), _ticket(choices=4)])
def test_a_lane_is_kept_for_a_job_that_does_not_fit(budget: Budget, large: Ticket) -> None:
    # Given 3,000 of 4,500 tokens and 2 of 5 slots taken
    held = _ticket(tokens=3000, choices=2)
    assert budget.take(held)

    # If a job does not fit, I expect no room for others, so that neither is it read again and again nor overtaken
    assert not budget.take(large)
    assert budget.room("short") == 0
    assert not budget.take(_ticket())
    assert budget.room("mid") == 3

    # And room as soon as it fits
    budget.release(held)
    assert budget.room("short") == 5
    assert budget.take(large)


def test_a_lane_is_not_kept_for_ever() -> None:
    # Given a lane that is kept for a job which another worker may have taken meanwhile
    now = 0.0
    budget = Budget(Capacity(10, 10_000, 8192), LANES, clock=lambda: now)
    assert budget.take(_ticket(tokens=3000))
    assert not budget.take(_ticket(tokens=2000))
    assert budget.room("short") == 0

    # If some time has passed, I expect room for others again
    now = RESERVED_S
    assert budget.room("short") == 4
    assert budget.take(_ticket())


def test_a_job_alone_in_its_lane_always_fits(budget: Budget) -> None:
    # Given a job with more tokens and choices than its lane; I expect it to fit alone, and nothing beside it
    assert budget.take(_ticket("long", tokens=9000, choices=8))
    assert budget.room("long") == 0
    assert not budget.take(_ticket("long"))


def test_a_lane_that_is_not_configured_gets_one_job_at_a_time(budget: Budget) -> None:
    ticket = _ticket("huge", tokens=500)
    assert budget.room("huge") == 1
    assert budget.take(ticket)
    assert budget.room("huge") == 0
    budget.release(ticket)
    assert budget.room("huge") == 1


def test_nobody_reserves_more_than_the_engine_grants() -> None:
    # Given an engine of short contexts, and a job that reserves far more than one
    budget = Budget(Capacity(10, 10_000, 500), LANES)
    wish = _ticket(tokens=10**9)

    # If it is taken, I expect room for others beside it, and all of it again
    assert budget.take(wish)
    assert budget.take(_ticket(tokens=400))
    budget.release(wish)
    assert budget.take(_ticket(tokens=10**9, choices=4))
