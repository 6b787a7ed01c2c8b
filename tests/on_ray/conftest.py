"""Campaigns on Ray: run by ``tox run -e ray``, as Ray is in no other environment."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import psutil
import pytest
from ray.cluster_utils import Cluster

NAMES = ("one", "two", "three")
_WORKER = "from equivcheck.campaign.serving import main"
_START_SECONDS = "300"


def pytest_configure(config: pytest.Config) -> None:
    """What Ray warns of is its own."""
    config.addinivalue_line("filterwarnings", "default")


class ThreeNodes:
    """A cluster on this machine: a head without cores, and three nodes of one core each."""

    def __init__(self) -> None:
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._nodes = {name: self.add(name) for name in NAMES}

    @property
    def address(self) -> str:
        """Of the head."""
        return str(self._cluster.address)

    @property
    def names(self) -> list[str]:
        """Of the nodes that were not killed."""
        return list(self._nodes)

    def add(self, name: str, **environment: str) -> object:
        """Start a node."""
        return self._cluster.add_node(num_cpus=1, node_name=name, env_vars=environment)

    def kill(self, name: str) -> None:
        """End a node as a power cut does."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def remove(self, node: object) -> None:
        """End one that `add` started."""
        self._cluster.remove_node(node)

    def complete(self) -> None:
        """Start those again that were killed."""
        for name in NAMES:
            if name not in self._nodes:
                self._nodes[name] = self.add(name)

    def close(self) -> None:
        """End everything."""
        self._cluster.shutdown()

    @staticmethod
    def processes() -> list[psutil.Process]:
        """The actors of campaigns on all nodes, and their workers."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # nodes that were killed are still listed
                line = " ".join(process.cmdline())
                if "NodeServer" in line or _WORKER in line:
                    found.append(process)
        return found


@pytest.fixture(scope="session")
def started_nodes() -> Iterator[ThreeNodes]:
    """One cluster for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(entry for entry in sys.path if entry))
        patch.setenv("RAY_raylet_start_wait_time_s", _START_SECONDS)
        nodes = ThreeNodes()
        yield nodes
        nodes.close()


@pytest.fixture
def nodes(started_nodes: ThreeNodes) -> ThreeNodes:
    """Three nodes that are all there."""
    started_nodes.complete()
    return started_nodes
