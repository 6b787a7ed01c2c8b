"""Campaigns on a cluster of three nodes: what is found, what is lost, and what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from equivcheck.campaign.cluster.crew import ClusterFailed, connect_ray
from equivcheck.campaign.events import Event, KeptFinding, Ticked
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.plan import Check, Plan
from equivcheck.campaign.supervisor import fuzz
from equivcheck.campaign.workers.messages import NodeLost
from on_ray.conftest import NAMES, ThreeNodes
from on_ray.patient_start import PATIENCE
from support.processes import end_soon
from unit.campaign import fakes

SMALLEST = fakes.scenario(width=3, ranks=1)
"""What a finding of `wide_diverges` is shrunk to."""


def plan(check: Check, num_checks: int = 1_000_000) -> Plan:
    """One without end, to speak of, for as many workers as nodes."""
    return Plan(num_checks=num_checks, seed=0, num_workers=len(NAMES), strategy=fakes.some_scenarios, check=check)


@pytest.fixture
def store(tmp_path: Path) -> FindingStore:
    """An empty store."""
    return FindingStore(tmp_path / "findings")


def test_every_node_checks_what_a_local_worker_would(nodes: ThreeNodes, tmp_path: Path, store: FindingStore) -> None:
    """The same seed draws the same, each node something else, and its speed is told."""
    with connect_ray(nodes.address) as crew:
        assert crew.num_workers == 3
        there = fuzz(plan(fakes.fine, 30), store, crew=crew)
    here = fuzz(plan(fakes.fine, 30), FindingStore(tmp_path / "here"))
    assert there.tally.reach.drawn_pairs.rows == here.tally.reach.drawn_pairs.rows
    assert {(node.name, node.num_checks) for node in there.nodes} == {(name, 10) for name in NAMES}
    assert all(node.rate > 0 for node in there.nodes)


def test_a_node_that_is_killed_costs_its_current_checks_only(nodes: ThreeNodes, store: FindingStore) -> None:
    """The others go on, its loss is told once, and what was found is kept, shrunk where that was."""
    found: list[KeptFinding] = []
    lost: list[NodeLost] = []
    left: list[int] = []

    def listen(event: Event) -> None:
        if isinstance(event, KeptFinding):
            found.append(event)
        elif isinstance(event, NodeLost):
            lost.append(event)
        elif isinstance(event, Ticked) and event.nodes:
            checks = {node.name: node.num_checks for node in event.nodes}
            if "two" in nodes.names and min(checks.values()) > 0 and found and found[-1].verdict.scenario == SMALLEST:
                nodes.kill("two")
            elif lost and not left:
                left.extend((checks["one"], checks["three"]))
            elif left and left[0] < checks["one"] and left[1] < checks["three"] and len(left) == 2:
                left.append(0)  # a second signal would not wait for a summary
                signal.raise_signal(signal.SIGINT)

    summary = fuzz(plan(fakes.wide_diverges), store, [listen], connect_ray(nodes.address))
    assert [event.name for event in lost] == ["two"]
    assert [node.name for node in summary.nodes if node.lost] == ["two"]
    assert sum(node.num_checks for node in summary.nodes) == summary.tally.num_checks
    assert [finding.verdict.scenario for finding in summary.findings] == [SMALLEST]
    assert store.load(summary.findings[0].fingerprint).verdict.scenario == SMALLEST
    assert (summary.broken, summary.tally.not_repeated) == ("", 0)
    assert summary.interrupted


def test_a_campaign_that_loses_every_node_says_so_and_keeps_what_it_found(nodes: ThreeNodes, store: FindingStore) -> None:
    """It ends by itself, in a line."""

    def listen(event: Event) -> None:
        if isinstance(event, KeptFinding):
            for name in nodes.names:
                nodes.kill(name)

    summary = fuzz(plan(fakes.wide_diverges), store, [listen], connect_ray(nodes.address))
    assert summary.broken.startswith("all cluster nodes are lost; the last was ")
    assert "\n" not in summary.broken
    assert store.fingerprints() == tuple(finding.fingerprint for finding in summary.findings) != ()


CAMPAIGN = """
import json, sys
from unit.campaign import fakes
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.supervisor import fuzz
from equivcheck.campaign.cluster.crew import connect_ray
from equivcheck.campaign.findings.store import FindingStore

def tell(event):
    if type(event).__name__ == "Ticked" and event.num_findings and all(node.num_checks for node in event.nodes):
        print("running", flush=True)

plan = Plan(num_checks=1_000_000, seed=0, num_workers=3, strategy=fakes.some_scenarios, check=fakes.wide_diverges)
summary = fuzz(plan, FindingStore(sys.argv[1]), [tell], connect_ray(sys.argv[2]))
print(json.dumps({"interrupted": summary.interrupted, "findings": len(summary.findings), "broken": summary.broken}))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_a_campaign_leaves_no_actor(nodes: ThreeNodes, tmp_path: Path, number: signal.Signals) -> None:
    """Nor a worker on any node, not even where nobody was left to end them; what was found is kept."""
    command = [sys.executable, "-c", CAMPAIGN, str(tmp_path / "findings"), nodes.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        processes = nodes.processes()
        assert len(processes) == 6
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE)
    if number is not signal.SIGKILL:
        assert json.loads(output.splitlines()[-1]) == {"interrupted": True, "findings": 1, "broken": ""}
    assert end_soon(*processes)
    assert len(FindingStore(tmp_path / "findings").fingerprints()) == 1


def test_a_node_with_another_torch_is_left_out(nodes: ThreeNodes, tmp_path: Path) -> None:
    """In a line that has both versions, and the others go on."""
    (information := tmp_path / "torch-2.3.4.dist-info").mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.3.4\n")
    other = nodes.add("other", PYTHONPATH=os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"])))
    try:
        with connect_ray(nodes.address) as crew:
            left_out = {node.name: node.lost for node in crew.nodes if node.lost}
            assert crew.num_workers == 3
    finally:
        nodes.remove(other)
    here = version("torch").partition("+")[0]
    assert left_out == {"other": f"left out: it has torch 2.3.4, this machine {here}"}


def test_an_address_where_nobody_is_is_told_in_a_line() -> None:
    """At once, where Ray would try for minutes."""
    with pytest.raises(ClusterFailed, match=r"^no Ray cluster can be reached at 127\.0\.0\.1:1: .*refused$"):
        connect_ray("127.0.0.1:1")


def test_the_command_checks_on_every_node(nodes: ThreeNodes, tmp_path: Path) -> None:
    """With the oracle, and the control; it prints one JSON object, with the speed of each node."""
    command = [sys.executable, "-m", "equivcheck", "fuzz", "--ray", "auto", "--checks", "6", "--seed", "3", "--layout", "ddp"]
    command += ["--max-ranks", "2", "--store", str(tmp_path / "findings"), "--json"]
    environment = os.environ | {"RAY_ADDRESS": nodes.address}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert {node["name"]: node["checks"] for node in told["nodes"]} == dict.fromkeys(NAMES, 2)
    assert told["control"]["caught"]
    assert "3 processes on 3 nodes" in result.stderr
