"""The command `headway`. A sub-command is imported when it is called, so a light client needs no engine and no API."""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

#: What the help says of our own commands, so that it need not import them; any other one speaks for itself.
SUMMARIES = {
    "api": "Run the HTTP API.",
    "demo": "Start everything here, ask a real model, and show what a micro-batch gains.",
    "job": "Show, await or cancel a job.",
    "model": "Prepare models for the embedded default.",
    "submit": "Send a prompt and print the answer.",
    "up": "Start Valkey, the API and one worker here.",
    "worker": "Run a worker.",
}

#: Which extra of the distribution a command needs, for the message when it is not there.
_EXTRAS = {"api": "api", "demo": "embedded", "model": "embedded", "up": "embedded", "worker": "worker"}


class WrongSetting(click.ClickException):
    """A wrong setting is a wrong way to call the program, as a wrong option is, so it has the same exit code."""

    exit_code = 2


class Commands(click.Group):
    """The sub-commands that installed distributions announce in the entry-point group `headway.commands`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_announced())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = _announced().get(cmd_name)
        if found is None:
            return None
        try:
            command = found.load()
        except ImportError as error:
            raise click.ClickException(_missing(cmd_name, error)) from error
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, SUMMARIES.get(name) or self._summary(ctx, name)) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if (failure := one_line(error)) is None:
                raise
            raise failure from error

    def _summary(self, ctx: click.Context, name: str) -> str:
        command = self.get_command(ctx, name)
        return command.get_short_help_str() if command else ""


def one_line(error: Exception) -> click.ClickException | None:
    """An error of ours or of the settings as click shows it; None for any other, which keeps its traceback."""
    from pydantic import ValidationError

    from headway.shared.errors import ConfigurationError, HeadwayError, QueueUnavailable
    from headway.shared.settings import Settings, explain

    if isinstance(error, ConfigurationError) or (
        isinstance(error, ValidationError) and error.title == Settings.__name__
    ):
        return WrongSetting(explain(error))
    if isinstance(error, QueueUnavailable):
        hint = "is `headway up` running in this folder, or HEADWAY_REDIS_URL set?"
        return click.ClickException(f"{' '.join(error.message.split())} ({hint})")
    if isinstance(error, HeadwayError):
        return click.ClickException(" ".join(error.message.split()))
    return None


def _announced() -> dict[str, EntryPoint]:
    return {each.name: each for each in entry_points(group="headway.commands")}


def _missing(command: str, error: ImportError) -> str:
    extra = _EXTRAS.get(command)
    advice = f": pip install 'headway[{extra}]'" if extra else ""
    return f"`headway {command}` needs a package that is not installed ({error}){advice}"


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="headway", message="%(prog)s %(version)s")
def main() -> None:
    """A durable, length-aware inference queue for vLLM.

    Settings are read from the environment, as HEADWAY_REDIS_URL and the like.
    """


if __name__ == "__main__":
    main()
