"""How a server is spoken to by HTTP, and what it says of its models."""

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import httpx
from pydantic import SecretStr

from headway.shared.errors import ConfigurationError

#: Seconds that a connection may take, and that the server may take to list its models.
_CONNECT_S = 10.0

#: Seconds that the network may take none of a request, which has megabytes at most. Reading has no such limit: a long
#: prompt, or an answer that does not stream, is silent for minutes.
_WRITE_S = 60.0

#: uvicorn, in which vLLM and many others run, closes connections that were idle for 5 s. Who closes first never sends
#: a request into a connection that is being closed.
_IDLE_S = 2.0

#: A host that vanishes without a word is noticed within two minutes, however long its answers take: seconds before the
#: first probe, seconds between two, and probes. The first is macOS's name of the second.
_KEEPALIVE = {"TCP_KEEPALIVE": 60, "TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


class NotReady(Exception):
    """The server does not answer, or answers that it cannot yet."""


def client(url: str, api_key: SecretStr | None, slots: int) -> httpx.AsyncClient:
    """A client without limits of its own on connections: a request that waited for one would hold a slot for nothing.

    It looks at no proxy and no netrc of the environment, which are for the internet; a gateway's URL is a setting.
    SSL_CERT_FILE counts, for authorities of one's own.
    """
    # Else a compressing proxy holds tokens back until it has enough to compress.
    headers = {"accept-encoding": "identity"}
    if api_key:
        # Files end in a line end, which is no part of the key.
        key = api_key.get_secret_value().strip()
        if not (key and key.isascii() and key.isprintable()):
            raise ConfigurationError("HEADWAY_UPSTREAM_API_KEY is blank, or has characters that no header can carry")
        headers["authorization"] = f"Bearer {key}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=slots, keepalive_expiry=_IDLE_S)
    return httpx.AsyncClient(
        base_url=base_url(url),
        headers=headers,
        timeout=httpx.Timeout(None, connect=_CONNECT_S, write=_WRITE_S),
        trust_env=False,
        transport=httpx.AsyncHTTPTransport(limits=limits, socket_options=_keepalive_options()),
    )


def _keepalive_options() -> list[tuple[int, int, int]]:
    known = [(getattr(socket, name, None), value) for name, value in _KEEPALIVE.items()]
    options = [(socket.IPPROTO_TCP, option, value) for option, value in known if option is not None]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *options]


def base_url(url: str) -> str:
    """The URL in front of `/v1`.

    Raises:
        ConfigurationError: it is none of HTTP. It is not quoted, since it may hold a password.
    """
    if not url:
        raise ConfigurationError("HEADWAY_UPSTREAM_URL names no server")
    try:
        parsed = httpx.URL(url)
        usable = parsed.scheme in ("http", "https") and parsed.host and (parsed.port or 0) < 2**16
    except (httpx.InvalidURL, ValueError):
        # The second is of a host that is no international name although it says so.
        parsed, usable = httpx.URL(""), False
    if not usable or parsed.userinfo or parsed.query or parsed.fragment:
        raise ConfigurationError(
            "HEADWAY_UPSTREAM_URL must be http:// or https:// with a host, and may have a port and a path;"
            " a key belongs in HEADWAY_UPSTREAM_API_KEY"
        )
    return str(parsed).rstrip("/").removesuffix("/v1")


async def model_card(http: httpx.AsyncClient, model: str) -> Mapping[str, Any]:
    """What the server says of the model.

    Raises:
        NotReady: it is not there, or not yet.
        ConfigurationError: to wait for it cannot help.
    """
    try:
        # httpx bounds each read; a server can drip for ever.
        async with asyncio.timeout(_CONNECT_S):
            response = await http.get("/v1/models")
    except (httpx.RequestError, TimeoutError) as error:
        raise NotReady(named_error(error)) from error
    status_code = response.status_code
    if status_code in (401, 403):
        raise ConfigurationError(
            f"HEADWAY_UPSTREAM_API_KEY: the upstream refuses the key, or that there is none ({status_code})"
        )
    cards = _cards(response)
    if not cards:
        raise NotReady(f"{response.url} answers {status_code} and lists no models")
    if model not in cards:
        raise ConfigurationError(f"HEADWAY_UPSTREAM_MODEL: the upstream has no {model!r}, but {', '.join(cards)}")
    return cards[model]


def _cards(response: httpx.Response) -> dict[str, Mapping[str, Any]]:
    """The models of a list by their names; none when it is no such list."""
    try:
        return {str(card["id"]): card for card in response.json()["data"]} if response.is_success else {}
    except (KeyError, TypeError, ValueError):
        return {}


def named_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
