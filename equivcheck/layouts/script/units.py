"""Layers as units of a parallelism."""

from __future__ import annotations

import re

from equivcheck.layouts.script.draft import Draft
from equivcheck.layouts.script.text import listed


def loop_over_units(draft: Draft, applied: str) -> list[str]:
    """A loop that applies something to each layer, as ``layer``."""
    form = draft.form
    if len(form.layers) == 1:
        return [re.sub(r"\blayer\b", form.layers[0], applied)]
    return [f"for layer in {form.stack if form.is_all_layers else listed(list(form.layers))}:", f"    {applied}"]
