"""The command `headway api`: what it refuses to start with."""

import pytest
from click.testing import CliRunner, Result

from headway.api.__main__ import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, **settings: str) -> Result:
    for name, value in settings.items():
        monkeypatch.setenv(f"HEADWAY_{name}", value)
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"SHORT_BELOW": "500", "MID_TO": "600", "MAX_MODEL_LEN": "400"}, "lower HEADWAY_SHORT_BELOW"),
        ({"SHORT_BELOW": "500", "MID_TO": "400"}, "lane bounds must rise"),
        ({"REDIS_URL": "http://example.com"}, "HEADWAY_REDIS_URL is not a URL of Redis"),
        ({"DRAIN_S": "inf"}, "HEADWAY_DRAIN_S='inf': Input should be a finite number"),
        ({"LANE_SHARES": "1,2"}, "HEADWAY_LANE_SHARES='1,2': Value error, three numbers are needed"),
        ({"API_PORT": "70000", "HEARTBEAT_S": "0"}, "HEADWAY_API_PORT"),
        ({"TOKENIZER": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_a_wrong_setting_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], message: str
) -> None:
    # If I start it with a setting that cannot work
    result = run(monkeypatch, ENGINE="simulated", **settings)
    # I expect one line that names the setting, and the exit status for what a restart cannot mend
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("headway api: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("url", ["redis://:p/w@host", "redis://me:pw@host:port", "http://me:pw@host"])
def test_a_password_is_not_quoted(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    # If I start it with a URL that is none of Redis, I expect the reason without what may be a password
    result = run(monkeypatch, ENGINE="simulated", REDIS_URL=url)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "percent-encoded" in result.stderr
    assert "host" not in result.stderr


def test_a_port_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "--port", "70000").exit_code == 2
