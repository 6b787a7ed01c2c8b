"""Verdicts as JSON, both ways."""

from __future__ import annotations

import json
import math
from typing import Any

from cattrs import Converter

from equivcheck.oracle.verdict import Verdict
from equivcheck.scenario import Scenario
from equivcheck.scenario.codec import from_json, to_json

JsonObject = dict[str, Any]

_converter = Converter(forbid_extra_keys=True)
_converter.register_unstructure_hook(Scenario, lambda scenario: json.loads(to_json(scenario)))
_converter.register_structure_hook(Scenario, lambda value, _: from_json(json.dumps(value)))
_converter.register_unstructure_hook(float, lambda value: value if math.isfinite(value) else str(value))


def verdict_to_dict(verdict: Verdict) -> JsonObject:
    """The verdict as JSON values; JSON has no infinity and no NaN, so those are the texts ``inf``, ``-inf`` and ``nan``."""
    return dict(_converter.unstructure(verdict))


def verdict_from_dict(values: JsonObject) -> Verdict:
    """The verdict that `verdict_to_dict` wrote; raises what cattrs raises if it is not one."""
    return _converter.structure(values, Verdict)
