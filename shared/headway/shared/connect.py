"""Connections to Redis."""

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import RedisError

from headway.shared.errors import ConfigurationError

#: Seconds that a command may take before the connection counts as dead; all commands but blocking reads are short.
SOCKET_TIMEOUT_S = 5.0

#: A command whose connection broke is sent again, which every command here allows; about 1 s of pauses in all.
RETRY = (5, ExponentialWithJitterBackoff(base=0.02, cap=0.5))


def connect(url: str, *, socket_timeout_s: float | None = SOCKET_TIMEOUT_S, retries: int = RETRY[0]) -> Redis:
    """A client with its own small pool.

    Args:
        socket_timeout_s: None for connections that wait for messages.

    Raises:
        ConfigurationError: the URL is not one of Redis.
    """
    try:
        return Redis.from_url(
            url,
            protocol=2,
            socket_timeout=socket_timeout_s,
            socket_connect_timeout=SOCKET_TIMEOUT_S,
            retry=Retry(RETRY[1], retries),
        )
    except (ValueError, RedisError):
        # The reason is left out, since it may quote the URL and with it a password.
        raise ConfigurationError(
            "HEADWAY_REDIS_URL is not a URL of Redis: redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix://PATH;"
            " in a password, characters such as / ? # @ must be percent-encoded"
        ) from None
