"""A module that is imported for ever, as a large one is on a busy machine; says in which process.

It loses interruptions, as torch does where one comes while it calls Python from C++.
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
