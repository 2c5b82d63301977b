"""A crowd of simple and OpenAI clients on one Headway: 100 users, each with one request at a time and a pause after it.

The defaults below make `locust -f benchmarks/locustfile.py` a measurement of a minute; locust's own options change
them. Each answer is checked, and a wrong one is a failure. `TTFT` are the times to the first text of the streams.
"""

import json
import random
import secrets
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from typing import Any

from locust import FastHttpUser, between, events, task
from locust.contrib.fasthttp import ResponseContextManager

#: Prompts of so many words, and how many in a hundred. A word is about a token, so that they fall into all three lanes
#: of the embedded profile, with or without a chat template.
_MIX = {(5, 25): 93, (260, 330): 6, (1030, 1060): 1}

_WORDS = (
    "the",
    "train",
    "runs",
    "from",
    "one",
    "town",
    "to",
    "the",
    "next",
    "and",
    "we",
    "see",
    "a",
    "hill",
    "or",
    "sea",
)

#: Few, so that a small model on a CPU keeps up.
_OUTPUT_TOKENS = 8

_DEFAULTS = {
    "num_users": 100,
    "spawn_rate": 20,
    "run_time": "60s",
    "host": "http://127.0.0.1:8000",
    # When the time is over, requests under way are still answered: they wait in Headway, and that is no failure.
    "stop_timeout": "300s",
}


@events.init_command_line_parser.add_listener
def _set_defaults(parser: ArgumentParser) -> None:
    parser.set_defaults(**_DEFAULTS)


class Caller(FastHttpUser):
    """One of the crowd."""

    wait_time = between(0.5, 2)
    network_timeout = 300
    connection_timeout = 30

    @task
    def infer(self) -> None:
        label = f"infer-{secrets.token_hex(4)}"
        body = _body(prompt=_prompt(), id=label)
        self._ask("/infer", body, lambda answer: answer["id"] == label and answer["result"])

    @task
    def generate(self) -> None:
        prompt, label = _prompt(), f"generate-{secrets.token_hex(4)}"

        def output(answer: dict[str, Any]) -> str:
            [text] = answer["text"]
            return text.removeprefix(prompt) if answer["id"] == label and text.startswith(prompt) else ""

        self._ask_or_stream("/generate", _body(prompt=prompt, id=label), output, output)

    @task
    def chat(self) -> None:
        body = _body(messages=[{"role": "user", "content": _prompt()}])
        self._ask_or_stream("/v1/chat/completions", body, _message, _delta)

    def _ask_or_stream(self, path: str, body: dict[str, Any], output: "_Output", streamed_output: "_Output") -> None:
        if random.random() < 0.5:
            self._stream(path, body, streamed_output)
        else:
            self._ask(path, body, output)

    def _ask(self, path: str, body: dict[str, Any], output: "_Output") -> None:
        with self.client.post(path, json=body, catch_response=True) as response:
            if response.status_code == 200 and not _safely(output, response.content):
                response.failure(f"unexpected answer: {response.text}")

    def _stream(self, path: str, body: dict[str, Any], output: "_Output") -> None:
        name, begun, first_s, last = f"{path} (stream)", time.perf_counter(), None, b""
        ask = self.client.post(path, json={**body, "stream": True}, name=name, stream=True, catch_response=True)
        with ask as response:
            if response.status_code == 200:
                for last in _events(response):
                    if first_s is None and _safely(output, last):
                        first_s = time.perf_counter() - begun
                response.request_meta["response_time"] = 1000 * (time.perf_counter() - begun)
                if first_s is None or last != b"[DONE]":
                    response.failure(f"a stream without text, or without its end: {last!r}")
        if first_s is not None:
            meta = {"name": name, "response_time": 1000 * first_s, "response_length": 0, "exception": None}
            self.environment.events.request.fire(request_type="TTFT", context={}, **meta)


#: The text in an answer or in an event; empty when there is none, or when it is not the asker's.
_Output = Callable[[dict[str, Any]], str]


def _message(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def _delta(chunk: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _safely(output: _Output, data: bytes) -> str:
    """The output; none where the data has another shape."""
    try:
        return output(json.loads(data))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return ""


def _events(response: ResponseContextManager) -> Iterator[bytes]:
    """The data of the events of a stream, as they come."""
    while line := response.stream.readline(b"\n"):
        if line.startswith(b"data: "):
            yield bytes(line).removeprefix(b"data: ").strip()


def _body(**fields: Any) -> dict[str, Any]:
    return {**fields, "max_tokens": _OUTPUT_TOKENS, "temperature": 0}


def _prompt() -> str:
    [(least, most)] = random.choices(list(_MIX), list(_MIX.values()))
    return " ".join(random.choices(_WORDS, k=random.randint(least, most)))
