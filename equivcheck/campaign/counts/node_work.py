"""What each machine of a campaign has done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from equivcheck.campaign.crew import Node
from equivcheck.campaign.events import NodeWork


class NodeWorks:
    """Counts checks by machine, and notes when one was lost."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._checks = Counter[str]()
        self._lost_at: dict[str, float] = {}

    def count(self, name: str, num_checks: int) -> None:
        """Count checks that were done on a machine."""
        self._checks[name] += num_checks

    def lose(self, name: str, seconds: float) -> bool:
        """Note that a machine was lost after so many seconds; whether that is news."""
        is_news = name not in self._lost_at
        self._lost_at.setdefault(name, seconds)
        return is_news

    @property
    def all_lost(self) -> bool:
        """Whether none is left."""
        return all(node.lost for node in self._nodes)

    def so_far(self, seconds: float) -> tuple[NodeWork, ...]:
        """What each has done in so many seconds of a campaign."""
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
