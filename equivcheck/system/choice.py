"""Enums whose repr is Python code, so that a printed scenario can be pasted into a program."""

from __future__ import annotations

from enum import Enum


class PrintableEnum(Enum):
    """Base class for enums with string values. JSON contains the value; the repr is ``Class.MEMBER``."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"
