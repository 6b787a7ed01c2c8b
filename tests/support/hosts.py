"""Two hosts of this machine: network namespaces joined by a cable, with names of their own, or else two loopback addresses."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--uts")
_MAKE = """
set -e
hostname host-a
ip link set lo up
mkfifo "$0"
unshare --net --uts sh -c 'hostname host-b; ip link set lo up; echo > "$0"; exec sleep infinity' "$0" &
b=$!
trap 'kill $b' EXIT
read _ < "$0"
ip link add cable type veth peer name cable netns $b
ip addr add 10.99.0.1/24 dev cable
ip link set cable up
nsenter --target $b --net --uts sh -c 'ip addr add 10.99.0.2/24 dev cable; ip link set cable up'
echo $$ $b
read _
"""
"""Makes both and the cable, tells the processes that hold them, and ends with its input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One of them."""

    name: str
    """As it calls itself."""
    address: str
    """Where others reach it."""
    interface: str
    """Of its network."""
    prefix: tuple[str, ...] = ()
    """Before a command that is to run there."""


@contextlib.contextmanager
def two_hosts(folder: str) -> Iterator[tuple[Host, Host]]:
    """Both, for as long as the context lasts; `folder` is an empty one."""
    with contextlib.ExitStack() as undo:
        pids = _namespaces(folder, undo)
        if pids:
            yield _inside("host-a", "10.99.0.1", pids[0]), _inside("host-b", "10.99.0.2", pids[1])
        else:
            name = subprocess.check_output(["hostname"], text=True).strip()
            yield Host(name=name, address="127.0.0.1", interface="lo"), Host(name=name, address="127.0.0.2", interface="lo")


def _inside(name: str, address: str, pid: str) -> Host:
    prefix = ("nsenter", "--target", pid, "--user", "--preserve-credentials", "--net", "--uts")
    return Host(name=name, address=address, interface="cable", prefix=prefix)


def _namespaces(folder: str, undo: contextlib.ExitStack) -> list[str]:
    """Processes that hold one each; none where this system or its rules do not have them."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip", "hostname"))):
        return []
    command = [*_UNSHARE, "sh", "-c", _MAKE, f"{folder}/ready"]
    making = undo.enter_context(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    )
    assert making.stdin is not None
    assert making.stdout is not None
    return making.stdout.readline().split()
