"""The worker's health endpoint: 200 means that it pulls work, anything else is 503."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

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
