"""Nodes of Ray that start however slow the machine is: what Ray gives 15 or 30 seconds, and has no setting for."""

from __future__ import annotations

import contextlib
import inspect
import socket
import time
from typing import Any

import pytest
from ray._private import services
from ray._raylet import persist_port

PATIENCE = 600
"""Seconds that a machine may take, however loaded, for what takes some on a quiet one."""
PORTS = ("dashboard_agent_listen_port", "metrics_agent_port", "metrics_export_port", "runtime_env_agent_port")
"""Of the processes that a node starts: arguments of `Cluster.add_node`."""
_SETTINGS = {
    "RAY_agent_register_timeout_ms": PATIENCE * 1000,
    "RAY_gcs_server_port_wait_time_s": PATIENCE,
    "RAY_gcs_server_request_timeout_seconds": PATIENCE,
    "RAY_health_check_timeout_ms": PATIENCE * 1000,  # of a node that is silent: one that was killed refuses connections
    "RAY_worker_register_timeout_seconds": PATIENCE,
}
_start_raylet, _get_node = services.start_raylet, services.get_node


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Have nodes that this process starts, and their processes, take their time."""
    for name, limit in _SETTINGS.items():
        patch.setenv(name, str(limit))
    patch.setattr(services, "start_raylet", _start_raylet_with_ports)
    patch.setattr(services, "get_node", _get_node_at_last)


def free_ports() -> dict[str, int]:
    """One that nobody listens at for each of `PORTS`."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in PORTS]
        for each in sockets:
            each.bind(("", 0))
        return {name: each.getsockname()[1] for name, each in zip(PORTS, sockets, strict=True)}


def _start_raylet_with_ports(*arguments: Any, **named: Any) -> object:
    """A node ends itself if its processes have not written down their ports in time: here that is done before they start."""
    given = inspect.signature(_start_raylet).bind(*arguments, **named).arguments
    for name in PORTS:
        persist_port(given["session_dir"], given["node_id"], name, given[name])
    return _start_raylet(*arguments, **named)


def _get_node_at_last(gcs_address: str, node_id: str) -> object:
    """What the head knows of a node, once it does."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return _get_node(gcs_address, node_id)
        except RuntimeError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
