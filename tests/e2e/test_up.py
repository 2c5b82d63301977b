"""`headway up` and `headway demo` as processes: what they start and survive, and that they leave nothing behind."""

import asyncio
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from headway.producer import AsyncClient
from headway.producer.child import Child
from headway.producer.local import local_settings
from headway.shared.settings import Settings
from helpers import eventually
from programs import ROOT
from valkey_server import free_port

#: Seconds for what takes several starts of Python on a busy machine.
START_S = 60

MESSAGES = [{"role": "user", "content": "Hello"}]


class Headway:
    """`headway <args>` as a process, with a data folder of its own; its output is read line by line."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.output = ""
        self.seen: list[psutil.Process] = []

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path, *args: str, **settings: str) -> AsyncIterator["Headway"]:
        """Whatever the test leaves is killed at the end."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
        named = {f"HEADWAY_{name}": value for name, value in settings.items()}
        paths = os.pathsep.join(str(ROOT / unit) for unit in ("api", "producer", "shared", "worker"))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headway.producer", *args),
            cwd=folder,
            env={**outside, "PYTHONPATH": paths, "HEADWAY_API_PORT": "0", "HEADWAY_HEALTH_PORT": "0", **named},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        headway = cls(process, folder)
        try:
            yield headway
        finally:
            headway.look()
            for child in (process, *headway.seen):
                if child is not process or process.returncode is None:
                    _kill(child.pid)
            await headway.end()

    async def line(self, text: str) -> str:
        """Reads up to the first line that contains the text; AssertionError with all output when there is none."""
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            while line := (await self.process.stdout.readline()).decode():
                self.output += line
                if text in line:
                    self.look()
                    return line
        raise AssertionError(self.output)

    async def end(self, number: int | None = None) -> int:
        """Sends a signal, if one is given, and waits for the end; gives the exit status."""
        if number is not None:
            self.process.send_signal(number)
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            self.output += (await self.process.stdout.read()).decode()
            return await self.process.wait()

    def hang_up(self) -> None:
        """Reads no more, so that whatever it says is a broken pipe to it."""
        self.process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]

    def look(self) -> list[psutil.Process]:
        """The processes below it now; they are remembered."""
        if self.process.returncode is None:
            self.seen += psutil.Process(self.process.pid).children(recursive=True)
        return self.seen

    def children(self, name: str) -> list[psutil.Process]:
        """Those of its processes that live and whose command line has the name, the newest last."""
        return [child for child in self.look() if _lives(child) and name in " ".join(child.cmdline())]

    def child(self, name: str) -> psutil.Process:
        return self.children(name)[-1]

    async def nothing_is_left(self) -> None:
        """Returns when none of the processes lives that were ever seen below it, or that work in its folder."""
        async with asyncio.timeout(START_S):
            await eventually(lambda: not any(_lives(child) for child in (*self.seen, *_working_in(self.folder))))


