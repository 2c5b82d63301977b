"""What the API and the worker both show to Prometheus, and how; docs/operations.md explains each metric."""

import asyncio
import logging
from collections.abc import Iterable
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Gauge, Info, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from headway.shared.errors import QueueUnavailable
from headway.shared.job import LaneState
from headway.shared.lanes import Lane
from headway.shared.queue import Queue

_log = logging.getLogger(__name__)

#: Seconds that a scrape waits for Redis; Prometheus itself waits 10 s for all.
_PATIENCE_S = 2.0

_LANE_STREAM = ("model", "lane", "tier")


class LaneMetrics:
    """How full the lanes are. Every process reads the same figures from Redis: take their maximum, never a sum."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, _LANE_STREAM, registry=registry)

        self._waiting = gauge("headway_lane_waiting_jobs", "Entries of a lane that no worker has read.")
        self._running = gauge("headway_lane_running_jobs", "Entries of a lane that a worker holds.")
        self._tokens = gauge("headway_lane_waiting_tokens", "Prompt tokens of the queued jobs of a lane.")
        self._oldest = gauge("headway_lane_oldest_wait_seconds", "How long the next entry of a lane has waited.")
        self._redis_up = Gauge("headway_redis_up", "Whether Redis answered this scrape.", registry=registry)
        Info("headway_build", "The version that runs.", registry=registry).info({"version": version("headway")})

    async def refresh(self, queue: Queue, model: str, lanes: Iterable[Lane]) -> bool:
        """Looks into Redis, and says whether it could; else there are no figures: old ones would be taken for new.

        Nothing is awaited between the figures and the caller's `exposition`, so that another scrape cannot mix in.
        """
        try:
            async with asyncio.timeout(_PATIENCE_S):
                states = await queue.survey(model, [lane.name for lane in lanes])
        except Exception as error:
            if not isinstance(error, QueueUnavailable | TimeoutError):
                # A key that is not ours to mend. All other metrics are worth showing.
                _log.error("the lanes cannot be counted: %s: %s", type(error).__name__, error)
            self._show(False, [])
            return False
        self._show(True, states)
        return True

    def _show(self, redis_up: bool, states: Iterable[LaneState]) -> None:
        self._redis_up.set(redis_up)
        for gauge in (self._waiting, self._running, self._tokens, self._oldest):
            gauge.clear()
        for state in states:
            labels = (state.model, state.lane, state.tier)
            self._waiting.labels(*labels).set(state.waiting)
            self._running.labels(*labels).set(state.running)
            self._tokens.labels(*labels).set(state.waiting_tokens)
            self._oldest.labels(*labels).set(state.oldest_wait_s)


def exposition(registry: CollectorRegistry) -> tuple[bytes, str]:
    """All metrics as text, and its media type.

    It is the plain format whatever a scraper would rather have: in OpenMetrics, which Prometheus 2 asks for, the
    library writes `vllm:` as `vllm_`, and dashboards for vLLM would find nothing.
    """
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
