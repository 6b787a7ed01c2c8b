"""Compare all ranks' communication calls with the calls predicted from the scenario."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from equivcheck.layouts.base.expected_calls.communication import Key, Totals, describe_calls, order_of, totals
from equivcheck.layouts.base.expected_calls.torch_versions import CALLS_AMONG_ONE_RANK
from equivcheck.layouts.composition.expected_calls import Prediction, predict_calls
from equivcheck.scenario import Layout, Scenario
from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds.call import Call
from equivcheck.worlds.ranks import Run
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase
from equivcheck.worlds.trace.stage import Stage

_NOT_MODELLED = (Stage.SETUP, Stage.READING)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallComparison:
    """Differences between the ranks' communication calls and the calls predicted from the scenario."""

    divergences: tuple[Divergence, ...] = ()
    """One entry for each kind with too many or too few calls or bytes, at the first rank with a difference. Sorted by step
    and stage.
    """
    unmodelled: str = ""
    """Why not all calls were compared. Empty if all were compared."""


def compare_calls(scenario: Scenario, world: str, run: Run) -> CallComparison:
    """Compare each rank's communication calls in `run` with the calls predicted from the scenario.

    If `world` records no calls, the result says so and has no divergences.
    """
    if not run.calls:
        return CallComparison(unmodelled=f"world {world} does not see calls")
    prediction = predict_calls(scenario.training, scenario.layout)
    if prediction.reason:
        return CallComparison(unmodelled=prediction.reason)
    found: dict[Key, Divergence] = {}
    for rank, calls in enumerate(run.calls):
        found = differing_calls(scenario, rank, calls) | found
    divergences = tuple(found[key] for key in sorted(found, key=order_of))
    return CallComparison(divergences=divergences, unmodelled=prediction.unmodelled)


def differing_calls(scenario: Scenario, rank: int, calls: Iterable[Call]) -> dict[Key, Divergence]:
    """Compare one rank's communication calls during the steps with the calls predicted from the scenario.

    Return each difference in the number of calls or bytes, sorted by step and stage.
    """
    training, layout = scenario.training, scenario.layout
    prediction = predict_calls(training, layout, rank)
    actual = _compared(totals(calls, layout.mesh, without=_NOT_MODELLED), prediction, layout)
    expected = _compared(prediction.with_bytes_from(actual), prediction, layout)
    if expected == actual:
        return {}
    keys = sorted(expected.keys() | actual.keys(), key=order_of)
    return {key: _divergence(key, rank, expected, actual) for key in keys if expected.get(key) != actual.get(key)}


def _compared(found: Totals, prediction: Prediction, layout: Layout) -> Totals:
    # Not every version of torch calls collectives on a group of one rank, so such calls are left out.
    one_rank = is_torch_in(CALLS_AMONG_ONE_RANK)
    left_out = prediction.left_out
    return {
        key: counted
        for key, counted in found.items()
        if (key[-1] or not one_rank) and not any(each.leaves_out(key, layout) for each in left_out)
    }


def _divergence(key: Key, rank: int, expected: Totals, actual: Totals) -> Divergence:
    step, stage, op, axes = key
    modelled, counted = expected.get(key, (0, 0)), actual.get(key, (0, 0))
    return Divergence(
        step=step,
        phase=Phase.COMMUNICATION,
        tensor=f"{op} over {axes or 'one rank'} in {stage.value}",
        difference=Difference.BYTES if modelled[0] == counted[0] else Difference.CALLS,
        rank=rank,
        expected=describe_calls(*modelled),
        actual=describe_calls(*counted),
        error=float("inf"),
    )
