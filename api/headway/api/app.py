"""The app: one process's queue and intake, and the routes on top of them."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI

from headway.api import errors, job_routes, openai_routes
from headway.api.schemas import ErrorAnswer, Health
from headway.api.service import Service, Serving
from headway.shared.intake import Intake
from headway.shared.lanes import check_bounds
from headway.shared.limits import model_length
from headway.shared.queue import Queue
from headway.shared.settings import Settings
from headway.shared.tokens import Counter, load_counter

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

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with Queue.of(settings) as queue:
            app.state.service = Service(settings, intake, queue, max_model_len, started_at=int(time.time()))
            yield

    app = FastAPI(title="Headway", summary="A durable, length-aware inference queue for vLLM", lifespan=lifespan)
    errors.install(app)
    for router in (openai_routes.router, job_routes.router, _health):
        app.include_router(router)
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
