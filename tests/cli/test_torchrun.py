"""`--world torchrun` on two hosts."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from equivcheck import to_json
from support.hosts import Host, two_hosts
from unit.worlds.torchrun.programs import scenario

LIMIT = 900.0
"""Time limit in seconds; the tests take about twenty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Output of torchrun on one host."""

    code: int
    stdout: str
    stderr: str

    @property
    def exit_codes(self) -> list[int]:
        """Exit codes of failed processes, from torchrun's output."""
        return [int(code) for code in re.findall(r"exitcode\s*: (-?\d+)", self.stderr)]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    """Two hosts for all tests."""
    with two_hosts(str(tmp_path_factory.mktemp("hosts"))) as made:
        yield made


def started(hosts: tuple[Host, Host], ranks_each: int, arguments: list[str]) -> list[Ended]:
    """Run a command on two hosts. The host with rank 0 comes first."""
    with socket.socket() as unbound:
        unbound.bind(("127.0.0.1", 0))
        port = unbound.getsockname()[1]
    options = [f"--nproc-per-node={ranks_each}", f"--master-port={port}"]
    running = [_torchrun(hosts, number, options, arguments) for number in (0, 1)]
    ended = []
    for process in running:
        stdout, stderr = process.communicate(timeout=LIMIT)
        ended.append(Ended(code=process.returncode, stdout=stdout, stderr=stderr))
    return ended


def _torchrun(hosts: tuple[Host, Host], number: int, options: list[str], arguments: list[str]) -> subprocess.Popen[str]:
    host = hosts[number]
    where = ["--nnodes=2", f"--node-rank={number}", f"--master-addr={hosts[0].address}", f"--local-addr={host.address}"]
    command = [*host.prefix, sys.executable, "-m", "torch.distributed.run", *where, *options, "-m", "equivcheck", *arguments]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_ranks_on_each_of_two_hosts_check_a_scenario(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Only rank 0 prints, and only the verdict; all exit codes are 0."""
    file = tmp_path / "scenario.json"
    file.write_text(to_json(scenario(4)))
    first, second = started(hosts, 2, ["check", str(file), "--world", "torchrun", "--json"])
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    verdict = json.loads(first.stdout)
    assert (verdict["outcome"], verdict["world"]) == ("equivalent", "torchrun")
    assert second.stdout == ""


@pytest.mark.slow
def test_a_scenario_of_more_ranks_is_refused_once(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Rank 0 prints both numbers of ranks; every process exits with 2."""
    file = tmp_path / "scenario.json"
    file.write_text(to_json(scenario(4)))
    first, second = started(hosts, 1, ["check", str(file), "--world", "torchrun"])
    assert "size 4 is not valid: world torchrun has 2 ranks. " in first.stderr
    assert "--nnodes times --nproc-per-node is 4" in first.stderr
    assert "error:" not in second.stderr
    assert first.stdout == second.stdout == ""
    assert set(first.exit_codes) == set(second.exit_codes) == {2}
