"""What is judged is a case: a scenario, or a tensor program. Campaigns, stores and reports know no more of one than this.

What else they do with a case is a function by its type (`functools.singledispatch`), which a new kind of case registers its own
for: `in_words`, `to_json`, `size_of`, `changes_of` and `script_of_case`.
"""

from __future__ import annotations

from typing import Protocol


class Case(Protocol):
    """A frozen value; all that a failure needs."""

    @property
    def name(self) -> str:
        """What cases of one kind have in common: part of a fingerprint."""

    @property
    def counted_by(self) -> tuple[str, ...]:
        """What checks of it are counted by: its row of a summary, and then its part of that row, if there are any."""

    @property
    def num_ranks(self) -> int:
        """How many ranks it is for."""

    @property
    def schedule_seed(self) -> int:
        """Which order simulated ranks run in."""
