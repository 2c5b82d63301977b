"""`/infer` and `/generate`: over the whole system with the simulated engine, and with the test as the worker."""

import json
from typing import Any

import httpx
import pytest

from api_bench import Bench
from headway.api.schemas import ErrorAnswer, GenerateAnswer, InferAnswer
from headway.shared.job import Delivery, Outcome, Reply, Status
from headway.shared.tokens import COMPLETIONS
from headway.worker.engines.simulated_openai import text
from helpers import DONE, chunks
from programs import MAX_MODEL_LEN, MODEL

PROMPT = 'Once "upon" a größer 🚂\n'
REFUSED = Outcome(Status.FAILED, 422, b'{"error": {"message": "no", "type": "t", "param": null, "code": 422}}')
BOTH = pytest.mark.parametrize("path", ["/infer", "/generate"])


def events(stream: str) -> list[Any]:
    """The data of all events, of which the last may be the mark of the end."""
    frames = [frame.removeprefix("data: ") for frame in stream.split("\n\n") if frame and frame != ": waiting"]
    return [frame if frame == "[DONE]" else json.loads(frame) for frame in frames]


def says(*texts: str) -> list[Reply]:
    """A chunk for each text; a text's place tells its choice."""
    return chunks(*(json.dumps({"choices": [{"index": i, "text": t}]}) for i, t in enumerate(texts)))


def error_of(answer: httpx.Response) -> Any:
    return ErrorAnswer.model_validate_json(answer.content, strict=True).error


async def test_infer_answers_with_the_output_alone(http: httpx.AsyncClient) -> None:
    answer = await http.post("/infer", json={"prompt": PROMPT, "max_tokens": 7, "temperature": 0.5})
    job_id = answer.headers["x-job-id"]
    # I expect the text, under the id of the job where I gave none
    assert InferAnswer.model_validate_json(answer.content, strict=True).model_dump() == {
        "id": job_id, "result": text(job_id, 0, 0, 7),
    }  # fmt: skip
    assert (answer.status_code, answer.headers["x-queue-class"]) == (200, "short")
    assert answer.headers["content-type"] == "application/json"


async def test_generate_repeats_the_prompt_before_each_choice(http: httpx.AsyncClient) -> None:
    answer = await http.post("/generate", json={"prompt": PROMPT, "max_tokens": 7, "n": 2, "model": MODEL})
    job_id = answer.headers["x-job-id"]
    assert GenerateAnswer.model_validate_json(answer.content, strict=True).model_dump() == {
        "id": job_id, "text": [PROMPT + text(job_id, i, 0, 7) for i in range(2)],
    }  # fmt: skip


