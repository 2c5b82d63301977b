"""Connections to Redis: each is held by its one user, which spares a pool's checks before each command."""

from collections.abc import Sequence
from typing import Any

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import RedisError, ResponseError

from headway.shared.errors import ConfigurationError

#: Seconds that a command may take before the connection counts as dead; all commands but blocking reads are short.
SOCKET_TIMEOUT_S = 5.0

#: A command whose connection broke is sent again, which all allow but reads of lanes, for which it is switched off;
#: about 1 s of pauses in all.
RETRY = (5, ExponentialWithJitterBackoff(base=0.02, cap=0.5))

#: A command and its arguments.
Command = Sequence[bytes | str | int]


def connect(
    url: str, *, socket_timeout_s: float | None = SOCKET_TIMEOUT_S, retries: int = RETRY[0]
) -> AbstractConnection:
    """A connection that opens itself when it is used, and again after it broke; who made it disconnects it.

    Args:
        socket_timeout_s: None for connections that wait for messages.

    Raises:
        ConfigurationError: the URL is not one of Redis.
    """
    try:
        pool = ConnectionPool.from_url(
            url,
            protocol=2,
            socket_timeout=socket_timeout_s,
            socket_connect_timeout=SOCKET_TIMEOUT_S,
            retry=Retry(RETRY[1], retries),
        )
        connection: AbstractConnection = pool.make_connection()  # type: ignore[no-untyped-call]
        return connection
    except (TypeError, ValueError, RedisError):
        # The reason is left out, since it may quote the URL and with it a password.
        raise ConfigurationError(
            "HEADWAY_REDIS_URL is not a URL of Redis: redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix://PATH;"
            " in a password, characters such as / ? # @ must be percent-encoded"
        ) from None


async def reach(connection: AbstractConnection) -> None:
    """Opens the connection if it is not open.

    Raises:
        RedisError: the server could not be reached, as often as the connection retries.
    """
    if not connection.is_connected:
        await connection.connect()  # type: ignore[no-untyped-call]


async def ask(connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
    """Sends commands as one pipeline; the answers as they are on the wire, a refused command's is a ResponseError.

    When the connection breaks they are sent again, as often as it retries.

    Raises:
        RedisError: as `reach`, or the connection broke each time.
    """
    await reach(connection)
    packed = connection.pack_commands(commands)

    async def exchange() -> list[Any]:
        await connection.send_packed_command(packed)
        return [await _answer(connection) for _ in commands]

    return await connection.retry.call_with_retry(exchange, lambda _: connection.disconnect())


async def _answer(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
