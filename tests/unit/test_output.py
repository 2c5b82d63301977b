"""How a job ends, from what its engine said."""

import json

import pytest

from engine_fakes import chunk
from headway.shared.errors import InvalidRequest
from headway.shared.job import Outcome, Status
from headway.worker.engines.base import Chunk, Final
from headway.worker.output import Output
from helpers import make_job


@pytest.fixture
def output() -> Output:
    return Output(make_job(body=b'{"model": "m", "messages": [{"role": "user", "content": "Hi"}]}'))


def _usage(tokens: int) -> Chunk:
    return Chunk(b"", {"choices": [], "usage": {"prompt_tokens": 1, "total_tokens": 1, "completion_tokens": tokens}})


def _outcome(output: Output, final: Final) -> Outcome:
    outcome = output.outcome(final)
    assert outcome is not None
    return outcome


def test_a_plain_request_runs_as_a_stream_with_usage(output: Output) -> None:
    assert output.request().body["stream"] is True
    assert output.request().body["stream_options"] == {"include_usage": True}


def test_a_stream_is_assembled(output: Output) -> None:
    # Given chunks and their usage
    for item in (chunk("Hel"), chunk("lo"), chunk("", "stop"), _usage(2)):
        output.add(item)

    # If the engine ends well, I expect the plain answer, its tokens and the age of the first
    outcome = _outcome(output, Final(200, None))
    assert (outcome.status, outcome.status_code) == (Status.COMPLETED, 200)
    assert json.loads(outcome.body)["choices"][0]["message"]["content"] == "Hello"
    assert output.tokens == 2
    assert output.first_token_age_s() is not None


def test_a_plain_answer_is_kept_as_it_is(output: Output) -> None:
    body = b'{"choices": [{"finish_reason": "stop"}],  "usage": {"completion_tokens": 7}}'
    assert _outcome(output, Final(200, body)).body == body
    assert output.tokens == 7
    assert output.first_token_age_s() is None


def test_the_callers_errors_are_final(output: Output) -> None:
    outcome = _outcome(output, Final(422, b'{"error": {}}'))
    assert (outcome.status, outcome.status_code, outcome.body) == (Status.FAILED, 422, b'{"error": {}}')


@pytest.mark.parametrize(
    "final", [Final(500, b"{}"), Final(503, None), Final(200, b'{"choices": [{"finish_reason": "abort"}]}')]
)
def test_the_engines_errors_are_tried_again(output: Output, final: Final) -> None:
    assert output.outcome(final) is None


def test_a_job_is_given_up_without_telling_of_the_engines_insides(output: Output) -> None:
    outcome = output.given_up()
    assert (outcome.status, outcome.status_code) == (Status.FAILED, 500)
    assert json.loads(outcome.body)["error"]["code"] == "engine_failed"


def test_an_unknown_number_of_tokens_is_none(output: Output) -> None:
    output.add(Chunk(b"", {"choices": [], "usage": {"completion_tokens": None}}))
    assert output.tokens == 0


def test_an_abort_inside_a_stream_is_no_answer(output: Output) -> None:
    output.add(chunk("Hel"))
    output.add(chunk("", "abort"))
    assert output.outcome(Final(200, None)) is None


def test_a_cancelled_job_keeps_its_text(output: Output) -> None:
    output.add(chunk("Hel"))
    outcome = output.cancelled()
    body = json.loads(outcome.body)
    assert (outcome.status, outcome.status_code, body["error"]["code"]) == (Status.CANCELLED, 499, "cancelled")
    assert body["partial"]["choices"][0]["message"]["content"] == "Hel"


def test_a_job_cancelled_before_its_first_token_has_no_text(output: Output) -> None:
    assert json.loads(output.cancelled().body)["partial"] is None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff"])
def test_a_body_that_is_no_json_object_is_the_callers_error(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Output(make_job(body=body)).request()
