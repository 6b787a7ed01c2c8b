"""`equivcheck coverage` reports the features that generated scenarios reach."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from equivcheck.campaign.coverage.features import features
from equivcheck.campaign.coverage.legality import Examples
from equivcheck.campaign.coverage.pairs import format_pairs, legal_pairs, pairs_of, read_pairs
from equivcheck.campaign.plan import Plan
from equivcheck.cli import main
from equivcheck.cli.checker.coverage import write_legal
from equivcheck.scenario import DDP, SGD, Axis, Data, Layer, Layout, Mesh, Model, Scenario, Training


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command and return exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    captured = capsys.readouterr()
    return int(str(left.value.code)), captured.out, captured.err


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """The only scenario drawn, however long the command draws."""
    scenario = one_layer(1, SGD(), DDP())

    def draw_one(_plan: Plan, take: Callable[[Scenario], None]) -> float:
        take(scenario)
        return 0.0

    monkeypatch.setattr("equivcheck.campaign.batches.draw", draw_one)
    return scenario


@pytest.mark.usefixtures("drawn")
def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts add up, and missing pairs are named."""
    code, out, _ = run(capsys, "coverage", "--seconds", "3", "--seed", "3", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["scenarios"] == 1
    assert found["drawn_pairs"] + len(found["missing"]) == found["legal_pairs"]
    assert found["share"] == pytest.approx(found["drawn_pairs"] / found["legal_pairs"], abs=1e-6)
    assert sum(part["drawn"] for part in found["parts"]) == found["drawn_pairs"]
    assert sum(part["legal"] for part in found["parts"]) == found["legal_pairs"]
    assert found["seed"] == 3
    assert set(found["unknown_features"]).isdisjoint(map(str, legal_pairs().features))


@pytest.mark.usefixtures("drawn")
def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has pairs of parts, then the pairs that are missing most."""
    code, out, _ = run(capsys, "coverage", "--seconds", "0.5", "--layout", "ddp")
    assert code == 0
    assert "layout.parallelisms" in out
    assert "pairs of features covered: " in out
    assert "features with the most pairs not covered:" in out


def test_a_layout_that_does_not_exist_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The error lists existing layouts; the exit code is 2."""
    code, _, err = run(capsys, "coverage", "--seconds", "1", "--layout", "dpp")
    assert code == 2
    assert "layout 'dpp' is not valid: it does not exist. Did you mean ddp? Expected one of ddp" in err


def one_layer(width: int, optimizer: SGD, ddp: DDP) -> Scenario:
    """A training with one layer on two ranks."""
    layout = Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(ddp,))
    model, data = Model(features=2, layers=(Layer(width=width),)), Data(microbatches=(2,))
    return Scenario(training=Training(model=model, data=data, optimizer=optimizer), layout=layout)


def two_examples() -> Examples:
    """Two scenarios whose features can all be mixed."""
    found = Examples()
    found.add(one_layer(1, SGD(), DDP()))
    found.add(one_layer(2, SGD(momentum=0.5, nesterov=True), DDP(no_sync=True, static_graph=True)))
    return found


def test_legal_pairs_are_tried_until_the_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each reading of the clock is one second later, so three seconds are enough for two pairs."""
    file, examples = tmp_path / "pairs.json", two_examples()
    drawn, untried = examples.legal.count, len(examples.pairs_never_drawn())
    write_legal(examples, file, Plan(seconds=3, seed=0), clock=map(float, count()).__next__)
    assert drawn < read_pairs(file.read_text()).count
    assert f"{untried - 2} of {untried} others not tried" in capsys.readouterr().err
    complete = two_examples()
    write_legal(complete, file, Plan(seconds=3, seed=0), clock=lambda: 0.0)
    assert f"0 of {untried} others not tried" in capsys.readouterr().err
    assert complete.legal.count > examples.legal.count


def test_pairs_already_in_the_file_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str], drawn: Scenario) -> None:
    """The command adds to the file, also if it draws only another layout."""
    file = tmp_path / "pairs.json"
    one, other = sorted(features(drawn))[:2]
    named = replace(one, value="not drawn")
    file.write_text(format_pairs(pairs_of({named, other}, [(named, other)])))
    code, _, _ = run(capsys, "coverage", "--seconds", "0.2", "--legal", str(file))
    table = read_pairs(file.read_text())
    assert code == 0
    assert table.features[next(table.of(table.features.index(named)))] == other
    assert table.count > 1


ONE_ROW = '{"features": [["a", "b", "c", "d"], ["a", "b", "c", "e"]], "pairs": ["2"]}'


@pytest.mark.parametrize("text", ["[1, 2]", ONE_ROW], ids=["list", "fewer rows than features"])
def test_a_file_that_is_no_table_is_refused_before_drawing(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file stays as it is."""
    file = tmp_path / "notes.json"
    file.write_text(text)
    code, _, err = run(capsys, "coverage", "--seconds", "1000", "--legal", str(file))
    assert code == 2
    assert "is not a table of legal pairs" in err
    assert file.read_text() == text
