"""The test server itself: crash tests lean on what it keeps and what it loses."""

from pathlib import Path

import pytest
from redis import Redis

from valkey_server import Valkey, free_port


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_data_outlives_the_process(tmp_path: Path, end: str) -> None:
    # Given a server that writes its data to disk, with one key
    valkey = Valkey(tmp_path, appendonly=True)
    valkey.start()
    with Redis.from_url(valkey.url) as client:
        client.set("key", "value")

    # If I end it and start it again
    getattr(valkey, end)()
    valkey.start()

    # I expect the key
    with Redis.from_url(valkey.url) as client:
        assert client.get("key") == b"value"
    valkey.stop()


def test_it_listens_on_tcp_when_given_a_port(tmp_path: Path) -> None:
    # Given a server with a port
    port = free_port()
    valkey = Valkey(tmp_path, port=port)
    valkey.start()

    # I expect its URL to name the port, and an answer there
    assert valkey.url == f"redis://127.0.0.1:{port}/0"
    with Redis.from_url(valkey.url) as client:
        assert client.ping()
    valkey.stop()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    # Given a folder that is not there any more
    folder = tmp_path / "gone"
    folder.mkdir()
    valkey = Valkey(folder, appendonly=True)
    (folder / "appendonlydir").write_text("a file where Valkey needs a folder")

    # If I start the server, I expect its own words in the error
    with pytest.raises(TimeoutError, match="append"):
        valkey.start()
