"""Settings and checks that frameworks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from equivcheck import check_training
from equivcheck.user.verdict import UserVerdict
from tools.trainers.rows import Row

SETTINGS: dict[str, tuple[int, float]] = {
    "1 microbatch": (1, 0.0),
    "3 microbatches": (3, 0.0),
    "3 microbatches, clipping": (3, 0.1),
}
"""Number of microbatches and clipping limit."""


def adamw(parameters: list[Any]) -> torch.optim.Optimizer:
    """Optimizer with state and weight decay."""
    return torch.optim.AdamW(parameters, lr=0.01)


def check_in_float32(**given: Any) -> UserVerdict:
    """Check a trainer in processes: two data-parallel ranks with AdamW in float32, unless arguments are given."""
    own: dict[str, Any] = {"mesh": {"dp": 2}, "optimizer": adamw, "dtype": torch.float32, "world": "gloo"}
    return check_training(**own | given)


def rows_of_layouts(version: str, layouts: Iterable[str], check: Callable[[str, int, float], UserVerdict]) -> Iterator[Row]:
    """Yield a row for each layout under each of `SETTINGS`."""
    for layout in layouts:
        for name, setting in SETTINGS.items():
            yield Row(version=version, configuration=f"{layout}, {name}", check=partial(check, layout, *setting))
