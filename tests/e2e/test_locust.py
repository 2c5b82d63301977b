"""The crowd of the locust file, small: it still fits the API, and it notices what is wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from programs import ROOT, Stack

#: Enough callers that each kind of request comes about ten times, whatever their dice say.
CALLERS = ("--users", "30", "--spawn-rate", "30", "--run-time", "4s")


def crowd(url: str) -> list[dict[str, Any]]:
    """What locust counted, by kind of request."""
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "benchmarks/locustfile.py"), "--headless", "--json"]
    # Locust reads options from LOCUST_* variables too, and a proxy is not for this machine.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")}
    done = subprocess.run(
        [*command, "--host", url, *CALLERS, "--exit-code-on-error", "0"],
        env=outside,
        capture_output=True,
        text=True,
        check=True,
    )
    entries: list[dict[str, Any]] = json.loads(done.stdout)
    return entries


@pytest.fixture
def liar() -> Iterator[str]:
    """A server that answers everything with 200 and an empty object; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def test_a_crowd_on_all_routes_is_served_without_a_failure(stack: Stack) -> None:
    # If a crowd calls for some seconds
    entries = crowd(stack.api)

    # I expect it to have called every route, plain and streamed, and each answer to be right
    chat, streamed = "/v1/chat/completions", " (stream)"
    routes = {"/infer", "/generate", "/generate" + streamed, chat, chat + streamed}
    assert {entry["name"] for entry in entries if entry["method"] == "POST"} == routes
    assert {entry["name"] for entry in entries if entry["method"] == "TTFT"} == {r for r in routes if streamed in r}
    assert [entry["name"] for entry in entries if not entry["num_requests"] or entry["num_failures"]] == []


def test_the_crowd_notices_wrong_answers(liar: str) -> None:
    # Given a server whose answers have status 200 and nothing in them; if the crowd calls it
    entries = crowd(liar)

    # I expect each request to be a failure
    assert len(entries) == 5
    assert all(entry["num_requests"] == entry["num_failures"] > 0 for entry in entries)
