"""Writes a script that runs a scenario and imports only torch and the standard library."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from equivcheck.export.comparison import comparison_functions, main_lines
from equivcheck.export.header import docstring
from equivcheck.export.layout import write_layout
from equivcheck.layouts.base.script.draft import CannotExport, Draft, refuse
from equivcheck.layouts.base.script.form import form_of
from equivcheck.layouts.base.script.loop import train_lines
from equivcheck.layouts.base.script.numbers import Numbers, choose_numbers, constants
from equivcheck.layouts.base.script.text import format_code
from equivcheck.oracle.reference.noise import Expected
from equivcheck.oracle.reference.reference import ReferenceRun
from equivcheck.oracle.verdict.verdict import Verdict
from equivcheck.scenario import CrossEntropy, Layer, Precision, Scenario
from equivcheck.training.layers.registry import layer_kind
from equivcheck.worlds.trace.differences import Divergence, Phase

_STANDARD = ("contextlib", "dataclasses", "datetime", "enum", "functools", "sys", "typing")
"""Standard library modules imported by scripts."""


def script_of(
    scenario: Scenario,
    *,
    verdict: Verdict | None = None,
    numbers: Numbers | None = None,
    name: str = "repro.py",
    seen_on: str = "",
) -> str:
    """Write a script that runs a scenario on one device and in parallel, and compares both runs.

    The docstring of the script describes `verdict`. `numbers` says how the script gets weights and data; by default,
    `choose_numbers` decides. `seen_on` is by default the installed torch version. Raises `CannotExport` with the name of an
    unsupported option.
    """
    draft = _drafted(scenario, verdict, numbers or choose_numbers(scenario.training))
    header = docstring(
        scenario=scenario,
        form=draft.form,
        verdict=verdict,
        numbers=draft.numbers,
        name=name,
        torch=seen_on or torch.__version__.partition("+")[0],
    )
    text = format_code([*header, "", *_body(draft, tolerance_of(scenario, verdict))])
    compile(text, name, "exec")
    return text


def can_export(scenario: Scenario) -> bool:
    """Whether a script can express a scenario."""
    try:
        _drafted(scenario, None, Numbers.EXACT)
    except CannotExport:
        return False
    return True


def _drafted(scenario: Scenario, verdict: Verdict | None, numbers: Numbers) -> Draft:
    _refuse(scenario, verdict)
    if numbers is Numbers.DRAWN and isinstance(scenario.training.loss, CrossEntropy):
        raise refuse(
            "CrossEntropy with random numbers", "random labels would lose the scenario's ignored labels. Expected Numbers.EXACT"
        )
    draft = Draft(scenario=scenario, form=form_of(scenario), numbers=numbers)
    write_layout(draft)
    return draft


def _refuse(scenario: Scenario, verdict: Verdict | None) -> None:
    if scenario.resume is not None:
        raise refuse("Scenario.resume", "a script trains under one layout and has no checkpoint")
    model = scenario.training.model
    for layer, inputs in zip(model.layers, model.widths, strict=False):
        if not isinstance(layer, Layer) and layer_kind(layer).script(layer, inputs) is None:
            raise refuse(f"the layer {type(layer).__name__}", "its `LayerKind.script` returns None")
    if verdict is not None and verdict.divergence is not None:
        phase = verdict.divergence.phase
        if phase in (Phase.STATE, Phase.BUFFER, Phase.COMMUNICATION):
            raise refuse(f"a verdict that diverges in {phase.value}", "a script compares losses, gradients, norms and parameters")


def _body(draft: Draft, tolerance: float) -> Iterator[str]:
    train, main = train_lines(draft), main_lines(draft)
    functions = [*map(list, draft.form.classes), *(found for found in draft.definitions if len(found) > 1)]
    functions += [*comparison_functions(draft), train, main]
    draft.need("torch", "")
    draft.need("torch.distributed", "as dist")
    draft.need("torch", "nn")
    for module, name in draft.form.imports:
        draft.need(module, name)
    yield from _imports(draft)
    yield ""
    if draft.scenario.training.precision is Precision.FLOAT64:
        yield from ("torch.set_default_dtype(torch.float64)", "")
    yield from constants(draft.scenario.training, draft.form, draft.numbers)
    yield from (line for found in draft.definitions if len(found) == 1 for line in found)
    yield f"TOLERANCE = {tolerance:.1e}  # four times the measured effect of rounding"
    for function in functions:
        yield from ("", "", *function)


def _imports(draft: Draft) -> Iterator[str]:
    standard = [module for module in draft.imports if module in _STANDARD]
    yield from _import_lines(draft, standard)
    yield ""
    yield from _import_lines(draft, [module for module in draft.imports if module not in _STANDARD])


def _import_lines(draft: Draft, modules: list[str]) -> Iterator[str]:
    whole = {module: {name for name in draft.imports[module] if not name or name.startswith("as ")} for module in modules}
    for module in sorted(modules):
        if whole[module] or not draft.imports[module]:
            yield f"import {module} {next(iter(whole[module]), '')}".rstrip()
    for module in sorted(modules):
        names = sorted(draft.imports[module] - whole[module], key=lambda name: (not name.isupper(), name.islower(), name))
        if names:
            yield f"from {module} import {', '.join(names)}"


_COMPARED = (Phase.LOSS, Phase.GRADIENT, Phase.CLIPPING, Phase.UPDATE)
"""Phases that a script compares."""


def tolerance_of(scenario: Scenario, verdict: Verdict | None = None) -> float:
    """Return the script's tolerance: the largest tolerance among the compared tensors.

    If the verdict's divergence does not exceed this tolerance, the result is the tolerance for the tensor with the divergence.
    """
    moments = ReferenceRun.of(scenario).confirming_reference().moments
    compared = (moment for moment in moments if moment.phase in _COMPARED)
    everything = max((float(value) for moment in compared for value in moment.tolerances if math.isfinite(value)), default=0.0)
    divergence = None if verdict is None else verdict.divergence
    if divergence is None or _size(divergence) > everything:
        return everything
    own = [value for moment in moments for value in _of_tensor(moment, divergence)]
    return min([everything, *own])


def _of_tensor(moment: Expected, divergence: Divergence) -> Iterator[float]:
    row = moment.table.rows.get(divergence.tensor)
    if row is not None and (moment.step, moment.phase) == (divergence.step, divergence.phase):
        yield float(moment.tolerances[row])


def _size(divergence: Divergence) -> float:
    """Return the error in the worst element; infinite if a value is not a number."""
    try:
        return abs(float(divergence.actual) - float(divergence.expected))
    except ValueError:
        return math.inf
