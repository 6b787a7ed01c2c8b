"""Protocol for everything that can be checked: a scenario or a tensor program. Campaigns, stores and reports use only this.

All other operations are functions that dispatch on the type (`functools.singledispatch`). A new kind of case registers its own
versions of `describe_case`, `to_json`, `size_of`, `check_case`, `changes_for` and so on.
"""

from __future__ import annotations

from typing import Protocol


class Checkable(Protocol):
    """Protocol for cases, such as scenarios and tensor programs.

    A case is immutable and can be checked. It contains everything that is needed to reproduce a failure.
    """

    @property
    def name(self) -> str:
        """Name for a group with similar cases, such as the layout's name. It is part of a finding's fingerprint."""

    @property
    def summary_row(self) -> tuple[str, ...]:
        """Labels for this case's row in a summary.

        The first label is the layout's name, for example. An optional second label, such as the optimizer's name, divides the
        layout's cases into several rows.
        """

    @property
    def num_ranks(self) -> int:
        """Number of ranks for running the case."""

    @property
    def schedule_seed(self) -> int:
        """Seed for the order in which simulated ranks run."""
