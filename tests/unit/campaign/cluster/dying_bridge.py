"""A bridge that does not last."""

from __future__ import annotations

import os
import sys

from equivcheck.campaign.cluster.bridge import Connected, Joined
from equivcheck.campaign.workers.crew import Node
from equivcheck.worlds.workers.link import SupervisorLink


def main(fd: int) -> None:
    """Its task says whether it reaches a node before its end."""
    link = SupervisorLink(fd)
    link.send(Connected())
    if link.task:
        link.send(Joined(nodes=(Node(name="a", num_workers=1),)))
        link.next()
    print("the head of the cluster is gone", file=sys.stderr, flush=True)
    os._exit(1)
