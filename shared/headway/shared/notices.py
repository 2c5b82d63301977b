"""Pub/Sub for a whole process on one connection, whatever the number of channels."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

#: A subscriber's callback: the message, or None when messages may have been missed (subscribed just now, or again).
Notify = Callable[[bytes | None], None]

#: Seconds between two attempts to reach a server that is down.
_RECONNECT_S = 0.5


class Notices:
    """Hands messages to callbacks. A notice is a hint, never the truth: the log is, so a lost one does no harm."""

    def __init__(self, redis: Redis, idle_channel: str) -> None:
        """
        Args:
            redis: a client that waits without a timeout and does not retry: reconnecting is this class's own affair,
                because each reconnect must make all subscribers look again.
            idle_channel: a channel that keeps the connection subscribed while nobody else is.
        """
        self._redis = redis
        self._idle_channel = idle_channel
        self._pubsub: PubSub | None = None
        self._callbacks: dict[bytes, list[Notify]] = defaultdict(list)
        self._confirmed: set[bytes] = set()
        self._listener = asyncio.create_task(self._listen(), name="notices")

    @asynccontextmanager
    async def subscribed(self, channel: str, notify: Notify) -> AsyncIterator[None]:
        """Calls `notify` for each message; first with None as soon as the subscription is confirmed."""
        name = channel.encode()
        callbacks = self._callbacks[name]
        callbacks.append(notify)
        try:
            if name in self._confirmed:
                notify(None)
            elif len(callbacks) == 1:
                await self._subscribe(channel)
            yield
        finally:
            callbacks.remove(notify)
            if not callbacks:
                del self._callbacks[name]
                self._confirmed.discard(name)
                await self._unsubscribe(channel)

    async def aclose(self) -> None:
        """Ends the listener and its connection."""
        self._listener.cancel()
        with suppress(asyncio.CancelledError):
            await self._listener

    async def _subscribe(self, channel: str) -> None:
        # While the server is down nothing is sent: the listener subscribes to all channels when it is back.
        if self._pubsub is not None:
            with suppress(RedisError, OSError):
                await self._pubsub.subscribe(channel)

    async def _unsubscribe(self, channel: str) -> None:
        if self._pubsub is not None:
            with suppress(RedisError, OSError):
                await self._pubsub.unsubscribe(channel)

    async def _listen(self) -> None:
        while True:
            with suppress(RedisError, OSError):
                await self._listen_once()
            self._confirmed.clear()
            await asyncio.sleep(_RECONNECT_S)

    async def _listen_once(self) -> None:
        async with self._redis.pubsub() as pubsub:
            try:
                # The first command makes the connection; two at once would make two.
                await pubsub.subscribe(self._idle_channel)
                self._pubsub = pubsub
                if self._callbacks:
                    await pubsub.subscribe(*self._callbacks)
                async for message in pubsub.listen():
                    self._hand_out(message)
            finally:
                self._pubsub = None

    def _hand_out(self, message: dict[str, object]) -> None:
        name, kind = message["channel"], message["type"]
        if not isinstance(name, bytes) or kind not in ("message", "subscribe"):
            return
        if kind == "subscribe" and name in self._callbacks:
            self._confirmed.add(name)
        payload = message["data"] if kind == "message" else None
        for notify in tuple(self._callbacks.get(name, ())):
            notify(payload if isinstance(payload, bytes) else None)
