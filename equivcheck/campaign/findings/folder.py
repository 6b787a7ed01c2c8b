"""Where findings are kept unless the user names another folder. Imported by every command, so it imports nothing else."""

from __future__ import annotations

from pathlib import Path

DEFAULT_STORE = Path(".equivcheck/findings")
