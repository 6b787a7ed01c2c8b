"""A module with an endless import, like a large one on a busy machine; prints its process id.

It ignores interruptions, as torch does if one arrives while C++ calls Python.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

Path(os.environ["EQUIVCHECK_TEST_PID"]).write_text(str(os.getpid()), encoding="utf-8")
while True:
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(1000)
