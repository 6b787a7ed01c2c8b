"""Formats the work by cluster machines, as text and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from equivcheck.campaign.events import NodeWork
from equivcheck.scenario.scenario import count
from equivcheck.system.printable import escape_unprintable

_MOST_SHOWN = 8
"""Maximum number of machines in the progress; the summary has all."""


def node_lines(nodes: Sequence[NodeWork]) -> Iterator[str]:
    """Yield a line such as ``node 10.0.0.2: 12.0 checks/s`` for each of the first few machines, then a count of the others.

    A lost machine has the word ``lost`` instead of its rate. The reason is printed when the machine is lost.
    """
    used = [node for node in nodes if node.num_workers]
    for node in used[:_MOST_SHOWN]:
        yield f"node {node.name}: {'lost' if node.lost else f'{node.rate:.1f} checks/s'}"
    if len(used) > _MOST_SHOWN:
        yield f"and {count(len(used) - _MOST_SHOWN, 'more node')}"


def node_summary(node: NodeWork) -> str:
    """Describe one machine's work in a line: ``node 10.0.0.2: 1,200 checks by 4 workers in 100.0 s, 12.0 checks/s``.

    If the machine was lost, the line ends with the reason.
    """
    lost = escape_unprintable(node.lost)
    if not node.num_workers:
        return f"node {node.name}: {lost}"
    done = f"{count(node.num_checks, 'check')} by {count(node.num_workers, 'worker')} in {node.seconds:.1f} s"
    return f"node {node.name}: {done}, {node.rate:.1f} checks/s{f'; {lost}' if lost else ''}"


def node_object(node: NodeWork) -> dict[str, Any]:
    """Convert one machine's work to a JSON object."""
    return {
        "name": node.name,
        "workers": node.num_workers,
        "checks": node.num_checks,
        "seconds": round(node.seconds, 3),
        "checks_per_second": round(node.rate, 3),
        "lost": node.lost or None,
    }
