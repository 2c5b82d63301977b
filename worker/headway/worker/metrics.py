"""What a worker shows to Prometheus; docs/operations.md explains each metric."""

from collections.abc import Iterable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headway.shared.job import Delivery, Status
from headway.shared.metrics import LaneMetrics
from headway.worker.batch import MicroBatch
from headway.worker.budget import Budget
from headway.worker.engines.base import Capacity
from headway.worker.output import Output

#: How an attempt ended: as its job did; given back at a stop (`returned`) or after a failure (`retried`); or the job
#: was no longer this worker's (`lost`).
Ending = Status | Literal["returned", "retried", "lost"]
_ENDINGS: tuple[Ending, ...] = (*(status for status in Status if status.terminal), "returned", "retried", "lost")

#: Seconds: from a short prompt on an idle GPU to a long one behind a full lane.
_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_STEPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_WINDOWS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class WorkerMetrics:
    """Counts and times of one worker. Lanes are few and their names are settings, so labels stay bounded."""

    def __init__(self, registry: CollectorRegistry, lanes: Iterable[str] = ()) -> None:
        """
        Args:
            lanes: those whose attempts are shown from the start, so that the first failure is seen as an increase.
        """
        self.registry = registry
        self.lanes = LaneMetrics(registry)
        self._gauges(registry)
        self._times(registry)
        lane = ("lane",)
        self._prompt_tokens = Counter("headway_prompt_tokens", "Prompt tokens of ended jobs.", lane, registry=registry)
        self._output_tokens = Counter(
            "headway_output_tokens", "Generated tokens of ended jobs.", lane, registry=registry
        )
        self._attempts = Counter(
            "headway_attempts", "Attempts by how they ended.", ("lane", "outcome"), registry=registry
        )
        for name in lanes:
            for ending in _ENDINGS:
                self._attempts.labels(name, ending)

    def _gauges(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        self._pulling = gauge("headway_worker_pulling", "Whether the worker takes work.")
        self._in_flight = gauge("headway_jobs_in_flight", "Jobs in the worker's hands.", "lane")
        self._slots = gauge("headway_engine_slots", "Sequences that the engine runs at once.")
        self._slots_used = gauge("headway_engine_slots_used", "Slots taken by jobs of a lane.", "lane")
        self._kv_tokens = gauge("headway_engine_kv_tokens", "Tokens that the engine's KV cache holds.")
        self._kv_reserved = gauge(
            "headway_engine_kv_tokens_reserved", "KV tokens that the jobs of a lane may need.", "lane"
        )

    def _times(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, label: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, (label,), registry=registry, buckets=buckets)

        self._batch_jobs = histogram("headway_batch_jobs", "Jobs of a micro-batch.", "closed_by", _BATCHES)
        self._window = histogram(
            "headway_batch_window_seconds", "From the first job read to the engine call.", "closed_by", _WINDOWS
        )
        self._queue_wait = histogram(
            "headway_queue_wait_seconds", "From when a job came into its lane to its start.", "lane", _WAITS
        )
        self._first_token = histogram(
            "headway_time_to_first_token_seconds", "From submit to the first token.", "lane", _WAITS
        )
        self._inter_token = histogram(
            "headway_inter_token_seconds", "Mean time between the tokens of a job.", "lane", _STEPS
        )
        self._job = histogram("headway_job_seconds", "From submit to the end of a completed job.", "lane", _WAITS)

    def batch(self, batch: MicroBatch, window_s: float) -> None:
        """A micro-batch enters the engine."""
        self._batch_jobs.labels(batch.closed_by).observe(len(batch.tickets))
        self._window.labels(batch.closed_by).observe(window_s)

    def started(self, delivery: Delivery) -> None:
        """An attempt starts."""
        self._queue_wait.labels(delivery.job.lane).observe(max(0.0, delivery.lane_wait_s))

    def first_token(self, delivery: Delivery, output: Output) -> None:
        """An attempt has its first token now; to readers it is the first unless an earlier attempt has published."""
        if not delivery.offset:
            self._first_token.labels(delivery.job.lane).observe(max(0.0, delivery.age_s + output.age_s()))

    def ended(self, delivery: Delivery, output: Output, ending: Ending) -> None:
        """An attempt has ended now. What was not published is not counted as generated."""
        lane = delivery.job.lane
        self._attempts.labels(lane, ending).inc()
        if not isinstance(ending, Status):
            return
        self._prompt_tokens.labels(lane).inc(delivery.job.prompt_tokens)
        self._output_tokens.labels(lane).inc(output.tokens)
        if (inter_token_s := output.inter_token_s()) is not None:
            self._inter_token.labels(lane).observe(inter_token_s)
        if ending is Status.COMPLETED:
            self._job.labels(lane).observe(max(0.0, delivery.age_s + output.age_s()))

    def refresh(self, *, pulling: bool, capacity: Capacity, budget: Budget) -> None:
        """Sets the gauges to how the worker stands now."""
        self._pulling.set(pulling)
        self._slots.set(capacity.slots)
        self._kv_tokens.set(capacity.kv_tokens)
        for lane, held in budget.held().items():
            self._in_flight.labels(lane).set(held.jobs)
            self._slots_used.labels(lane).set(held.slots)
            self._kv_reserved.labels(lane).set(held.tokens)
