"""Measures the cost of batch features in generated scenarios: `python -m tools.bench_features`.

Each scenario is checked with its features and with their defaults, in one process for each. The processes take turns, so a noisy
machine affects both.
"""

from __future__ import annotations

import multiprocessing
import random
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import click

from equivcheck.campaign.batches import EndBatch, batch_seed, run_batch
from equivcheck.checking.check import check
from equivcheck.cli.options import json_option, print_json, seed_option
from equivcheck.scenario import CrossEntropy, Normaliser, Scenario
from equivcheck.strategies import scenarios

_MAX_RANKS = 4
_WARM_UP = 20
"""First pairs, which are not counted, because they import and compile."""
_RESAMPLES = 2000

Pair = tuple[float, float]
"""CPU seconds of a check with the features, and without."""


def without_features(scenario: Scenario) -> Scenario:
    """Return the scenario with one document, one prediction, a mean over tokens, no row weights, and full windows."""
    training = scenario.training
    model, loss = replace(training.model, document_length=None), training.loss
    if model.head is not None:
        model = replace(model, head=replace(model.head, predicts_two=False))
    if isinstance(loss, CrossEntropy):
        loss = replace(loss, per=Normaliser.TOKEN, row_weights=False)
    return replace(scenario, training=replace(training, model=model, loss=loss, data=replace(training.data, last_window=None)))


def cpu_seconds(scenario: Scenario) -> float:
    """Check a scenario. Return the CPU seconds of this process and of processes that it started and that have ended."""
    before = _cpu()
    check(scenario)
    return _cpu() - before


def _cpu() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def generated(number: int, seed: int) -> list[Scenario]:
    """Draw scenarios as `equivcheck fuzz` does."""
    drawn: list[Scenario] = []

    def take(scenario: Scenario) -> None:
        if len(drawn) == number:
            raise EndBatch
        drawn.append(scenario)

    batch = 0
    while len(drawn) < number:
        run_batch(scenarios(max_ranks=_MAX_RANKS), batch_seed(seed, batch), take)
        batch += 1
    return drawn


def measure(drawn: Sequence[Scenario], seed: int) -> list[Pair]:
    """Check each scenario in both processes, in random order."""
    order, pairs = random.Random(seed), list[Pair]()
    with ExitStack() as stack:
        processes: list[Executor] = [
            stack.enter_context(ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))) for _ in range(2)
        ]
        for scenario in stack.enter_context(click.progressbar(drawn, label="checks", file=sys.stderr)):
            seconds = [0.0, 0.0]
            for place in order.sample(range(2), 2):
                checked = without_features(scenario) if place else scenario
                seconds[place] = processes[place].submit(cpu_seconds, checked).result()
            pairs.append((seconds[0], seconds[1]))
    return pairs


def ratio_of(pairs: Sequence[Pair]) -> float:
    """Total CPU seconds with the features, divided by those without."""
    return sum(pair[0] for pair in pairs) / sum(pair[1] for pair in pairs)


def interval(pairs: Sequence[Pair], seed: int) -> tuple[float, float]:
    """95 % interval of the ratio, by drawing the pairs again with replacement."""
    chance = random.Random(seed)
    ratios = sorted(ratio_of(chance.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    return ratios[round(0.025 * _RESAMPLES)], ratios[round(0.975 * _RESAMPLES)]


@click.command()
@click.option("--scenarios", "number", type=click.IntRange(min=1), default=500, show_default=True, help="Counted scenarios.")
@seed_option("Seed of the generated scenarios.", 0)
@json_option
def main(number: int, seed: int, as_json: bool) -> None:
    """Measure the CPU time of checks with documents, second predictions, weights and windows, relative to checks without."""
    pairs = measure(generated(number + _WARM_UP, seed), seed)[_WARM_UP:]
    low, high = interval(pairs, seed)
    if as_json:
        print_json({"ratio": ratio_of(pairs), "low": low, "high": high, "scenarios": number})
    else:
        click.echo(f"ratio {ratio_of(pairs):.3f}, 95 % interval {low:.3f} to {high:.3f}, {number} scenarios")


if __name__ == "__main__":
    main()
