"""Reads the differences that an exported script prints, and computes them from the traces of a check."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from equivcheck import Verdict
from equivcheck.export.forked import run_forked
from equivcheck.export.script import script_of
from equivcheck.layouts.base.script.form import form_of
from equivcheck.layouts.base.script.numbers import Numbers
from equivcheck.layouts.composition.running import Runner
from equivcheck.scenario import Scenario
from equivcheck.training.loop import single_device_setup, train
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.moments import Moment, moments
from equivcheck.worlds.trace.tensors import full_vector, table_of

Differences = dict[str, float]
"""Largest difference by the name in the script: ``step 0 gradient 0.weight``."""

_LINE = re.compile(r"^(step .+): max difference (\S+)$", re.MULTILINE)
_WORDS = {Phase.LOSS: "loss", Phase.GRADIENT: "gradient", Phase.UPDATE: "parameter"}


def printed_differences(script: str, ranks: int, folder: Path) -> tuple[int, Differences, str]:
    """Exit code of a script, the differences it prints, and its output."""
    path = folder / "repro.py"
    path.write_text(script, encoding="utf-8")
    code, printed = run_forked(path, ranks, folder)
    return code, {place: float(number) for place, number in _LINE.findall(printed)}, printed


def run_script(
    scenario: Scenario, folder: Path, numbers: Numbers | None = Numbers.EXACT, verdict: Verdict | None = None
) -> tuple[str, Differences]:
    """Export a scenario, run the script, and require that it succeeds. Returns the script and the differences it prints."""
    script = script_of(scenario, numbers=numbers, verdict=verdict)
    code, differences, printed = printed_differences(script, scenario.layout.mesh.num_ranks, folder)
    assert code == 0, printed
    assert differences
    return script, differences


def differences_of_traces(scenario: Scenario) -> Differences:
    """The largest differences in the traces of simulated ranks, by the names of the script."""
    form = form_of(scenario)
    traces = Runner(world="sim", deadline=60.0).run(scenario).run.values
    reference = moments(train(single_device_setup(scenario.training)))
    found: Differences = {}
    for expected, *ranks in zip(reference, *map(moments, traces), strict=True):
        if expected.phase in (Phase.STATE, Phase.BUFFER):
            continue
        for tensor, difference in _of_moment(expected, ranks):
            found[_place(expected, form.name_of(tensor))] = difference
    return found


def _place(moment: Moment, name: str) -> str:
    if name in ("loss", "norm"):
        return f"step {moment.step} {name}"
    return f"step {moment.step} {_WORDS.get(moment.phase, 'clipped gradient')} {name}"


def _of_moment(expected: Moment, ranks: list[Moment]) -> Iterator[tuple[str, float]]:
    """Largest difference over all ranks for each tensor; a loss is the mean over the ranks that have one."""
    pieces = expected.snapshot.pieces
    table = table_of(pieces)
    values = full_vector(table, expected.snapshot.present, expected.snapshot.values)
    if expected.phase is Phase.LOSS:
        losses = [rank.snapshot.values[0] for rank in ranks if rank.snapshot.present[0]]
        yield "loss", abs(float(np.mean(losses)) - float(values[0]))
        return
    largest = dict.fromkeys(table.names, 0.0)
    for rank in ranks:
        start, snapshot = 0, rank.snapshot
        for piece, present, fits in zip(snapshot.pieces, snapshot.present, snapshot.fits, strict=True):
            if not piece.name:
                start += piece.numel if present else 0
                continue
            there = expected.snapshot.present[table.rows[piece.name]]
            if present != there and piece.numel:
                largest[piece.name] = np.inf
            if present and fits:
                local = snapshot.values[start : start + piece.numel]
                start += piece.numel
                distance = np.abs(local - values[table.positions(piece)]) if there else np.empty(0)
                largest[piece.name] = max(largest[piece.name], float(distance.max(initial=0.0)))
    yield from largest.items()
