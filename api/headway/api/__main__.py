"""The command `headway api`."""

import logging
import sys

import click
import uvicorn
from pydantic import ValidationError

from headway.api.app import create_app
from headway.shared.connect import connect
from headway.shared.errors import ConfigurationError
from headway.shared.settings import Settings, explain

#: Seconds that an idle connection is kept: longer than clients and proxies keep theirs, so that no request meets a
#: connection that is being closed.
KEEP_ALIVE_S = 75

#: The exit status for a setting that is wrong: to start again cannot help.
MISCONFIGURED = 2


class _NoQueries(logging.Filter):
    """Drops uvicorn's lines about WebSockets, which have the query in them, and with it what a caller keeps secret."""

    def filter(self, record: logging.LogRecord) -> bool:
        return '"WebSocket ' not in str(record.msg)


@click.command("api")
@click.option("--host", help="Address to listen on; HEADWAY_API_HOST when left out.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; HEADWAY_API_PORT when left out.")
def main(host: str | None, port: int | None) -> None:
    """Run the HTTP API. Ctrl-C or SIGTERM ends it; jobs live on."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").addFilter(_NoQueries())
    try:
        settings = Settings()
        connect(settings.redis_url)
        app = create_app(settings)
    except (ConfigurationError, ValidationError) as error:
        click.echo(f"headway api: {explain(error)}", err=True)
        sys.exit(MISCONFIGURED)
    uvicorn.run(
        app,
        host=host or settings.api_host,
        port=settings.api_port if port is None else port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        # A longer WebSocket message closes its connection (1009) before it fills the memory.
        ws_max_size=settings.max_body_bytes,
        # What still streams then is cut; its job runs on, and a reader of events resumes at another process.
        timeout_graceful_shutdown=max(1, round(settings.api_grace_s)),
    )


if __name__ == "__main__":
    main()
