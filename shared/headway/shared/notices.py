"""Pub/Sub for a whole process on one connection, whatever the number of channels."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from headway.shared.connect import reach
from headway.shared.errors import frames

#: A subscriber's callback: the message, or None when messages may have been missed (subscribed just now, or again).
Notify = Callable[[bytes | None], None]

#: Seconds between two attempts to reach a server that is down.
_RECONNECT_S = 0.5

#: Seconds of silence after which the server is asked for a sign of life, and after as many more given up: a connection
#: whose other end has vanished is silent too.
_SILENCE_S = 10.0

_log = logging.getLogger(__name__)


class Notices:
    """Hands messages to callbacks. A notice is a hint, never the truth: the log is, so a lost one does no harm."""

    def __init__(self, connection: AbstractConnection, idle_channel: str) -> None:
        """
        Args:
            connection: one that waits without a timeout and does not retry: reconnecting is this class's own affair,
                because each reconnect must make all subscribers look again.
            idle_channel: a channel that keeps the connection subscribed while nobody else is.
        """
        self._connection = connection
        self._idle_channel = idle_channel
        self._ready = False
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
                await self._send("SUBSCRIBE", channel)
            yield
        finally:
            callbacks.remove(notify)
            if not callbacks:
                del self._callbacks[name]
                self._confirmed.discard(name)
                await self._send("UNSUBSCRIBE", channel)

    async def aclose(self) -> None:
        """Ends the listener and its connection."""
        self._listener.cancel()
        with suppress(asyncio.CancelledError):
            await self._listener

    async def _send(self, command: str, channel: str) -> None:
        # Never on a broken connection, which redis-py would open again under the listener's feet, nor into a handshake,
        # whose answers would then be another's. The listener subscribes to all channels when it is back.
        if self._ready and self._connection.is_connected:
            with suppress(RedisError, OSError):
                await self._connection.send_command(command, channel)

    async def _listen(self) -> None:
        while True:
            with suppress(RedisError, OSError):
                await self._listen_once()
            self._confirmed.clear()
            await asyncio.sleep(_RECONNECT_S)

    async def _listen_once(self) -> None:
        # redis-py's PubSub reconnects in whichever task meets the error first, so two tasks make two connections.
        connection = self._connection
        try:
            await reach(connection)
            self._ready = True
            await connection.send_command("SUBSCRIBE", self._idle_channel, *self._callbacks)
            asked = False
            while True:
                message = await connection.read_response(timeout=_SILENCE_S)
                if message is not None:
                    self._hand_out(message)
                elif asked:
                    raise TimeoutError
                else:
                    await connection.send_command("PING")
                asked = message is None
        finally:
            self._ready = False
            await connection.disconnect()

    def _hand_out(self, message: Any) -> None:
        """A message is its kind, the channel, and the payload or the number of subscriptions; a pong is shorter."""
        kind, name = message[:2]
        payload = message[2] if kind == b"message" else None
        if kind == b"subscribe" and name in self._callbacks:
            self._confirmed.add(name)
        if kind in (b"subscribe", b"message"):
            for notify in tuple(self._callbacks.get(name, ())):
                try:
                    notify(payload)
                except Exception as error:  # One subscriber's fault must not make the others deaf.
                    _log.error("a subscriber failed: %s\n%s", type(error).__name__, frames(error))
