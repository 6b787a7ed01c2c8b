"""Divides a campaign into independent parts, such as CI jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from equivcheck.campaign.batches import batch_seed
from equivcheck.errors import UsageError

_SEED_BITS = 32
_WRITTEN = re.compile(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One of several independent parts of a campaign, such as a CI job.

    Raises `UsageError` if `number` is not between 1 and `of`.
    """

    number: int = 1
    """Number of this part, from 1."""
    of: int = 1
    """How many parts the campaign has."""

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of:
            raise UsageError(
                f"shard {self} is not valid: no part {self.number} exists. Expected 1/{self.of} to {self.of}/{self.of}"
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def seed(self, campaign_seed: int) -> int:
        """Return the seed for this part. If there is only one part, it is the campaign's seed."""
        return campaign_seed if self.of == 1 else batch_seed(campaign_seed, self.number, self.of) % 2**_SEED_BITS


def parse_shard(text: str) -> Shard:
    """Parse a text such as ``2/8``, part 2 of 8. Raises `UsageError` if it has another form."""
    written = _WRITTEN.fullmatch(text)
    if written is None:
        raise UsageError(f"shard {text[:80]!r} is not valid: its form is wrong. Expected I/N for part I of N, such as 2/8")
    return Shard(number=int(written[1]), of=int(written[2]))
