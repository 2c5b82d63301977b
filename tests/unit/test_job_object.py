"""A job as JSON."""

import json
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from headway.api.job_object import job_object
from headway.api.schemas import JobObject
from headway.shared.job import Outcome, Record, Status
from headway.shared.records import decode_record

ID = "job-0-abc"
FIELDS = {
    b"status": b"queued",
    b"model": b"m",
    b"endpoint": b"/v1/completions",
    b"lane": b"short",
    b"tier": b"flex",
    b"log": b"1",
    b"prompt_tokens": b"12",
    b"attempt": b"0",
    b"queued_at_ms": b"1700000000123",
}


def record(status: Status = Status.QUEUED, **fields: Any) -> Record:
    return replace(decode_record(ID, [*chain(*FIELDS.items())]), status=status, **fields)


def decoded(of: Record, outcome: Outcome | None = None) -> JobObject:
    """The JSON, read strictly by its own schema."""
    return JobObject.model_validate_json(job_object(of, outcome), strict=True)


def test_a_queued_job() -> None:
    job = decoded(record())
    assert (job.id, job.status, job.lane, job.tier, job.prompt_tokens) == (ID, "queued", "short", "flex", 12)
    assert (job.created_at, job.timeline.queued_at_ms) == (1_700_000_000, 1_700_000_000_123)
    assert (job.batch, job.result, job.error, job.timeline.started_at_ms) == (None, None, None, None)
    assert job.links.events == f"/v1/jobs/{ID}/events"


def test_a_running_job_names_its_micro_batch() -> None:
    job = decoded(record(Status.IN_PROGRESS, batch="w/1", batch_size=3, batch_closed_by="full", started_at_ms=5))
    assert job.batch is not None
    assert (job.batch.name, job.batch.size, job.batch.closed_by) == ("w/1", 3, "full")


def test_the_result_is_the_bytes_of_the_engine() -> None:
    body = b'{"b": 1.0,  "a": "\xc3\xa4"}'
    raw = job_object(record(Status.COMPLETED), Outcome(Status.COMPLETED, 200, body))
    assert b'"result":' + body in raw
    assert json.loads(raw)["error"] is None


def test_a_failed_job_has_the_error_without_its_wrapper() -> None:
    body = b'{"error": {"message": "no", "type": "BadRequestError", "param": null, "code": 400}, "partial": null}'
    job = decoded(record(Status.FAILED), Outcome(Status.FAILED, 400, body))
    assert job.error is not None
    assert (job.error.message, job.error.code, job.result) == ("no", 400, None)


@pytest.mark.parametrize("body", [b"", b"no", b'{"detail": "Not Found"}', b"[]"])
def test_an_engine_that_fails_without_an_error_object_is_an_error_all_the_same(body: bytes) -> None:
    job = decoded(record(Status.FAILED), Outcome(Status.FAILED, 404, body))
    assert job.error is not None
    assert job.error.type == "server_error"


def test_an_expired_result_leaves_the_status() -> None:
    job = decoded(record(Status.COMPLETED, finished_at_ms=9))
    assert (job.status, job.result, job.error) == ("completed", None, None)
