"""How a record's hash becomes values. Pure."""

from collections.abc import Sequence
from typing import cast

from headway.shared.job import Delivery, Job, Record, Status, Ticket, Tier


def decode_record(job_id: str, flat: Sequence[bytes]) -> Record:
    """The record of a job from its hash, names and values in turn."""
    text = {name.decode(): value.decode() for name, value in zip(flat[::2], flat[1::2], strict=True)}

    def number(name: str) -> int | None:
        return int(float(text[name])) if text.get(name) else None

    return Record(
        id=job_id,
        status=Status(text["status"]),
        model=text["model"],
        endpoint=text["endpoint"],
        lane=text["lane"],
        tier=text["tier"],
        prompt_tokens=number("prompt_tokens") or 0,
        attempt=number("attempt") or 0,
        failures=number("failures") or 0,
        offset=number("offset") or 0,
        log=text["log"] == "1",
        cancel_requested=text.get("cancel") == "1",
        returned_for=text.get("returned_for"),
        status_code=number("status_code"),
        worker=text.get("worker") or None,
        batch=text.get("batch"),
        batch_size=number("batch_size"),
        batch_closed_by=text.get("batch_closed_by"),
        batch_window_ms=number("batch_window_ms"),
        output_tokens=number("output_tokens"),
        queued_at_ms=number("queued_at_ms") or 0,
        started_at_ms=number("started_at_ms"),
        first_token_at_ms=number("first_token_at_ms"),
        finished_at_ms=number("finished_at_ms"),
    )


def decode_delivery(ticket: Ticket, flat: Sequence[bytes], body: bytes) -> Delivery:
    """The delivery that `open` answers with."""
    record = decode_record(ticket.job_id, flat)
    job = _decode_job(ticket, record, body)
    opened_ms = record.started_at_ms or 0
    return Delivery(
        job,
        ticket,
        record.attempt,
        record.failures,
        record.offset,
        record.cancel_requested,
        # An entry's id begins with the instant at which it was added.
        lane_wait_s=(opened_ms - int(ticket.entry.partition("-")[0])) / 1000,
        age_s=(opened_ms - record.queued_at_ms) / 1000,
    )


def _decode_job(ticket: Ticket, record: Record, body: bytes) -> Job:
    return Job(
        id=record.id,
        model=record.model,
        endpoint=record.endpoint,
        body=body,
        lane=record.lane,
        prompt_tokens=ticket.prompt_tokens,
        reserve_tokens=ticket.reserve_tokens,
        choices=ticket.choices,
        tier=cast("Tier", record.tier),
        log=record.log,
    )
