"""Two API processes and one worker with the simulated engine, shared by a session; an API for each test."""

import secrets
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from api_bench import Bench, working
from helpers import PATIENCE_S
from programs import MAX_MODEL_LEN, MODEL, ApiProgram, Program, Stack
from valkey_server import Valkey


@pytest.fixture(scope="session")
def stack(server: Valkey) -> Iterator[Stack]:
    settings = {
        "REDIS_URL": server.url,
        "PREFIX": f"hw-e2e-{secrets.token_hex(6)}",
        "ENGINE": "simulated",
        "SERVED_MODEL": MODEL,
        "MAX_MODEL_LEN": str(MAX_MODEL_LEN),
        "SHORT_BELOW": "200",
        "MID_TO": "800",
        "SIMULATED_STEP_MS": "2",
        "SIMULATED_PREFILL_TOKENS_PER_S": "1000000",
        "HEALTH_PORT": "0",
    }
    worker = Program("headway.worker", settings)
    apis: list[ApiProgram] = []
    try:
        for _ in range(2):
            apis.append(ApiProgram(settings))  # noqa: PERF401 - what has started must be ended when the next one fails
        yield Stack(settings, *(api.url for api in apis))
    finally:
        for program in (*apis, worker):
            program.stop()


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.api, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
async def other(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """The same through the other API process."""
    async with httpx.AsyncClient(base_url=stack.other, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
async def bench(redis_url: str, prefix: str) -> AsyncIterator[Bench]:
    """An API whose heartbeats come too late for any test; the test is its worker."""
    async with working(redis_url=redis_url, prefix=prefix, heartbeat_s=1000) as bench:
        yield bench


@pytest.fixture
async def beating(redis_url: str, prefix: str) -> AsyncIterator[Bench]:
    """The same, whose heart beats quickly."""
    async with working(redis_url=redis_url, prefix=prefix, heartbeat_s=0.02) as bench:
        yield bench
