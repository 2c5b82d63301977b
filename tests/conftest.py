"""What all tests share: one real Valkey a session, and a key prefix of its own for each test."""

import secrets
from collections.abc import Iterator

import pytest

from valkey_server import Valkey


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """A running Valkey that keeps nothing on disk."""
    valkey = Valkey(tmp_path_factory.mktemp("valkey"))
    valkey.start()
    yield valkey
    valkey.stop()


@pytest.fixture
def redis_url(server: Valkey) -> str:
    return server.url


@pytest.fixture
def prefix() -> str:
    """What every key of this test begins with."""
    return f"hw-test-{secrets.token_hex(6)}"
