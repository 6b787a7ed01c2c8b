"""A user's training as a case of the judge, and what explains that its ranks differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from equivcheck.oracle.judge import Case
from equivcheck.oracle.reference.noise import Expected
from equivcheck.oracle.reference.reference import Reference
from equivcheck.user.reference import SingleDeviceRun
from equivcheck.user.traces.measures import Measures, first_gradients, measures_of
from equivcheck.user.traces.settings import UserTrace, other_settings
from equivcheck.worlds.call import Call
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase
from equivcheck.worlds.trace.trace import Trace

_ABOUT_SHARDS = (
    "a parameter that is a shard, and no DTensor, needs cuts={name: ((dim, axis),)} to say where it lies, "
    "or full_tensors=fn(module) -> {name: tensor} to be read"
)


class UserCase:
    """The run on one device, as far as what the ranks left can be held against it."""

    def __init__(self, run: SingleDeviceRun, traces: Sequence[UserTrace]) -> None:
        self._run, self._traces = run, traces
        self._held = {piece.name for trace in traces for piece in trace.state.pieces}
        pieces = {piece for trace in traces for piece in trace.steps[0].parameters.pieces}
        self._located = {piece.name for piece in pieces if piece.start or piece.run is not None}

    def case(self) -> Case:
        """What the judge asks for: users ask about every step."""
        return Case(
            reference=lambda: self._readable(self._quick),
            confirming_reference=lambda: self._readable(self._run.confirming_reference(None if self._far else self._parts)),
            required_steps=len(self._run.task.batches),
        )

    @property
    def confirming_reference(self) -> Reference:
        """What decides, as far as ranks could be read."""
        return self.case().confirming_reference()

    def hint(self, first: Divergence) -> str:
        """What may explain a divergence; empty where nothing is known."""
        if first.difference is Difference.SHAPE:
            return "" if first.tensor in self._located else _ABOUT_SHARDS
        return self.apart_in_parts

    @property
    def apart_in_parts(self) -> str:
        """That the parts of the ranks do not make the whole on one device either, in words for people; empty if they do."""
        if self._far is None:
            return ""
        return (
            "one device that takes the parts of the ranks one after the other does not compute the same either "
            f"(step {self._far.step}, {self._far.phase.value}): is the loss, or something in the model, no mean over rows?"
        )

    def measures(self, calls: Sequence[Sequence[Call]]) -> Measures | None:
        """What people look at first; None where one device's gradients are lost in rounding at once."""
        gradients = first_gradients(self._quick.moments)
        return None if gradients is None else measures_of(self._run.trace, gradients, self._traces, calls)

    @property
    def other_settings(self) -> Divergence | None:
        """Where the optimizer of a rank ends with other settings than that of one device, by half of the digits."""
        return other_settings(self._run.trace, self._traces, self._quick.noise_limit)

    @property
    def unread(self) -> tuple[str, ...]:
        """Optimizer state that no rank could hand over, where users read tensors themselves."""
        if self._run.task.full_tensors is None:
            return ()
        states = (moment for moment in self._readable(self._quick).moments if moment.phase is Phase.STATE)
        return tuple(name for state in states for name, there in zip(state.table.names, state.present, strict=True) if not there)

    @cached_property
    def _quick(self) -> Reference:
        return self._run.reference()

    @cached_property
    def _parts(self) -> Trace | None:
        return self._run.parts()

    @cached_property
    def _far(self) -> Expected | None:
        """Where the parts of the ranks, taken one after the other, are no second estimate of the same training."""
        return self._run.far_moment(self._quick, self._parts)

    def _readable(self, reference: Reference) -> Reference:
        """The reference without optimizer state that no rank could hand over, where users read tensors themselves."""
        if self._run.task.full_tensors is None:
            return reference
        return replace(reference, moments=tuple(map(self._without_unread, reference.moments)))

    def _without_unread(self, moment: Expected) -> Expected:
        if moment.phase is not Phase.STATE:
            return moment
        present = (there and name in self._held for name, there in zip(moment.table.names, moment.present, strict=True))
        return replace(moment, present=tuple(present))
