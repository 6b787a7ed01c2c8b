"""Commands start quickly because each imports only what it uses. These tests look at modules, not at clocks."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from equivcheck.layouts.composition.registry import imports_of, layout_kinds
from equivcheck.quality.doctor import smallest_scenario
from equivcheck.scenario import DDP
from equivcheck.scenario.file_format.codec import to_json
from equivcheck.worlds.processes.preload import RARE

UNUSED = (
    "equivcheck.diagnosis",
    "equivcheck.export",
    "equivcheck.campaign.findings.finding",
    "equivcheck.oracle.known_issues",
    "equivcheck.layouts.parallelisms.fsdp2.apply",
    "equivcheck.programs.run",
    "equivcheck.strategies",
    "equivcheck.worlds.gloo",
    "hypothesis",
    *RARE,
)
"""Modules that a check of DDP without a finding does not need."""

CHECK = """
import sys
from equivcheck.cli import main

try:
    main(["check", sys.argv[1]])
finally:
    print(*sys.modules)
"""


def modules_after(code: str, *arguments: str) -> set[str]:
    """Modules that a new process has imported, from the last line that the code prints."""
    command = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(command, env={"PYTHONPATH": ":".join(sys.path)}, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return set(ended.stdout.splitlines()[-1].split())


def test_a_check_imports_only_what_it_uses(tmp_path: Path) -> None:
    """A passing DDP check imports no diagnosis, known issue, other parallelism or rare torch module."""
    file = tmp_path / "scenario.json"
    file.write_text(to_json(smallest_scenario(DDP)), encoding="utf-8")
    found = modules_after(CHECK, str(file))
    assert {"torch", "equivcheck.layouts.parallelisms.ddp.apply", "equivcheck.worlds.sim.ranks"} <= found
    assert not [name for name in found if name.startswith(UNUSED)]


def test_a_training_is_defined_without_dtensor() -> None:
    """Collecting a test file with `check_training` takes no longer than importing torch."""
    found = modules_after("import sys; from equivcheck import check_training; print(*sys.modules)")
    assert "torch" in found
    assert not found & {"torch.distributed.tensor", "torch._dynamo", "equivcheck.scenario", "equivcheck.user.judging"}


IN_RANKS = """
import json, sys
from equivcheck.worlds.sim.torch_private import is_rank_thread

names, found = sys.argv[1].split(","), []

class Watch:
    def find_spec(self, name, path=None, target=None):
        if is_rank_thread() and name in names:
            found.append(name)

sys.meta_path.insert(0, Watch())
from equivcheck import check, from_json
for text in json.loads(sys.argv[2]):
    scenario = from_json(text)
    verdict = check(scenario)
    assert not verdict.outcome.is_finding, verdict.describe()
print(*found, "end")
"""


def test_ranks_import_no_rare_module() -> None:
    """A module that a rank imports would keep functions that sim replaces. Layouts name such modules, to import them before."""
    sharing = smallest_scenario(DDP)
    sharing = replace(sharing, layout=replace(sharing.layout, parallelisms=(DDP(zero_redundancy=True),)))
    scenarios = [*(smallest_scenario(kind.parallelism) for kind in layout_kinds().values()), sharing]
    naming = [scenario for scenario in scenarios if imports_of(scenario.layout)]
    assert {scenario.layout.name for scenario in naming} == {"ddp", "pipeline"}
    in_order = sorted(scenarios, key=naming.__contains__)  # those that import a rare module run last
    found = modules_after(IN_RANKS, ",".join(RARE), json.dumps([to_json(scenario) for scenario in in_order]))
    assert found == {"end"}
