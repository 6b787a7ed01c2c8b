"""Checks a layout at a size for which no machine is available."""

from __future__ import annotations
