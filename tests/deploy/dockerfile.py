"""Dockerfiles as data, and a stage of one carried out on this machine, with a virtual environment for its Python."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: What only a container has, and what a stage may therefore ask in vain for here.
STAND_INS = ("useradd",)


@dataclass(frozen=True)
class Step:
    """One instruction.

    Attributes:
        word: RUN, COPY and so on.
        flags: what stands before the rest as `--name=value`.
        text: the rest, on one line.
    """

    word: str
    flags: Mapping[str, str]
    text: str

    @property
    def command(self) -> list[str]:
        """The arguments of an instruction in exec form, which starts a program without a shell."""
        arguments: list[str] = json.loads(self.text.removeprefix("CMD "))
        return arguments


@dataclass(frozen=True)
class Stage:
    base: str
    name: str
    steps: list[Step] = field(default_factory=list)

    def all(self, word: str) -> list[Step]:
        return [step for step in self.steps if step.word == word]

    def last(self, word: str) -> Step:
        return self.all(word)[-1]

    @property
    def environment(self) -> dict[str, str]:
        pairs = [pair for step in self.all("ENV") for pair in shlex.split(step.text)]
        return dict(pair.split("=", 1) for pair in pairs)


def stages(path: str) -> list[Stage]:
    """The stages of a Dockerfile of this repository."""
    lines = [line for line in (ROOT / path).read_text().splitlines() if not line.startswith("#")]
    found: list[Stage] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found.append(Stage(base, name))
        elif word:
            found[-1].steps.append(_step(word, rest.split()))
    return found


def _step(word: str, parts: list[str]) -> Step:
    flags: dict[str, str] = {}
    while parts and parts[0].startswith("--"):
        name, _, value = parts.pop(0).partition("=")
        flags[name] = value
    return Step(word, flags, " ".join(parts))


class Built:
    """A stage whose COPY and RUN instructions were carried out here.

    Attributes:
        stage: what it was made from.
        folder: its WORKDIR.
        environment: what its programs get: the ENV of the stage, and nothing of this machine's but what finds programs.
    """

    def __init__(self, stage: Stage, root: Path, others: Mapping[str, "Built"]) -> None:
        """
        Args:
            root: an empty folder that stands for the image's file system.
            others: the stages that it may copy from.

        Raises:
            subprocess.CalledProcessError: an instruction failed; its output is on stdout.
        """
        self.stage = stage
        self.folder = root
        self._root = root
        self._others = others
        subprocess.run([sys.executable, "-m", "venv", str(root / "venv")], check=True)
        for name in STAND_INS:
            (root / "venv/bin" / name).symlink_to("/bin/true")
        path = os.pathsep.join([str(root / "venv/bin"), "/usr/bin", "/bin"])
        self.environment = {"HOME": str(root), "PATH": path, **stage.environment}
        for step in stage.steps:
            self._carry_out(step)

    def _carry_out(self, step: Step) -> None:
        if step.word == "WORKDIR":
            self.folder = self._root / step.text.lstrip("/")
            self.folder.mkdir(parents=True)
        elif step.word == "COPY":
            self._copy(step)
        elif step.word == "RUN":
            # Where packages come from is this machine's affair.
            outside = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
            subprocess.run(["sh", "-ec", step.text], cwd=self.folder, env=outside | self.environment, check=True)

    def _copy(self, step: Step) -> None:
        *sources, target = step.text.split()
        for source in sources:
            if "--from" in step.flags:
                found = self._others[step.flags["--from"]]._root / source.lstrip("/")
            else:
                found = ROOT / source
            if found.is_dir():
                shutil.copytree(found, self.folder / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                into = self.folder / target
                into.mkdir(exist_ok=True)
                shutil.copy(found, into)


def build(path: str, folder: Path) -> Built:
    """The last stage of a Dockerfile, which has no name, with those that it copies from."""
    made: dict[str, Built] = {}
    for stage in stages(path):
        root = folder / (stage.name or "last")
        root.mkdir()
        made[stage.name] = Built(stage, root, made)
    return made[""]


#: The stages that become images.
IMAGES = {
    "api": stages("api/Dockerfile")[-1],
    "cpu": next(stage for stage in stages("worker/Dockerfile") if stage.name == "cpu"),
    "gpu": next(stage for stage in stages("worker/Dockerfile") if stage.name == "gpu"),
}
