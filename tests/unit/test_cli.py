"""The command line: help, version, errors; and that asking for help imports nothing heavy."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from pydantic import ValidationError

from headway.producer import cli
from headway.shared.errors import ConfigurationError, JobNotFound, QueueUnavailable
from headway.shared.settings import Settings
from valkey_server import free_port

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
COMMANDS = PROJECT["entry-points"]["headway.commands"]


@pytest.fixture(autouse=True)
def announced(monkeypatch: pytest.MonkeyPatch) -> dict[str, EntryPoint]:
    """The commands that this distribution announces, whether or not it is installed."""
    found = {name: EntryPoint(name, value, "headway.commands") for name, value in COMMANDS.items()}
    monkeypatch.setattr(cli, "_announced", lambda: found)
    return found


def headway(*args: str, stdin: str = "") -> Result:
    return CliRunner().invoke(cli.main, args, prog_name="headway", input=stdin)


def test_help_lists_every_command() -> None:
    # If I ask for help, I expect each announced command with one line about it
    text = headway("--help").output
    assert set(cli.SUMMARIES) == set(COMMANDS)
    for name, summary in cli.SUMMARIES.items():
        assert f"\n  {name} " in text
        assert summary.split()[0] in text


def test_a_command_of_another_distribution_speaks_for_itself(announced: dict[str, EntryPoint]) -> None:
    # Given a command that this distribution does not know
    announced["other"] = EntryPoint("other", "headway.producer.commands:submit", "headway.commands")
    # If I ask for help, I expect its own words
    assert "\n  other   Send a prompt and print the answer" in headway("--help").output


def test_help_imports_nothing_heavy() -> None:
    # If a fresh interpreter prints the help
    code = (
        "import sys\nfrom headway.producer.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_paths())
    # I expect no client of Redis, no web framework and no engine among its modules
    modules = done.stdout.splitlines()[-1]
    assert "'click'" in modules
    for heavy in ("anyio", "fastapi", "httpx", "pydantic", "redis", "rich", "torch", "vllm"):
        assert f"'{heavy}'" not in modules


def test_the_light_client_imports_no_server() -> None:
    # If a fresh interpreter imports the client and its commands
    code = (
        "import sys\nimport headway.producer.commands\nfrom headway.producer import AsyncClient, Client\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_paths())
    # I expect it to need no extra
    for heavy in ("fastapi", "httpx", "rich", "torch", "transformers", "uvicorn", "vllm"):
        assert f"'{heavy}'" not in done.stdout


def test_version(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an installed distribution
    monkeypatch.setattr("importlib.metadata.version", lambda _: PROJECT["version"])
    # If I ask for the version, I expect the project's
    assert headway("--version").output == f"headway {PROJECT['version']}\n"


def test_a_command_that_there_is_not() -> None:
    # If I mistype a command, I expect the exit code of wrong usage
    done = headway("sumbit")
    assert (done.exit_code, "No such command" in done.output) == (2, True)


def test_a_missing_package_names_the_extra(announced: dict[str, EntryPoint]) -> None:
    # Given a light client without the API's packages
    announced["api"] = EntryPoint("api", "headway.no_such_module:main", "headway.commands")
    # If I start the API, I expect to be told what to install
    done = headway("api")
    assert done.exit_code == 1
    assert "pip install 'headway[api]'" in done.output


def test_a_redis_that_is_down_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an address where nobody listens
    monkeypatch.setenv("HEADWAY_REDIS_URL", f"redis://127.0.0.1:{free_port()}/0")
    # If I submit a prompt, I expect one line and exit code 1
    done = headway("submit", "Hello")
    assert done.exit_code == 1
    assert done.output.startswith("Error: Redis: ")
    assert done.output.count("\n") == 1


@pytest.mark.parametrize("command", [("submit", "Hello"), ("up",), ("api",), ("worker",)])
def test_a_wrong_setting_is_one_line(monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    # Given a port that is no number
    monkeypatch.setenv("HEADWAY_API_PORT", "eighty")
    # If I run any command, I expect the setting to be named, and the exit code of wrong usage
    done = headway(*command)
    assert done.exit_code == 2
    assert ": HEADWAY_API_PORT='eighty': Input should be a valid integer" in done.output
    assert done.output.count("\n") == 1


def _wrong_setting() -> Exception:
    with pytest.raises(ValidationError) as caught:
        Settings(api_port=-1)
    return caught.value


@pytest.mark.parametrize(
    ("make", "exit_code"),
    [
        (lambda: JobNotFound("no job\njob-0-1"), 1),
        (lambda: QueueUnavailable("Redis: down"), 1),
        (lambda: ConfigurationError("bounds"), 2),
        (_wrong_setting, 2),
    ],
)
def test_our_errors_are_one_line(make: Callable[[], Exception], exit_code: int) -> None:
    # If a command raises an error of ours, I expect one line and its exit code
    failure = cli.one_line(make())
    assert isinstance(failure, click.ClickException)
    assert (failure.exit_code, "\n" in failure.message) == (exit_code, False)


def test_other_errors_keep_their_traceback() -> None:
    # If a command fails by a fault of ours, I expect it not to be hidden
    assert cli.one_line(KeyError("x")) is None


def _paths() -> dict[str, Any]:
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": ":".join(str(root / unit) for unit in ("api", "producer", "shared", "worker"))}
