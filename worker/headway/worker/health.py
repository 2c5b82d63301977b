"""The worker's three endpoints: `/health` (does it pull work?), `/live` (does its engine live?) and `/metrics`."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn

from headway.shared.errors import ConfigurationError
from headway.worker.worker import Worker

_Message = MutableMapping[str, Any]


def health_app(worker: Worker) -> Callable[..., Awaitable[None]]:
    """An ASGI application: `/metrics` is for Prometheus, every other path answers with the worker's state, as JSON.

    200 means on `/live` that the engine lives, and elsewhere that the worker pulls work; anything else is 503.
    """

    async def app(scope: _Message, _: object, send: Callable[[_Message], Awaitable[None]]) -> None:
        if scope["type"] != "http":
            return
        status, body, media_type = await _answer(worker, scope)
        headers = [(b"content-type", media_type.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


async def _answer(worker: Worker, scope: _Message) -> tuple[int, bytes, str]:
    if scope["path"] == "/metrics":
        return 200, *await worker.metrics()
    good = worker.alive if scope["path"] == "/live" else worker.pulling
    state = {"status": worker.state, "pulling": worker.pulling, "running": worker.running, "worker": worker.name}
    return 200 if good else 503, json.dumps(state).encode(), "application/json"


def listen(host: str, port: int) -> socket.socket:
    """The listening socket of the endpoint.

    Raises:
        ConfigurationError: the address cannot be used.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigurationError(f"HEADWAY_HEALTH_PORT={port}: {host}:{port} cannot be used ({error})") from error


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone: they are the worker's."""
        yield


@asynccontextmanager
async def serving_health(worker: Worker, listener: socket.socket) -> AsyncIterator[None]:
    """Answers on the socket for the length of the block."""
    config = uvicorn.Config(
        health_app(worker),
        lifespan="off",
        log_level="warning",
        # Somebody who asks and does not read must not keep the worker from ending.
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving
