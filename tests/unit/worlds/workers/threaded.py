"""A module whose warm-up leaves a thread."""

from __future__ import annotations

import threading
import time


def warm_up() -> None:
    """Start a thread, which outlives this call."""
    threading.Thread(target=time.sleep, args=(1_000.0,), daemon=True).start()
