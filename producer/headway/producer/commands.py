"""`headway submit` and `headway job`. Answers go to stdout, all that is said about them to stderr."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click

from headway.producer.blocking import Client, JobHandle
from headway.producer.client import text_of
from headway.producer.local import local_settings
from headway.shared.errors import HeadwayError
from headway.shared.job import TIERS, Record, Status, Tier

_COLOURS = {Status.COMPLETED: "green", Status.FAILED: "red", Status.CANCELLED: "yellow", Status.EXPIRED: "yellow"}

_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON: the answer; with --stream, each chunk.")


@click.command()
@click.argument("prompt")
@click.option("--stream", is_flag=True, help="Print the answer as it comes.")
@click.option("--system", help="A system message in front of the prompt.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer, in tokens.")
@click.option("--tier", type=click.Choice(TIERS), default="default", show_default=True, help="Service tier.")
@click.option("--no-wait", is_flag=True, help="Print the job id and leave.")
@_AS_JSON
def submit(
    prompt: str, stream: bool, system: str | None, max_tokens: int | None, tier: Tier, no_wait: bool, as_json: bool
) -> None:
    """Send a prompt and print the answer; `-` reads the prompt from stdin."""
    text = sys.stdin.read() if prompt == "-" else prompt
    messages = [{"role": "system", "content": system}] if system else []
    limit: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
    with Client.connect(settings=local_settings()) as client:
        job = client.submit(messages=[*messages, {"role": "user", "content": text}], tier=tier, **limit)
        if no_wait:
            click.echo(_json(job.status()) if as_json else job.id)
            return
        with _leaving(job):
            if stream:
                _print_stream(job, as_json)
            else:
                _print_result(job, None, as_json)
        _note(job)


@click.command()
@click.argument("job_id", metavar="ID")
@click.option("--wait", type=click.FloatRange(0), metavar="SECONDS", help="Wait so long, and print the answer.")
@click.option("--stream", is_flag=True, help="Print the answer from its start, as it comes.")
@click.option("--cancel", is_flag=True, help="Cancel the job.")
@_AS_JSON
def job(job_id: str, wait: float | None, stream: bool, cancel: bool, as_json: bool) -> None:
    """Show, await or cancel a job."""
    with Client.connect(settings=local_settings()) as client:
        handle = client.job(job_id)
        if cancel:
            handle.cancel()
        with _leaving(handle):
            if stream:
                _print_stream(handle, as_json)
            elif wait is not None:
                _print_result(handle, wait, as_json)
            else:
                record = handle.status()
                click.echo(_json(record) if as_json else _table(record, _failure(handle, record)))


@contextmanager
def _leaving(job: JobHandle) -> Iterator[None]:
    """Ctrl-C leaves the job alone, and says how to come back to it."""
    try:
        yield
    except KeyboardInterrupt:
        _aside(f"\n{job.id} goes on; see: headway job {job.id}")
        sys.exit(130)


def _print_stream(job: JobHandle, as_json: bool) -> None:
    text = ""
    for chunk in job.stream():
        if as_json:
            click.echo(json.dumps(chunk))
        elif chunk.get("object") == "job.restarted":
            _aside("\n[the job had to begin again]")
        else:
            text += (piece := text_of(chunk))
            click.echo(piece, nl=False)
    if not as_json and not text.endswith("\n"):
        click.echo()


def _print_result(job: JobHandle, timeout: float | None, as_json: bool) -> None:
    try:
        answer = job.result(timeout)
    except TimeoutError as error:
        raise click.ClickException(f"{job.id} has not ended yet (it is {job.status().status})") from error
    click.echo(json.dumps(answer) if as_json else text_of(answer))


def _note(job: JobHandle) -> None:
    """One line about the job, for who watches."""
    if not sys.stderr.isatty():
        return
    record = job.status()
    took = _seconds(record.queued_at_ms, record.finished_at_ms)
    waited = _seconds(record.queued_at_ms, record.started_at_ms)
    _aside(f"{record.id} · lane {record.lane} · waited {waited} · {record.output_tokens} tokens in {took}")


def _failure(job: JobHandle, record: Record) -> str | None:
    """Why the job did not complete; None when it did, or may still."""
    try:
        if record.status.terminal and record.status is not Status.COMPLETED:
            job.result(0)
    except HeadwayError as error:
        return error.message
    return None


def _table(record: Record, failure: str | None) -> str:
    rows = {
        "job": record.id,
        "status": click.style(record.status, fg=_COLOURS.get(record.status, "cyan"), bold=True),
        "model": record.model,
        "lane": f"{record.lane} ({record.tier}), {record.prompt_tokens} prompt tokens",
        "attempt": record.attempt and f"{record.attempt}" + (f" on {record.worker}" if record.worker else ""),
        "error": failure,
        "batch": record.batch and f"{record.batch}, jobs: {record.batch_size}, closed: {record.batch_closed_by}",
        "waited": _seconds(record.queued_at_ms, record.started_at_ms),
        "first token": _seconds(record.started_at_ms, record.first_token_at_ms),
        "took": _seconds(record.queued_at_ms, record.finished_at_ms),
        "output": record.output_tokens is not None and f"{record.output_tokens} tokens",
    }
    return "\n".join(f"{name:<12} {value}" for name, value in rows.items() if value)


def _seconds(start_ms: int | None, end_ms: int | None) -> str:
    return "" if start_ms is None or end_ms is None else f"{(end_ms - start_ms) / 1000:.2f} s"


def _json(record: Record) -> str:
    return json.dumps(asdict(record))


def _aside(text: str) -> None:
    click.secho(text, err=True, dim=True)
