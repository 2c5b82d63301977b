"""The worker's health endpoint: 200 means that it pulls work, anything else is 503."""

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
    """An ASGI application that answers every path with the worker's state, as JSON."""

    async def app(scope: _Message, _: object, send: Callable[[_Message], Awaitable[None]]) -> None:
        if scope["type"] != "http":
            return
        body = {"status": worker.state, "pulling": worker.pulling, "running": worker.running, "worker": worker.name}
        headers = [(b"content-type", b"application/json")]
        status = 200 if worker.pulling else 503
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    return app


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
    server = _Server(uvicorn.Config(health_app(worker), lifespan="off", log_level="warning"))
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving
