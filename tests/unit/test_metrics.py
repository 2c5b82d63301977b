"""How metrics are written: each under its name, and those of two scrapes at once apart."""

import asyncio
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from headway.shared.errors import QueueUnavailable
from headway.shared.job import LaneState
from headway.shared.lanes import make_lanes
from headway.shared.metrics import LaneMetrics, exposition
from helpers import eventually
from monitoring import Page

LANES = make_lanes(256, 1024, (0.5, 0.3, 0.2))
WAITING = "headway_lane_waiting_jobs", {"model": "m", "lane": "short", "tier": "default"}


class Surveys:
    """Stands for a queue: its surveys end when the test says, and as it says."""

    def __init__(self) -> None:
        self.begun: list[asyncio.Future[list[LaneState]]] = []

    async def survey(self, model: str, lanes: Iterable[str]) -> list[LaneState]:
        self.begun.append(asyncio.get_running_loop().create_future())
        return await self.begun[-1]


def state(waiting: int) -> LaneState:
    return LaneState("m", "short", "default", waiting, 0, 0, 0.0)


async def test_scrapes_at_once_do_not_mix() -> None:
    # Given three scrapes that have all asked Redis and have no answer yet
    registry, queue = CollectorRegistry(), Surveys()
    lanes = LaneMetrics(registry)

    async def scrape() -> Page:
        asked: Any = queue
        await lanes.refresh(asked, "m", LANES)
        return Page(exposition(registry)[0].decode())

    scrapes = [asyncio.create_task(scrape()) for _ in range(3)]
    await eventually(lambda: len(queue.begun) == 3)

    # If their answers come in another order, and one is an error
    queue.begun[1].set_result([state(waiting=5)])
    queue.begun[2].set_exception(QueueUnavailable("away"))
    first, down = await scrapes[1], await scrapes[2]
    queue.begun[0].set_result([state(waiting=7)])
    last = await scrapes[0]

    # I expect each page to be that of its own answer, and none to show figures while Redis is away
    assert (first["headway_redis_up", {}], first[WAITING]) == (1, 5)
    assert (last["headway_redis_up", {}], last[WAITING]) == (1, 7)
    assert down["headway_redis_up", {}] == 0
    assert "headway_lane_waiting_jobs{" not in down.text


def test_a_colon_in_a_name_stays() -> None:
    # Given a metric that is named as vLLM names its own, I expect to read it under this name
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Help.", registry=registry).set(2)
    text, media_type = exposition(registry)
    assert b"\nvllm:num_requests_running 2.0\n" in text
    assert media_type.startswith("text/plain; version=0.0.4")
