"""Waiting for Redis: an outage must cost a worker nothing that it has generated."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headway.shared.errors import QueueUnavailable

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

#: Seconds between two tries while Redis is down: long enough to cost nothing, short against a lease.
RETRY_S = 0.25


async def patiently(call: Callable[[], Awaitable[_T]]) -> _T:
    """Makes a call again and again until Redis takes it. Every verb of the queue is safe to repeat."""
    warned = False
    while True:
        try:
            return await call()
        except QueueUnavailable as error:
            if not warned:
                _log.warning("waiting for Redis: %s", error)
                warned = True
            await asyncio.sleep(RETRY_S)
