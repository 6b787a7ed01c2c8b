"""Default folder for findings. Each command imports this module, so it imports no other module."""

from __future__ import annotations

from pathlib import Path

DEFAULT_STORE = Path(".equivcheck/findings")
