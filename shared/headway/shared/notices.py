"""Pub/Sub for a whole process on one connection, whatever the number of channels."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from redis.asyncio import Redis
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
            idle_channel: a channel that keeps the connection subscribed while nobody else is.
        """
        self._pubsub = redis.pubsub()
        self._idle_channel = idle_channel
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
                await self._send(self._pubsub.subscribe, channel)
            yield
        finally:
            callbacks.remove(notify)
            if not callbacks:
                del self._callbacks[name]
                self._confirmed.discard(name)
                await self._send(self._pubsub.unsubscribe, channel)

    async def aclose(self) -> None:
        """Ends the listener and its connection."""
        self._listener.cancel()
        with suppress(asyncio.CancelledError):
            await self._listener
        await self._pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _send(self, verb: Callable[..., object], channel: str) -> None:
        # A server that is down is the listener's business: it subscribes to all channels again when it is back.
        with suppress(RedisError, OSError):
            await verb(channel)  # type: ignore[misc]

    async def _listen(self) -> None:
        while True:
            try:
                await self._pubsub.subscribe(self._idle_channel)
                async for message in self._pubsub.listen():
                    self._hand_out(message)
            except (RedisError, OSError):
                self._confirmed.clear()
                await asyncio.sleep(_RECONNECT_S)

    def _hand_out(self, message: dict[str, object]) -> None:
        name, kind = message["channel"], message["type"]
        if not isinstance(name, bytes) or kind not in ("message", "subscribe"):
            return
        if kind == "subscribe" and name in self._callbacks:
            self._confirmed.add(name)
        payload = message["data"] if kind == "message" else None
        for notify in tuple(self._callbacks.get(name, ())):
            notify(payload if isinstance(payload, bytes) else None)
