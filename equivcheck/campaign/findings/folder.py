"""Default folder for findings. Each command imports this module, so this module imports no other."""

from __future__ import annotations

from pathlib import Path

DEFAULT_STORE = Path(".equivcheck/findings")
