"""What all tests share: one real Valkey a session, and a key prefix of its own for each test."""

import os
import secrets
from collections.abc import Iterator

import pytest

from valkey_server import Valkey


@pytest.fixture(scope="session", autouse=True)
def no_settings_of_the_developers() -> None:
    """Tests see the defaults, whatever the shell says."""
    for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
        del os.environ[name]


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
