"""`check` of a scenario does not depend on tensor programs."""

from __future__ import annotations

import subprocess
import sys

from equivcheck.quality.doctor import smallest_scenario
from equivcheck.scenario import DDP
from equivcheck.scenario.file_format.codec import to_json

CHECKS = """
import sys
from equivcheck import check, from_json
from equivcheck.mutants.registry import mutants

scenario = from_json(sys.argv[1])
assert check(scenario).outcome.value == "equivalent"
verdict = check(scenario, alter=mutants()["gradients_summed"].plant)
assert verdict.outcome.value == "diverged"
verdict.describe()
print(*(name for name in sys.modules if name.startswith("equivcheck.programs")))
"""


def test_a_scenario_enters_no_file_of_programs() -> None:
    """Neither a passing nor a diverging check imports the package, in a new process."""
    command = [sys.executable, "-c", CHECKS, to_json(smallest_scenario(DDP))]
    ended = subprocess.run(command, env={"PYTHONPATH": ":".join(sys.path)}, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert not ended.stdout.split()
