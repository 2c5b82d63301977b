"""`headway submit` and `headway job` against a running stack."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result

from headway.producer.cli import main
from headway.producer.commands import job, submit
from headway.producer.local import environment, leave, local_settings
from headway.shared.errors import ConfigurationError
from headway.shared.settings import Settings
from programs import MODEL, Stack


@pytest.fixture
def here(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that names the running stack."""
    for name, value in stack.settings.items():
        monkeypatch.setenv(f"HEADWAY_{name}", value)


def run(command: object, *args: str, stdin: str = "") -> Result:
    return CliRunner().invoke(command, args, input=stdin, catch_exceptions=False)  # type: ignore[arg-type]


def headway(*args: str) -> Result:
    return CliRunner().invoke(main, args)


@pytest.mark.usefixtures("here")
def test_a_prompt_is_answered() -> None:
    # If I submit a prompt, plainly and as a stream
    plain = run(submit, "Hello", "--max-tokens", "7", "--json")
    streamed = run(submit, "Hello", "--max-tokens", "7", "--stream")
    # I expect the whole answer as JSON, and the text alone, with one line end, on stdout
    answer = json.loads(plain.stdout)
    assert answer["usage"]["completion_tokens"] == 7
    assert (streamed.stdout.endswith("\n"), streamed.stdout.endswith("\n\n")) == (True, False)
    assert streamed.stderr == ""
    assert streamed.stdout.strip() != ""


@pytest.mark.usefixtures("here")
def test_a_prompt_is_read_from_stdin_and_a_system_message_goes_in_front() -> None:
    # If I pipe a prompt of 2000 characters, I expect it to be counted, and the system message with it
    short = run(submit, "-", "--max-tokens", "1", "--no-wait", "--json", stdin="x" * 2000)
    longer = run(submit, "-", "--max-tokens", "1", "--no-wait", "--json", "--system", "y" * 400, stdin="x" * 2000)
    counts = [json.loads(done.stdout)["prompt_tokens"] for done in (short, longer)]
    assert counts[0] >= 500
    assert counts[1] >= counts[0] + 100


@pytest.mark.usefixtures("here")
def test_a_job_is_looked_up() -> None:
    # Given a job that I did not wait for
    job_id = run(submit, "Hello", "--max-tokens", "3", "--no-wait", "--tier", "flex").stdout.strip()
    # If I wait for it later, I expect its answer, as text and as JSON, and as the chunks that it came in
    text = run(job, job_id, "--wait", "20").stdout
    assert json.loads(run(job, job_id, "--wait", "20", "--json").stdout)["model"] == MODEL
    assert run(job, job_id, "--stream").stdout == text
    chunks = [json.loads(line) for line in run(job, job_id, "--stream", "--json").stdout.splitlines()]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    # and its record, for people and for programs
    shown = run(job, job_id).stdout
    for part in (job_id, "completed", "short (flex)", "3 tokens"):
        assert part in shown
    assert "\x1b" not in shown
    # and that to wait for nothing gives what is there, while a time that is none is refused
    assert run(job, job_id, "--wait", "0").stdout == text
    assert headway("job", job_id, "--wait", "nan").output == "Error: timeout must be a number of seconds\n"
    assert json.loads(run(job, job_id, "--json").stdout)["status"] == "completed"


@pytest.mark.usefixtures("here")
def test_a_job_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a job that no worker takes, since nobody serves its model
    monkeypatch.setenv("HEADWAY_SERVED_MODEL", "another")
    job_id = run(submit, "Hello", "--no-wait").stdout.strip()
    # If I wait for a moment, I expect to be told that it has not ended
    waited = run(job, job_id, "--wait", "0.05")
    assert (waited.exit_code, "has not ended yet (it is queued)" in waited.stderr) == (1, True)
    # and if I cancel it, to see that
    assert "cancelled" in run(job, job_id, "--cancel").stdout


def test_a_command_finds_the_stack_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given the settings that a running `headway up` has left in its data folder
    monkeypatch.setenv("HEADWAY_DATA_DIR", str(tmp_path))
    running = Settings(
        redis_url="unix:///run/it%27s.sock",
        lane_shares=(0.6, 0.2, 0.1),
        batch_max_jobs=None,
        tokenizer="it's ${HOME} \\'",
    )
    (tmp_path / "up.json").write_text("left by one that was killed")
    file = leave(running)
    # If a command looks for settings, I expect those
    assert local_settings().model_dump(exclude={"data_dir"}) == running.model_dump(exclude={"data_dir"})
    # in a file that nobody else can read, which is said to whoever tries
    assert file.stat().st_mode & 0o777 == 0o600
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", Mock(side_effect=PermissionError(13, "Permission denied")))
        with pytest.raises(ConfigurationError, match=r"up\.json cannot be read \(Permission denied\)"):
            local_settings()
    # but not where the environment names a queue
    monkeypatch.setenv("HEADWAY_REDIS_URL", "redis://elsewhere")
    assert local_settings().redis_url == "redis://elsewhere"


def test_settings_survive_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given settings of every kind
    settings = Settings(lane_shares=(0.6, 0.2, 0.1), max_model_len=None, engine_args="--a 'b c'", data_dir=Path("/d e"))
    # If I hand them on as environment variables, I expect the same settings on the other side
    for name, value in environment(settings).items():
        monkeypatch.setenv(name, value)
    assert Settings() == settings
