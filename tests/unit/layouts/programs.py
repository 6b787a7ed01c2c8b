"""Functions that ranks in other processes run for the tests here."""

from __future__ import annotations

import sys

from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from equivcheck.layouts.composition.program import rank_program
from equivcheck.scenario import Scenario
from equivcheck.training.setup import Setup


def compiled_graphs(scenario: Scenario) -> tuple[int, int, bool]:
    """Number of compiled forward and backward graphs, and whether the compiler is back in its former state."""
    before = _settings()
    counters.clear()
    captured: list[tuple[int, int]] = []

    def note(_optimizer: object, _step: int) -> None:
        captured.append((counters["stats"]["unique_graphs"], counters["compiled_autograd"]["captures"]))

    def alter(setup: Setup) -> None:
        setup.before_update.append(note)

    with inductor.patch(force_disable_caches=True):  # what is taken from a cache on disk changes less
        rank_program(scenario, alter)
    return (*captured[-1], before == _settings())


def _settings() -> tuple[object, ...]:
    from torch._dynamo import config, trace_rules

    modules = frozenset(trace_rules.get_legacy_mod_inlinelist())
    fused = inductor._fuse_ddp_communication, inductor._fuse_ddp_bucket_size
    return config.optimize_ddp, config.recompile_limit, *fused, modules, sys.getrecursionlimit()
