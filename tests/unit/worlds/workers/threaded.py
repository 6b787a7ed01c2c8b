"""What leaves a thread when it warms up."""

from __future__ import annotations

import threading
import time


def warm_up() -> None:
    """The thread outlives this."""
    threading.Thread(target=time.sleep, args=(1_000.0,), daemon=True).start()
