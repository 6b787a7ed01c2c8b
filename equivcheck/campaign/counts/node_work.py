"""Work done by each machine in a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from equivcheck.campaign.crew import Node
from equivcheck.campaign.events import NodeWork


class NodeWorks:
    """Counts checks per machine, and notes the time of its loss."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._checks = Counter[str]()
        self._lost_at: dict[str, float] = {}

    def count(self, name: str, num_checks: int) -> None:
        """Count checks done on a machine."""
        self._checks[name] += num_checks

    def lose(self, name: str, seconds: float) -> bool:
        """Note the loss of a machine after `seconds`. Returns False if it was noted before."""
        is_news = name not in self._lost_at
        self._lost_at.setdefault(name, seconds)
        return is_news

    @property
    def all_lost(self) -> bool:
        """Whether no machine is left."""
        return all(node.lost for node in self._nodes)

    def so_far(self, seconds: float) -> tuple[NodeWork, ...]:
        """Work done by each machine after `seconds` in the campaign."""
        return tuple(
            NodeWork(
                name=node.name,
                num_workers=node.num_workers,
                num_checks=self._checks[node.name],
                seconds=self._lost_at.get(node.name, seconds),
                lost=node.lost,
            )
            for node in self._nodes
        )