@pytest.fixture
def settings_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a stack, which this process too finds there."""
    monkeypatch.setenv("HEADWAY_DATA_DIR", str(tmp_path / ".headway"))
    return tmp_path


async def test_it_answers_is_alone_and_leaves_nothing(settings_here: Path) -> None:
    # Given `headway up`
    async with Headway.running(settings_here, "up", "--engine", "simulated") as up:
        await up.line("Ready")
        assert "SIMULATED" in up.output
        settings = local_settings()
        # If I ask its API, I expect an answer
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.api_port}") as http:
            answer = await http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 5})
        assert answer.json()["usage"]["completion_tokens"] == 5
        # If I start a second one in the same folder, I expect it to be refused
        async with Headway.running(settings_here, "up", "--engine", "simulated") as second:
            assert await second.end() == 1
            assert f"already runs with the data folder {settings_here}" in second.output
            assert f"(process {up.process.pid})" in second.output
        # If I press Ctrl-C, I expect the end of all processes, and no file that names a stack
        assert await up.end(signal.SIGINT) == 0
        await up.nothing_is_left()
        assert local_settings().redis_url == Settings().redis_url


async def test_queued_jobs_outlive_the_server(settings_here: Path) -> None:
    # Given a queue without a worker, and a job in it
    async with Headway.running(settings_here, "up", "--engine", "simulated", "--no-worker") as up:
        await up.line("Ready")
        async with AsyncClient.connect(settings=local_settings()) as client:
            job_id = (await client.submit(messages=MESSAGES, max_tokens=4)).id
        assert await up.end(signal.SIGTERM) == 0
        await up.nothing_is_left()
    # If everything is started again, with a worker
    async with Headway.running(settings_here, "up", "--engine", "simulated") as up:
        await up.line("Ready")
        # I expect the job to be answered
        async with AsyncClient.connect(settings=local_settings()) as client:
            assert (await client.job(job_id).result(START_S))["usage"]["completion_tokens"] == 4
        assert await up.end(signal.SIGTERM) == 0


async def test_a_worker_that_is_killed_is_started_again(settings_here: Path) -> None:
    async with Headway.running(settings_here, "up", "--engine", "simulated") as up:
        await up.line("Ready")
        # If the worker is killed
        first = up.child("headway.worker")
        first.kill()
        await up.line("worker ended with status -9; it is started again in 1 s")
        # I expect another one, which answers
        async with AsyncClient.connect(settings=local_settings()) as client:
            job = await client.submit(messages=MESSAGES, max_tokens=4)
            assert (await job.result(START_S))["usage"]["completion_tokens"] == 4
        assert up.child("headway.worker").pid != first.pid
        assert await up.end(signal.SIGINT) == 0
        await up.nothing_is_left()


async def test_its_children_do_not_outlive_a_supervisor_that_is_killed(settings_here: Path) -> None:
    async with Headway.running(settings_here, "up", "--engine", "simulated") as up:
        await up.line("Ready")
        assert all(up.child(name) for name in ("valkey", "headway.api", "headway.worker"))
        # If the supervisor is killed, I expect its children to end by themselves
        assert await up.end(signal.SIGKILL) == -signal.SIGKILL
        await up.nothing_is_left()
    # and the folder to be free again
    async with Headway.running(settings_here, "up", "--engine", "simulated", "--no-worker") as up:
        await up.line("Ready")
        assert await up.end(signal.SIGINT) == 0


async def test_it_stops_though_nobody_reads_what_it_says(settings_here: Path) -> None:
    # Given one whose reader has gone, as in `headway up | head`
    async with Headway.running(settings_here, "up", "--engine", "simulated") as up:
        await up.line("Ready")
        up.hang_up()
        # If it has something to say, I expect it to run on
        up.child("headway.worker").kill()
        await eventually(lambda: not up.children("headway.worker"))
        await eventually(lambda: up.children("headway.worker"))
        # If I press Ctrl-C, I expect it to stop in order
        assert await up.end(signal.SIGINT) == 0
        await up.nothing_is_left()


async def test_a_closed_terminal_stops_it_in_order(settings_here: Path) -> None:
    # Given a job that runs
    slow = {"SIMULATED_STEP_MS": "1000", "DRAIN_S": "0"}
    async with Headway.running(settings_here, "up", "--engine", "simulated", **slow) as up:
        await up.line("Ready")
        async with AsyncClient.connect(settings=local_settings()) as client:
            job = await client.submit(messages=MESSAGES, max_tokens=60)
            await anext(job.stream())
        # If the terminal closes, which may be told twice
        up.process.send_signal(signal.SIGHUP)
        await up.line("Stopping")
        assert await up.end(signal.SIGHUP) == 0
        await up.nothing_is_left()
    # I expect the job not to be lost
    async with Headway.running(settings_here, "up", "--engine", "simulated") as up:
        await up.line("Ready")
        async with AsyncClient.connect(settings=local_settings()) as client:
            assert (await client.job(job.id).result(START_S))["usage"]["completion_tokens"] == 60
        assert await up.end(signal.SIGTERM) == 0


async def test_it_stops_in_order_though_a_client_streams(settings_here: Path) -> None:
    # Given a client that follows a job that nobody runs
    async with Headway.running(settings_here, "up", "--engine", "simulated", "--no-worker") as up:
        await up.line("Ready")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{local_settings().api_port}") as http:
            body = {"endpoint": "/v1/chat/completions", "body": {"messages": MESSAGES}}
            links = (await http.post("/v1/jobs", json=body)).json()["links"]
            async with http.stream("GET", links["events"]) as events:
                assert events.status_code == 200
                # If I press Ctrl-C, I expect the API to end by itself
                assert await up.end(signal.SIGINT) == 0
        assert "Finished server process" in (settings_here / ".headway/logs/api.log").read_text()


async def test_a_child_that_cannot_start_shows_its_log(settings_here: Path) -> None:
    # Given a worker whose longest prompt would not fit its memory
    wrong = {"SIMULATED_KV_TOKENS": "1000", "MAX_MODEL_LEN": "2000"}
    async with Headway.running(settings_here, "up", "--engine", "simulated", **wrong) as up:
        # If I start it, I expect the reason and the end of everything
        await up.line("worker ended with status")
        assert await up.end() == 1
        assert "max_model_len 2000 exceeds" in up.output
        await up.nothing_is_left()


async def test_a_port_that_is_taken_is_named(settings_here: Path) -> None:
    # Given a port that somebody listens on
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", port := free_port())
    async with server, Headway.running(settings_here, "up", "--engine", "simulated", API_PORT=str(port)) as up:
        # If I start the API there, I expect the setting to be named, and the exit code of wrong usage
        assert await up.end() == 2
        assert f"HEADWAY_API_PORT={port}" in up.output


async def test_two_servers_cannot_have_one_port(settings_here: Path) -> None:
    # If I give the API and the worker's health the same port, I expect the second setting to be refused
    port = str(free_port())
    async with Headway.running(settings_here, "up", "--engine", "simulated", API_PORT=port, HEALTH_PORT=port) as up:
        assert await up.end() == 2
        assert f"HEADWAY_HEALTH_PORT={port}" in up.output


def _speaks_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        return probe.connect_ex(("::1", 9)) != errno.EADDRNOTAVAIL


@pytest.mark.skipif(not _speaks_ipv6(), reason="this machine has no IPv6")
async def test_it_listens_on_ipv6(settings_here: Path) -> None:
    # If I start it on addresses of IPv6, the wildcard among them, I expect it to find its own servers
    hosts = {"API_HOST": "::", "HEALTH_HOST": "::1"}
    async with Headway.running(settings_here, "up", "--engine", "simulated", **hosts) as up:
        await up.line("http://[::1]:")
        await up.line("Ready")
        assert await up.end(signal.SIGINT) == 0


@pytest.mark.parametrize("name", ["d" * 100, "it's \\' $HOME"])
async def test_a_data_folder_may_have_any_path(settings_here: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a data folder whose path is too long for a socket, or hard to quote
    folder = settings_here / name
    monkeypatch.setenv("HEADWAY_DATA_DIR", str(folder))
    async with Headway.running(settings_here, "up", "--engine", "simulated", "--no-worker", DATA_DIR=str(folder)) as up:
        # If I start there, I expect it to work, the data to be there, and other commands to find it
        await up.line("Ready")
        assert (folder / "appendonlydir").is_dir()
        async with AsyncClient.connect(settings=local_settings()) as client:
            assert (await client.submit(messages=MESSAGES)).id
        assert await up.end(signal.SIGINT) == 0


async def test_the_demo_shows_what_batching_gains(settings_here: Path) -> None:
    # If I run the demonstration
    quick = {"SIMULATED_STEP_MS": "4"}
    async with Headway.running(settings_here, "demo", "--engine", "simulated", **quick) as demo:
        await demo.line("one by one")
        assert await demo.end() == 0
        # I expect all lanes in its table, a gain, and nothing left, in the folder neither
        rows = [line.split()[0] for line in demo.output.splitlines() if line.strip()]
        assert [rows.count(lane) for lane in ("short", "mid", "long")] == [8, 5, 3]
        figures = json.loads(demo.output.splitlines()[-1])
        assert (figures["jobs"], figures["tokens"], figures["engine"]) == (16, 1024, "simulated")
        assert figures["ratio"] > 1
        await demo.nothing_is_left()
        assert os.listdir(settings_here) == []


async def test_the_demo_can_be_interrupted(settings_here: Path) -> None:
    # Given a demonstration that would take long
    async with Headway.running(settings_here, "demo", "--engine", "simulated", SIMULATED_STEP_MS="1000") as demo:
        await demo.line("What is the capital")
        # If I press Ctrl-C in the middle of its answer, I expect its end, and nothing left
        assert await demo.end(signal.SIGINT) == 130
        await demo.nothing_is_left()


async def test_what_a_child_has_started_goes_with_it(tmp_path: Path) -> None:
    # Given a program that has started another one, as vLLM does
    code = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '1000']); print(p.pid, flush=True); p.wait()"
    child = Child("parent", [sys.executable, "-c", code], tmp_path / "log")
    await child.start()
    try:
        grandchild = psutil.Process(int(await eventually(lambda: child.log.read_text().strip())))
        # If the program is killed
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        # I expect the other to end too
        assert await child.ended() == -signal.SIGKILL
        await eventually(lambda: not _lives(grandchild))
        assert not child.running
    finally:
        child.kill()


async def test_a_child_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    # Given a program that ignores SIGTERM
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(1000)"
    code = f"import signal, time; {deaf}"
    child = Child("deaf", [sys.executable, "-c", code], tmp_path / "log")
    await child.start()
    await eventually(lambda: child.tail() == "deaf")
    # If I stop it, I expect its end after the deadline
    await child.stop(0.1)
    assert not child.running


def _lives(process: psutil.Process) -> bool:
    # Where nobody reaps orphans, as in a plain container, the dead remain as zombies.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _working_in(folder: Path) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cwd"]) if (each.info["cwd"] or "").startswith(str(folder))]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
