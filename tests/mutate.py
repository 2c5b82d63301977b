"""Deletes each fence line of the scripts in turn and names the test that notices; exits 1 if one goes unnoticed.

A fence is a line that ends in `-- fence`. The mutated package and the tests of the scripts run from a copy.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = Path("shared/headway/shared/lua")
TESTS = ("tests/redis/test_scripts.py",)
FENCE = re.compile(r"-- fence$")
FAILED = re.compile(r"^FAILED \S+::(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A script with one line less."""

    script: str
    number: int
    line: str

    def text(self) -> str:
        lines = (ROOT / SCRIPTS / self.script).read_text().splitlines(keepends=True)
        del lines[self.number]
        return "".join(lines)


def mutants() -> Iterator[Mutant]:
    for path in sorted((ROOT / SCRIPTS).glob("*.lua")):
        for number, line in enumerate(path.read_text().splitlines()):
            if FENCE.search(line) and not line.startswith("--"):
                yield Mutant(path.name, number, line.strip())


def killer(mutant: Mutant | None) -> str | None:
    """The first test that fails on the mutant, or None when all pass."""
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        copy = Path(folder)
        for name in ("shared", "tests", "pyproject.toml"):
            source = ROOT / name
            ignore = shutil.ignore_patterns("__pycache__", "e2e", "engine")
            shutil.copytree(source, copy / name, ignore=ignore) if source.is_dir() else shutil.copy(source, copy)
        if mutant is not None:
            (copy / SCRIPTS / mutant.script).write_text(mutant.text())
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS]
        run = subprocess.run(command, cwd=copy, capture_output=True, text=True, env=dict(os.environ))
    if run.returncode == 0:
        return None
    failed = FAILED.search(run.stdout)
    if failed is None:
        raise RuntimeError(f"the tests did not run on {mutant}:\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}")
    return failed[1]


def main() -> int:
    if (broken := killer(None)) is not None:
        print(f"{broken} fails before any mutation")
        return 1
    found = list(mutants())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        killers = list(pool.map(killer, found))
    for mutant, test in zip(found, killers, strict=True):
        print(f"{mutant.script}:{mutant.number + 1}  {test or 'NOT NOTICED'}\n    {mutant.line}")
    alive = killers.count(None)
    print(f"mutation: {len(found) - alive} of {len(found)} fence lines are held by a test")
    return 1 if alive or not found else 0


if __name__ == "__main__":
    sys.exit(main())
