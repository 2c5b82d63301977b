"""A job as JSON for `/v1/jobs`. Pure."""

from typing import Any

import msgspec

from headway.shared.job import Outcome, Record, Status


class _Failure(msgspec.Struct):
    error: msgspec.Raw


def links(job_id: str) -> dict[str, str]:
    """Where a job can be read, followed and cancelled."""
    here = f"/v1/jobs/{job_id}"
    return {"self": here, "events": f"{here}/events", "cancel": f"{here}/cancel"}


def job_object(record: Record, outcome: Outcome | None) -> bytes:
    """The job's JSON; result and error are the bytes that the engine wrote.

    Args:
        outcome: how it ended; None while it has not, or when the result has expired.
    """
    ended = None if outcome is None else msgspec.Raw(outcome.body)
    completed = record.status is Status.COMPLETED
    timeline = ("queued_at_ms", "started_at_ms", "first_token_at_ms", "finished_at_ms")
    fields: dict[str, Any] = {
        "id": record.id,
        "object": "job",
        "status": record.status,
        "model": record.model,
        "endpoint": record.endpoint,
        "lane": record.lane,
        "tier": record.tier,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "attempt": record.attempt,
        "cancel_requested": record.cancel_requested,
        "created_at": record.queued_at_ms // 1000,
        "timeline": {name: getattr(record, name) for name in timeline},
        "batch": _batch(record),
        "result": ended if completed else None,
        "error": None if outcome is None or completed else _error(outcome.body),
        "links": links(record.id),
    }
    return msgspec.json.encode(fields)


def _error(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body, type=_Failure).error
    except msgspec.MsgspecError:
        return {"message": "The engine refused the job.", "type": "server_error", "param": None, "code": None}


def _batch(record: Record) -> dict[str, Any] | None:
    if record.batch is None:
        return None
    return {"name": record.batch, "size": record.batch_size, "closed_by": record.batch_closed_by}
