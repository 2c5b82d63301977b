"""One child process of `headway up`, and everything that it starts in its turn."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

#: Runs in the child before it becomes its program: on Linux the kernel then sends it SIGTERM when the supervisor dies,
#: be it by SIGKILL. A supervisor that has died already is noticed by the changed parent.
_LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the supervisor is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""

_TAIL_LINES = 20


class Child:
    """A program in a session and process group of its own, whose output goes to a log file.

    Ctrl-C in the terminal does not reach it: it is told to stop by its owner, in the order that its owner wants. The
    group is killed whenever the program ends, since a vLLM whose parent was killed lives on with all its memory.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        keep_open: Sequence[int] = (),
    ) -> None:
        """
        Args:
            command: the program's absolute path, then its arguments.
            environment: the whole environment; this process's own when None.
            keep_open: file descriptors that it inherits.
        """
        self.name = name
        self.log = log
        self._command = command
        self._environment = environment
        self._keep_open = keep_open
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process id, which is its group's too; None before the first start."""
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts the program, again if it has ended."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *self._command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                pass_fds=self._keep_open,
            )

    async def ended(self) -> int:
        """Waits for the end of the program, takes the rest of its group along, and gives the exit status."""
        assert self._process is not None
        status = await self._process.wait()
        self.kill()
        return status

    async def stop(self, deadline_s: float) -> None:
        """Asks the program to end, and kills its group when the deadline has passed."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), deadline_s)
        self.kill()
        await self._process.wait()

    def kill(self) -> None:
        """Kills the program and its group at once."""
        if self.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
