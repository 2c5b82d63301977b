"""One worker, three, one again, under load; the benchmark is the test."""

import json
import os
import subprocess
import sys

from programs import ROOT


def test_three_workers_do_the_work_of_three_and_none_is_lost() -> None:
    # If I run the benchmark
    paths = os.pathsep.join(str(ROOT / unit) for unit in ("api", "producer", "shared", "worker"))
    command = [sys.executable, str(ROOT / "benchmarks" / "scaling.py")]
    output = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True
    ).stdout
    result = json.loads(output.splitlines()[-1])

    # I expect three workers to do at least 2.5 times the jobs of one, and every accepted job to have completed,
    # those too that two stopping workers gave back
    assert result["ratio"] >= 2.5
    assert (result["lost"], result["statuses"]) == (0, {"completed": result["accepted"]})
    assert set(result["attempts"]) > {"1"}