@pytest.mark.parametrize("label", ["a", "job-0-0", "é" * 256, None])
@BOTH
async def test_a_label_is_repeated_and_is_no_key(http: httpx.AsyncClient, path: str, label: str | None) -> None:
    for _ in range(2):
        answer = await http.post(path, json={"prompt": PROMPT, "max_tokens": 1, "id": label})
        assert answer.status_code == 200
        assert answer.json()["id"] == (label or answer.headers["x-job-id"]) != ""


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_gives_the_texts_so_far(http: httpx.AsyncClient, n: int) -> None:
    order = {"prompt": PROMPT, "max_tokens": 20, "n": n, "stream": True, "stream_options": {"include_usage": True}}
    answer = await http.post("/generate", json={**order, "id": "mine"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *parts, done = events(answer.text)
    assert done == "[DONE]"
    assert {part["id"] for part in parts} == {"mine"}
    # I expect each event to bring something new, so that the usage makes none
    assert len({str(part["text"]) for part in parts}) == len(parts)
    job_id = answer.headers["x-job-id"]
    for i in range(n):
        # and each text to begin with the prompt and with the text before it, and the last to be whole
        mine = [part["text"][i] for part in parts]
        assert all(later.startswith(text) for text, later in zip([PROMPT, *mine], mine, strict=False))
        assert mine[-1] == PROMPT + text(job_id, i, 0, 20)
        assert len(set(mine)) > 5


@BOTH
async def test_what_else_completions_know_is_passed_on(bench: Bench, path: str) -> None:
    order = {"max_tokens": 3, "temperature": 0.1, "top_p": 0.9, "stop": ["\n"], "seed": 7, "other": {"a": None}}
    asking = bench.ask(path, id="mine", **order)
    delivery = await bench.take()
    assert delivery.job.endpoint == COMPLETIONS
    assert json.loads(delivery.job.body) == {"prompt": "Once", **order}
    await bench.queue.finish(delivery, 0, Outcome(Status.COMPLETED, 200, b'{"choices": [{"text": " more"}]}'))
    answer = (await asking).json()
    assert answer == {"id": "mine", **({"result": " more"} if path == "/infer" else {"text": ["Once more"]})}


WRONG: list[tuple[Any, int, str | None, str | None]] = [
    ([], 400, None, None),
    ("text", 400, None, None),
    ({"prompt": None}, 400, "prompt", None),
    ({"prompt": ["a", "b"]}, 400, "prompt", None),
    ({"prompt": [1, 2]}, 400, "prompt", None),
    ({"max_tokens": "ten"}, 400, "max_tokens", None),
    ({"max_tokens": 1.5}, 400, "max_tokens", None),
    ({"temperature": "hot"}, 400, "temperature", None),
    ({"temperature": -1}, 400, "temperature", None),
    ({"n": 0}, 400, "n", None),
    ({"n": "two"}, 400, "n", None),
    ({"stream": "yes"}, 400, "stream", None),
    ({"id": ""}, 400, "id", None),
    ({"id": 7}, 400, "id", None),
    ({"id": "x" * 257}, 400, "id", None),
    ({"echo": True}, 400, "echo", None),
    ({"model": "gpt-0"}, 404, "model", "model_not_found"),
    ({"prompt": "x" * 4 * MAX_MODEL_LEN}, 400, "prompt", "context_length_exceeded"),
    ({"max_tokens": MAX_MODEL_LEN}, 400, "prompt", "context_length_exceeded"),
]


@pytest.mark.parametrize(("fields", "status", "param", "code"), WRONG, ids=lambda value: str(value)[:30])
@BOTH
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, path: str, fields: Any, status: int, param: str | None, code: str | None
) -> None:
    answer = await http.post(path, json={"prompt": "Once", **fields} if isinstance(fields, dict) else fields)
    assert answer.status_code == status
    error = error_of(answer)
    assert error.param == param
    assert error.message
    # The engine's own refusals (the temperature) have the status as their code, as vLLM's have.
    assert error.code == code or (param == "temperature" and error.code == 400)


@BOTH
async def test_without_a_prompt(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(path, json={"max_tokens": 3})
    assert (answer.status_code, error_of(answer).param) == (400, "prompt")


@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt": "x"} more', b"\xff", b"[" * 100_000])
@BOTH
async def test_what_is_no_json_is_refused(http: httpx.AsyncClient, path: str, body: bytes) -> None:
    answer = await http.post(path, content=body)
    assert (answer.status_code, "not valid JSON" in error_of(answer).message) == (400, True)


@pytest.mark.parametrize("wrong", [{"stream": True}, {"n": 2}])
async def test_infer_gives_one_whole_result(http: httpx.AsyncClient, wrong: dict[str, Any]) -> None:
    answer = await http.post("/infer", json={"prompt": PROMPT, **wrong})
    assert (answer.status_code, error_of(answer).param) == (400, *wrong)
    assert "/generate" in error_of(answer).message
    # What says the same as nothing is no wish.
    assert (await http.post("/infer", json={"prompt": PROMPT, "stream": False, "n": 1})).status_code == 200


@pytest.mark.parametrize(("path", "stream"), [("/infer", False), ("/generate", False), ("/generate", True)])
async def test_an_engine_that_refuses_has_its_own_status_and_words(bench: Bench, path: str, stream: bool) -> None:
    asking = bench.ask(path, stream=stream)
    delivery = await bench.take()
    await bench.queue.finish(delivery, 0, REFUSED)
    answer = await asking
    assert (answer.status_code, answer.content) == (422, REFUSED.body)
    # I expect it to name the job, and to tell SDKs not to make the model generate again
    assert (answer.headers["x-job-id"], answer.headers["x-should-retry"]) == (delivery.job.id, "false")


async def test_an_error_behind_text_is_an_event_and_nothing_is_done(bench: Bench) -> None:
    asking = bench.ask("/generate", stream=True)
    delivery = await bench.take()
    await bench.queue.append(delivery, 0, says(" more"))
    await bench.queue.finish(delivery, 1, REFUSED)
    answer = await asking
    assert events(answer.text) == [{"id": delivery.job.id, "text": ["Once more"]}, json.loads(REFUSED.body)]


async def test_a_job_that_begins_again_begins_again_from_the_prompt(bench: Bench) -> None:
    # Given a reader who has text of both choices
    asking = bench.ask("/generate", stream=True, n=2)
    delivery: Delivery = await bench.take()
    await bench.queue.append(delivery, 0, [*says(" a", " b"), Reply(0, "restarted", b"{}"), *says(" c", " d")])
    await bench.queue.finish(delivery, 5, DONE)
    # I expect texts that replace the ones before, and no error
    texts = [event["text"] for event in events((await asking).text)[:-1]]
    assert texts == [["Once a", "Once"], ["Once a", "Once b"], ["Once c", "Once"], ["Once c", "Once d"]]
    assert (await asking).text.endswith("data: [DONE]\n\n")


async def test_chunks_and_choices_without_text(bench: Bench) -> None:
    # Given an engine that streams chunks without choices, and choices without a text
    asking = bench.ask("/generate", stream=True)
    delivery = await bench.take()
    odd = [{"usage": {}}, {"choices": None}, {"choices": []}, {"choices": [{"index": 0}]}]
    odd += [{"choices": [{"index": 0, "text": None}]}, {"choices": [{"index": 0, "text": " more"}]}]
    await bench.queue.append(delivery, 0, chunks(*map(json.dumps, odd)))
    await bench.queue.finish(delivery, len(odd), DONE)

    # I expect an event for each chunk that has a choice, with the text so far
    *parts, done = events((await asking).text)
    assert [part["text"] for part in parts] == [["Once"], ["Once"], ["Once more"]]
    assert done == "[DONE]"


@BOTH
async def test_an_answer_without_text(bench: Bench, path: str) -> None:
    asking = bench.ask(path)
    await bench.queue.finish(await bench.take(), 0, Outcome(Status.COMPLETED, 200, b'{"choices": [{"text": null}]}'))
    answer = await asking
    assert answer.status_code == 200
    assert answer.json().get("result", answer.json().get("text")) in ("", ["Once"])


async def test_a_stream_that_waits_beats(beating: Bench) -> None:
    async with beating.http.stream("POST", "/generate", json={"prompt": "x", "stream": True}) as answer:
        parts = answer.aiter_raw()
        assert answer.headers["x-accel-buffering"] == "no"
        assert await anext(parts) == b": waiting\n\n"
        await beating.queue.finish(await beating.take(), 0, DONE)
        assert b"".join([part async for part in parts]).endswith(b"data: [DONE]\n\n")
