"""A script while it is written: what `Setup` is to a rank, a draft is to a script. Parallelisms change it one after the other."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from equivcheck.errors import UsageError
from equivcheck.layouts.base.script.form import Form
from equivcheck.layouts.base.script.numbers import Numbers
from equivcheck.layouts.base.script.text import listed
from equivcheck.scenario import Scenario
from equivcheck.system.choice import Choice


class LoopPosition(Choice):
    """Where lines that only run in parallel stand in the train loop."""

    WRAP = "wrap"
    """Once, before the optimizer is built."""
    AFTER_OPTIMIZER = "after_optimizer"
    """Once, after it is built."""
    TAKE = "take"
    """For each microbatch, before forward."""
    SCALE = "scale"
    """For each microbatch, between forward and backward."""
    BEFORE_READING = "before_reading"
    """At each step, before gradients are read and clipped."""


@dataclass(slots=True, kw_only=True)
class Draft:
    """What is known of a script so far. Mutable."""

    scenario: Scenario
    """What it runs."""
    form: Form
    """How the model is written."""
    numbers: Numbers
    """Where its numbers are from."""
    imports: dict[str, set[str]] = field(default_factory=dict)
    """Names imported, by module; a module imported as a whole has the name that it is given, or the empty one."""
    definitions: list[list[str]] = field(default_factory=list)
    """Functions and classes, each line by line."""
    lines: dict[LoopPosition, list[str]] = field(default_factory=lambda: {place: [] for place in LoopPosition})
    """What runs in parallel only, by its place."""
    module: str = "model"
    """What is called: the model, or what it is wrapped in."""
    loss_scale: int = 1
    """Factor of a sum loss in parallel: ranks that average gradients, so it is their number."""
    gradient_scale: str = ""
    """Factor of a loss in backward alone, in parallel, as an expression; empty for 1."""
    added: str = ""
    """What is added to the loss of a microbatch, as an expression; empty for nothing."""
    context: str = ""
    """Entered around forward and backward of a microbatch; empty for nothing."""
    around_loss: str = ""
    """Entered before that; empty for nothing."""
    averages_loss: bool = True
    """Whether each rank has a loss of its own rows."""
    has_dtensors: bool = False
    """Whether parameters, gradients or losses may be DTensors."""
    needs_number: bool = False
    """Whether microbatches are counted."""
    computes: list[str] = field(default_factory=list)
    """What runs forward and backward of a microbatch in parallel, if not the model; empty if it does."""
    shared_updates: dict[str, str] | None = None
    """What `ZeroRedundancyOptimizer` is called with beside the usual, in parallel; None for no such optimizer."""
    optimizer: tuple[str, dict[str, str]] | None = None
    """The class of the optimizer in parallel, and what it is called with beside the usual; None for that of one device."""
    clip_norm: str = ""
    """What clips by norm in parallel, if otherwise than on one device."""
    reading: tuple[str, ...] = ()
    """How tensors are read: lines with `{label}` and `{attribute}`; empty for one by one, by name."""
    before_wrap: list[str] = field(default_factory=list)
    """Lines before anything is wrapped, on one device too."""
    parameters: str = "model.parameters()"
    """The expression of what the optimizer updates."""
    names: tuple[str, str] = ("name, parameter", "model.named_parameters()")
    """What names parameters: the variables of a loop, and what it runs over."""
    mixes_tensors: bool = False
    """Whether some parameters are DTensors and others plain, or DTensors of another mesh."""
    clip_value: str = ""
    """What clips by value in parallel, if otherwise than on one device."""
    may_lack: bool = False
    """Whether a rank leaves out what it does not hold."""
    loss_rank: int = 0
    """Where the loss is, if ranks leave out what they do not hold."""
    after_wrap: list[str] = field(default_factory=list)
    """Lines after everything is wrapped, on one device too."""

    def need(self, module: str, *names: str) -> None:
        """Import names from a module, or a module by the name `as ...` or whole."""
        self.imports.setdefault(module, set()).update(names)

    def add(self, place: LoopPosition, *lines: str) -> None:
        """Lines at a place, after those that are there."""
        self.lines[place] += lines


class CannotExport(UsageError):
    """A script cannot express an option of the scenario; the text names the option."""


def refuse(what: str, why: str) -> CannotExport:
    """The error for an option, by its name in the scenario, and the reason."""
    return CannotExport(f"{what} cannot be exported: {why}")


def loop_over_units(draft: Draft, applied: str) -> list[str]:
    """A loop that applies something to each layer, as ``layer``."""
    if len(draft.form.layers) == 1:
        return [re.sub(r"\blayer\b", draft.form.layers[0], applied)]
    return [f"for layer in {units_of(draft)}:", f"    {applied}"]


def units_of(draft: Draft) -> str:
    """The layers, as what a loop goes over."""
    return draft.form.stack if draft.form.is_all_layers else listed(list(draft.form.layers))
