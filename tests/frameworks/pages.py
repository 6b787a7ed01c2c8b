"""Reads the output that a framework's page shows for a mistake."""

from __future__ import annotations

import re
from pathlib import Path

HOWTO = Path(__file__).parents[2] / "docs" / "howto"


def shown_output(page: str) -> str:
    """Return the only indented line outside code blocks, such as the cause that `print(verdict.cause)` shows."""
    text = re.sub(r"^```.*?^```$", "", HOWTO.joinpath(f"{page}.md").read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    (line,) = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    return line
