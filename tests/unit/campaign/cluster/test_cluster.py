"""Campaigns on nodes that a bridge reaches, with one that needs no software of a cluster."""

from __future__ import annotations

import math
import re
import signal
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from equivcheck.campaign.cluster import crew as cluster_crew
from equivcheck.campaign.cluster.crew import ClusterFailed, ClusterWorkers, connect_ray
from equivcheck.campaign.events import Event, Ticked
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.plan import Check, Plan
from equivcheck.campaign.supervisor import fuzz
from equivcheck.campaign.workers.messages import NodeLost
from equivcheck.cli import main
from equivcheck.errors import UsageError
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.worlds.workers.process import WorkerProcess
from unit.campaign import fakes

pytestmark = pytest.mark.usefixtures("workers_are_forked")

NEVER = math.inf


def crew(**losses: float) -> ClusterWorkers:
    """Nodes with a worker each, which are lost after so many checks."""
    return ClusterWorkers(WorkerProcess("unit.campaign.cluster.fake_bridge", losses), "nowhere")


def plan(check: Check = fakes.fine, **changes: object) -> Plan:
    """A short plan for two workers that draws from the fakes."""
    values: dict[str, object] = {"num_checks": 40, "seed": 0, "num_workers": 2, "strategy": fakes.some_scenarios, "check": check}
    return Plan(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> FindingStore:
    """An empty store."""
    return FindingStore(tmp_path / "findings")


@pytest.mark.slow
def test_nodes_check_what_as_many_local_workers_do(tmp_path: Path, store: FindingStore) -> None:
    """The same seed draws the same, each worker something else, and it is counted where it was checked."""
    here = fuzz(plan(), FindingStore(tmp_path / "here"))
    there = fuzz(plan(), store, crew=crew(a=NEVER, b=NEVER))
    assert there.tally.reach.drawn_pairs.rows == here.tally.reach.drawn_pairs.rows
    assert there.tally.outcomes == here.tally.outcomes
    assert [(node.name, node.num_checks) for node in there.nodes] == [("a", 20), ("b", 20)]
    assert all(node.rate > 0 for node in there.nodes)


def test_a_lost_node_costs_its_current_checks_only(store: FindingStore) -> None:
    """What it was still to check another checks, what it had found is kept and shrunk, and its loss is told once."""
    told: list[Event] = []
    summary = fuzz(plan(fakes.wide_diverges, num_checks=60), store, [told.append], crew(a=NEVER, b=5))
    (finding,) = summary.findings
    assert finding.verdict.scenario == fakes.scenario(width=3, ranks=1)
    assert summary.tally.num_checks == 60
    assert [event for event in told if isinstance(event, NodeLost)] == [NodeLost(name="b", why="it was unplugged")]
    lasting, lost = summary.nodes
    assert (lasting.lost, lost.lost) == ("", "lost: it was unplugged")
    assert lasting.num_checks + lost.num_checks == 60
    assert lost.num_checks >= 5
    assert (summary.broken, summary.tally.not_repeated) == ("", 0)


@pytest.mark.slow
def test_the_end_of_a_worker_is_judged_on_its_node(store: FindingStore) -> None:
    """A scenario that takes its process down takes no node down, and is found with what the process left."""
    sent: list[Event] = []

    def interrupt(event: Event) -> None:
        if isinstance(event, Ticked) and event.tally.fingerprints and not sent:
            sent.append(event)
            signal.raise_signal(signal.SIGINT)

    summary = fuzz(plan(fakes.long_exits, num_checks=1000), store, [interrupt], crew(a=NEVER, b=NEVER))
    (finding,) = summary.findings
    assert finding.verdict.outcome is Outcome.CRASHED
    assert "exited with code 7" in finding.verdict.reason
    assert summary.interrupted
    assert not [node for node in summary.nodes if node.lost]


@pytest.mark.slow
def test_a_campaign_ends_when_the_last_node_is_lost(store: FindingStore) -> None:
    """It is broken, and what was found is kept."""
    summary = fuzz(plan(fakes.wide_diverges, num_checks=10_000), store, crew=crew(a=5, b=5))
    assert re.fullmatch("all cluster nodes are lost; the last was [ab]: it was unplugged", summary.broken)
    assert store.fingerprints() == tuple(finding.fingerprint for finding in summary.findings) != ()


def test_a_bridge_that_dies_ends_the_campaign(store: FindingStore) -> None:
    """What it printed last says why."""
    bridge = WorkerProcess("unit.campaign.cluster.dying_bridge", True)
    summary = fuzz(replace(plan(), num_workers=1), store, crew=ClusterWorkers(bridge, "nowhere"))
    assert summary.broken == "all cluster nodes are lost; the last was a: the head of the cluster is gone"


@pytest.mark.parametrize(
    ("module", "task", "why"),
    [
        ("unit.campaign.cluster.fake_bridge", {}, "nobody is there"),
        ("unit.campaign.cluster.dying_bridge", False, "the cluster at nowhere cannot be used: the head of the cluster is gone"),
    ],
)
def test_no_cluster_is_an_error_in_a_line(module: str, task: object, why: str) -> None:
    """Whether the bridge says so or dies of it."""
    with pytest.raises(ClusterFailed, match=f"^{re.escape(why)}$"):
        ClusterWorkers(WorkerProcess(module, task), "nowhere")


def fuzz_on(address: str, tmp_path: Path) -> Result:
    """The command."""
    return CliRunner().invoke(main, ["fuzz", "--checks", "1", "--store", str(tmp_path / "findings"), "--ray", address])


@pytest.mark.parametrize("address", ["", "somewhere", "ray://head:10001", "head:port", "local"])
def test_an_address_that_is_none_is_refused(address: str, tmp_path: Path) -> None:
    """With what is allowed, before anything is started."""
    with pytest.raises(UsageError, match=r"Expected auto, or HOST:PORT"):
        connect_ray(address)
    assert fuzz_on(address, tmp_path).exit_code == 2


def test_without_ray_the_command_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, as wrong usage."""

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(cluster_crew, "version", version)
    result = fuzz_on("auto", tmp_path)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.endswith('pip install "equivcheck[ray]"')
