"""What the API shows to Prometheus; docs/operations.md explains each metric."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.shared.job import Job
from headway.shared.metrics import LaneMetrics

#: What stands for the route of a request that has none: its path is the caller's, and there are endless many.
_NO_ROUTE = "none"

#: What stands for the status of a connection that its client has ended.
_HUNG_UP = "hung up"

_SUBMIT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class ApiMetrics:
    """Counts and times of one API process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        self.lanes = LaneMetrics(registry)
        self._submitted = Counter(
            "headway_jobs_submitted", "Jobs that were accepted.", ("lane", "tier"), registry=registry
        )
        self._submit_seconds = Histogram(
            "headway_submit_seconds",
            "From the whole body to the job in its lane: checks, counting of tokens, Redis.",
            registry=registry,
            buckets=_SUBMIT_S,
        )
        self.requests = Counter("headway_requests", "Requests by answer.", ("route", "status"), registry=registry)
        self.open = Gauge("headway_requests_open", "Requests, streams and sockets that are open.", registry=registry)

    def accepted(self, job: Job, after_s: float) -> None:
        """A job is in its lane, so many seconds after its request was read."""
        self._submitted.labels(job.lane, job.tier).inc()
        self._submit_seconds.observe(after_s)


class CountRequests:
    """Middleware: counts what each request was answered, a websocket by the code of its close."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        status = _HUNG_UP
        opened = False

        async def watch(message: Message) -> None:
            nonlocal status, opened
            match message["type"]:
                case "http.response.start":
                    status = str(message["status"])
                case "websocket.accept":
                    opened = True
                case "websocket.close":
                    # A socket that was never opened is answered by HTTP.
                    status = str(message.get("code", 1000)) if opened else "403"
            await send(message)

        with self._metrics.open.track_inprogress():
            try:
                await self._app(scope, receive, watch)
            finally:
                route = getattr(scope.get("route"), "path", _NO_ROUTE)
                self._metrics.requests.labels(route, status).inc()
