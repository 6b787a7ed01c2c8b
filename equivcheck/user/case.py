"""A user's training in the judge's form."""

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
    "if this parameter is a plain shard and not a DTensor, pass cuts={name: ((dim, axis),)} with its position, "
    "or full_tensors=fn(module) -> {name: tensor}"
)


class UserCase:
    """The single-device run, limited to tensors in the ranks' traces."""

    def __init__(self, run: SingleDeviceRun, traces: Sequence[UserTrace]) -> None:
        self._run, self._traces = run, traces
        self._held = {piece.name for trace in traces for piece in trace.state.pieces}
        pieces = {piece for trace in traces for piece in trace.steps[0].parameters.pieces}
        self._located = {piece.name for piece in pieces if piece.start or piece.run is not None}

    def judge_case(self) -> Case:
        """Return the case for the judge; every step is required."""
        return Case(
            reference=lambda: self._readable(self._quick),
            confirming_reference=lambda: self._readable(self._run.confirming_reference(None if self._far else self._parts)),
            required_steps=len(self._run.task.batches),
        )

    @property
    def confirming_reference(self) -> Reference:
        """The deciding reference, limited to tensors that ranks could read."""
        return self.judge_case().confirming_reference()

    def hint(self, first: Divergence) -> str:
        """Return a possible explanation for a divergence; empty if none is known."""
        if first.difference is Difference.SHAPE:
            return "" if first.tensor in self._located else _ABOUT_SHARDS
        return self.apart_in_parts

    @property
    def apart_in_parts(self) -> str:
        """A sentence if one device also diverges when it processes the ranks' parts one by one; else empty."""
        if self._far is None:
            return ""
        where = f"step {self._far.step}, {self._far.phase.value}"
        return (
            f"one device that processes the ranks' rows part by part also computes something else ({where}): "
            "is your loss, or a layer such as batch norm, not a mean over rows?"
        )

    def measures(self, calls: Sequence[Sequence[Call]]) -> Measures | None:
        """Return loss, gradient norm and call counts; None if rounding dominates the first gradients."""
        gradients = first_gradients(self._quick.moments)
        return None if gradients is None else measures_of(self._run.trace, gradients, self._traces, calls)

    @property
    def other_settings(self) -> Divergence | None:
        """The first optimizer setting on a rank that differs from one device in the first half of its digits."""
        return other_settings(self._run.trace, self._traces, self._quick.noise_limit)

    @property
    def unread(self) -> tuple[str, ...]:
        """Optimizer state that no rank could read; empty without `full_tensors`."""
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
        """The first moment at which the run over the ranks' parts differs by more than rounding; None if it agrees."""
        return self._run.far_moment(self._quick, self._parts)

    def _readable(self, reference: Reference) -> Reference:
        """The reference without unread optimizer state. Only `full_tensors` leaves state unread."""
        if self._run.task.full_tensors is None:
            return reference
        return replace(reference, moments=tuple(map(self._without_unread, reference.moments)))

    def _without_unread(self, moment: Expected) -> Expected:
        if moment.phase is not Phase.STATE:
            return moment
        present = (there and name in self._held for name, there in zip(moment.table.names, moment.present, strict=True))
        return replace(moment, present=tuple(present))
