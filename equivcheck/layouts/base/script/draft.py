"""A script under construction. Each parallelism changes the draft in turn, like it changes `Setup` on a rank."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from equivcheck.errors import UsageError
from equivcheck.layouts.base.script.form import Form
from equivcheck.layouts.base.script.numbers import Numbers
from equivcheck.layouts.base.script.text import tuple_code
from equivcheck.scenario import Scenario
from equivcheck.system.choice import PrintableEnum


class LoopPosition(PrintableEnum):
    """Positions in the script's train loop at which parallelisms add lines. The added lines run only in parallel."""

    WRAP = "wrap"
    """Once, before the optimizer is built."""
    AFTER_OPTIMIZER = "after_optimizer"
    """Once, after the optimizer is built."""
    TAKE = "take"
    """For each microbatch, before forward."""
    SCALE = "scale"
    """For each microbatch, between forward and backward."""
    BEFORE_READING = "before_reading"
    """In each step, before gradients are read and clipped."""


@dataclass(slots=True, kw_only=True)
class Draft:
    """An exported script while it is written. Each parallelism changes it."""

    scenario: Scenario
    """The scenario to run."""
    form: Form
    """The model's code."""
    numbers: Numbers
    """Whether parameters and data are literals in the script or drawn from a seed."""
    imports: dict[str, set[str]] = field(default_factory=dict)
    """Imported names by module. For a whole module: its alias, or an empty name."""
    definitions: list[list[str]] = field(default_factory=list)
    """Functions and classes, line by line."""
    lines: dict[LoopPosition, list[str]] = field(default_factory=lambda: {place: [] for place in LoopPosition})
    """Lines that run only in parallel, by position."""
    module: str = "model"
    """Name of the called module: the model or its wrapper."""
    loss_scale: int = 1
    """In the parallel run, factor for a loss summed over rows, because ranks average gradients."""
    gradient_scale: str = ""
    """In the parallel run, expression for a factor to multiply the loss by before backward. Empty for no factor."""
    added: str = ""
    """Expression to add to each microbatch's loss. Empty for none."""
    counts_choices: bool = False
    """Whether each microbatch's chosen experts are counted after its forward."""
    after_backward: list[str] = field(default_factory=list)
    """Lines that run in each step after all backwards, on one device as well."""
    context: str = ""
    """Context manager around each microbatch's forward and backward. Empty for none."""
    around_loss: str = ""
    """Context manager to enter before `context`. Empty for none."""
    averages_loss: bool = True
    """Whether ranks average the loss because each has its own rows."""
    loss_axes: tuple[str, ...] = ()
    """Mesh axes along which ranks average the loss. Empty for all ranks."""
    has_dtensors: bool = False
    """Whether parameters, gradients or losses may be DTensors."""
    needs_number: bool = False
    """Whether the loop over microbatches counts them in a variable `number`."""
    computes: list[str] = field(default_factory=list)
    """Lines that run a microbatch's forward and backward in parallel. Empty to call the model."""
    shared_updates: dict[str, str] | None = None
    """Extra arguments for `ZeroRedundancyOptimizer` in parallel. None for a plain optimizer."""
    optimizer: tuple[str, dict[str, str]] | None = None
    """In parallel, the optimizer's class and extra arguments. None for the class used on one device."""
    clip_norm: str = ""
    """In parallel, the expression that clips by norm. Empty for the expression used on one device."""
    reading: tuple[str, ...] = ()
    """Lines to read tensors, with the placeholders `{label}` and `{attribute}`. Empty if tensors are read one by one."""
    before_wrap: list[str] = field(default_factory=list)
    """Lines before wrapping, also on one device."""
    parameters: str = "model.parameters()"
    """Expression for the optimizer's parameters."""
    names: tuple[str, str] = ("name, parameter", "model.named_parameters()")
    """Loop variables and iterable for all named parameters."""
    mixes_tensors: bool = False
    """Whether plain parameters and DTensors occur together, or DTensors on two meshes."""
    clip_value: str = ""
    """In parallel, the expression that clips by value. Empty for the expression used on one device."""
    may_lack: bool = False
    """Whether a rank's result leaves out tensors of other ranks."""
    has_parts: bool = False
    """Whether a schedule calls several modules, ``parts``. Wrappers change them before the schedule gets them."""
    loss_rank: int = 0
    """Rank with the loss, if ranks leave out tensors they do not hold."""
    after_wrap: list[str] = field(default_factory=list)
    """Lines after wrapping, also on one device."""

    def need(self, module: str, *names: str) -> None:
        """Let the script import names from a module.

        To import the module itself, pass an empty string as the only name. To rename it, pass ``as ALIAS`` as the only name.
        """
        self.imports.setdefault(module, set()).update(names)

    def add(self, place: LoopPosition, *lines: str) -> None:
        """Append lines at the position `place` of the script's train loop."""
        self.lines[place] += lines


class CannotExport(UsageError):
    """Error if an exported script cannot express an option in the scenario. The message names the option."""


ROUNDS = "the single-device run would have to round as the ranks do"
"""Reason for refusing options with lower precision."""


def refuse(what: str, why: str) -> CannotExport:
    """Return the error for an unsupported option in an exported script. `what` names the option, and `why` is the reason."""
    return CannotExport(f"{what} cannot be exported: {why}")


def loop_over_layers(draft: Draft, applied: str) -> list[str]:
    """Return code to run the line `applied` for each ``layer``. If there is one layer, the code has no loop."""
    if len(draft.form.layers) == 1:
        return [re.sub(r"\blayer\b", draft.form.layers[0], applied)]
    return [f"for layer in {layer_iterable(draft)}:", f"    {applied}"]


def layer_iterable(draft: Draft) -> str:
    """Return code for an iterable over the model's layers."""
    return draft.form.stack if draft.form.is_all_layers else tuple_code(list(draft.form.layers))
