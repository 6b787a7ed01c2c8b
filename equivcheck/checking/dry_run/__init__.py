"""What a layout would do at a size that no machine here has."""

from __future__ import annotations
