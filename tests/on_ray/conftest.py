"""Campaigns on Ray: run by ``tox run -e ray``, as Ray is in no other environment."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from on_ray.patient_start import PATIENCE, be_patient, free_ports

NAMES = ("one", "two", "three")
_WORKER = "from equivcheck.campaign.workers.serving import main"
_NEEDED_BY_NO_TEST = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
"""Processes of a head."""


def pytest_configure(config: pytest.Config) -> None:
    """What Ray warns of is its own."""
    config.addinivalue_line("filterwarnings", "default")


class ThreeNodes:
    """A cluster on this machine: a head without cores, and three nodes of one core each."""

    def __init__(self) -> None:
        self._cluster = Cluster()
        self._start(num_cpus=0, **_NEEDED_BY_NO_TEST)
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
        return self._start(num_cpus=1, node_name=name, env_vars=environment)

    def kill(self, name: str) -> None:
        """End a node as a power cut does."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def remove(self, node: object) -> None:
        """End one that `add` started."""
        self._cluster.remove_node(node)

    def complete(self) -> None:
        """Start those again that were killed, and wait until the head knows of every end as well."""
        for name in NAMES:
            if name not in self._nodes:
                self._nodes[name] = self.add(name)
        self._cluster.wait_for_nodes(PATIENCE)

    def close(self) -> None:
        """End everything."""
        self._cluster.shutdown()

    def _start(self, **arguments: Any) -> object:
        node = self._cluster.add_node(wait=False, **arguments, **free_ports())
        self._cluster.wait_for_nodes(PATIENCE)
        return node

    @staticmethod
    def processes() -> list[int]:
        """The ids of the actors of campaigns on all nodes, and their workers."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # nodes that were killed are still listed
                line = " ".join(process.cmdline())
                if "NodeServer" in line or _WORKER in line:
                    found.append(process.pid)
        return found


@pytest.fixture(scope="session")
def started_nodes() -> Iterator[ThreeNodes]:
    """One cluster for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(entry for entry in sys.path if entry))
        be_patient(patch)
        nodes = ThreeNodes()
        yield nodes
        nodes.close()


@pytest.fixture
def nodes(started_nodes: ThreeNodes) -> ThreeNodes:
    """Three nodes that are all there."""
    started_nodes.complete()
    return started_nodes
