"""Errors about invalid arguments for `check_batching`."""

from __future__ import annotations

from functools import partial

from equivcheck.user import usage

API = "check_batching"
"""Function whose arguments are checked."""

invalid = partial(usage.invalid, api=API)
