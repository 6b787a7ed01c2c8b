"""Settings that all frameworks share."""

from __future__ import annotations

SETTINGS: dict[str, tuple[int, float]] = {
    "1 microbatch": (1, 0.0),
    "3 microbatches": (3, 0.0),
    "3 microbatches, clipping": (3, 0.1),
}
"""Number of microbatches and clipping limit."""
