"""The app: one process's queue and intake, and the routes on top of them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from starlette.responses import Response

from headway.api import errors, job_routes, openai_routes, simple_routes, websocket_routes
from headway.api.metrics import ApiMetrics, CountRequests
from headway.api.schemas import ErrorAnswer, Health
from headway.api.service import Service, Serving
from headway.shared.intake import Intake
from headway.shared.lanes import check_bounds
from headway.shared.limits import model_length
from headway.shared.metrics import exposition
from headway.shared.queue import Queue
from headway.shared.settings import Settings
from headway.shared.tokens import Counter, load_counter

#: Seconds between two tries to reach Redis at the start.
_RETRY_S = 1.0

_health = APIRouter(tags=["Health"])


def create_app(settings: Settings, *, counter: Counter | None = None) -> FastAPI:
    """The HTTP API; it connects to Redis when it starts, and needs Redis only when a request does.

    Args:
        counter: counts prompt tokens; None takes the tokenizer that the settings name.

    Raises:
        ConfigurationError: the tokenizer cannot be loaded, or a lane begins above the model's length.
    """
    max_model_len = model_length(settings)
    if max_model_len is not None:
        check_bounds(settings.lanes, max_model_len)
    intake = Intake(settings, counter or load_counter(settings), max_model_len)
    metrics = ApiMetrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with Queue.of(settings) as queue:
            app.state.service = Service(settings, intake, queue, metrics, max_model_len, started_at=int(time.time()))
            making = asyncio.create_task(_make_lanes(app.state.service))
            yield
            making.cancel()

    app = FastAPI(title="Headway", summary="A durable, length-aware inference queue for vLLM", lifespan=lifespan)
    errors.install(app)
    app.add_middleware(CountRequests, metrics=metrics)
    for routes in (openai_routes, job_routes, simple_routes, websocket_routes):
        app.include_router(routes.router)
    app.include_router(_health)
    return app


@_health.get("/health", response_model=Health)
async def health() -> Health:
    """The process is alive."""
    return Health()


@_health.get("/ready", response_model=Health, responses={503: {"model": ErrorAnswer}})
async def ready(service: Serving) -> Health:
    """Redis answers, so that jobs can be accepted."""
    await service.queue.ping()
    return Health()


@_health.get("/metrics", response_class=Response)
async def metrics(service: Serving) -> Response:
    """The metrics of this process and of all lanes, for Prometheus."""
    await service.count_lanes()
    text, media_type = exposition(service.metrics.registry)
    return Response(text, media_type=media_type)


async def _make_lanes(service: Service) -> None:
    """Makes the lanes before their first job: an autoscaler that looks into one that is missing sees an error."""
    while not await service.count_lanes():  # noqa: ASYNC110 - Redis says nothing by itself
        await asyncio.sleep(_RETRY_S)
