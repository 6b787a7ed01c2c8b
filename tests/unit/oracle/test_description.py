"""A verdict's text has at most ten lines before they are wrapped, and the scenario, and is the same in every output."""

from __future__ import annotations

import ast
import pickle
from dataclasses import replace

import pytest
from rich.console import Console

from equivcheck import NotEquivalent, Verdict
from equivcheck.campaign.findings.environment import environment
from equivcheck.campaign.findings.readme import readme
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.oracle.verdict.verdict import CODE_WIDTH, Outcome
from equivcheck.programs.nouns import Leaf, Operation, TensorProgram
from equivcheck.programs.verdict import ProgramVerdict
from equivcheck.report.verdict_text import print_verdict
from equivcheck.scenario import Scenario
from equivcheck.worlds.failure import Failure, FailureKind, RankReport, RankState
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase
from unit.diagnosis.faults import ON_DDP

DIVERGED = Verdict(
    outcome=Outcome.DIVERGED,
    scenario=ON_DDP,
    world="sim",
    reason="something differs",
    divergence=Divergence(
        step=0,
        phase=Phase.GRADIENT,
        tensor="layers.0.linear.weight",
        difference=Difference.VALUE,
        rank=1,
        index=(2, 0),
        expected="0.5",
        actual="1.0",
        error=1.25e13,
    ),
    followers=(
        "step 0 gradient layers.0.linear.bias",
        "step 0 update layers.0.linear.weight",
        "step 0 update layers.1.linear.bias",
        "step 1 loss loss",
    ),
    diagnosis=Diagnosis(cause=Cause.SUMMED, sentence="all gradients are the sum over the 2 dp ranks, not the mean", exact=True),
    drift="in every step, also when it starts from the reference's values",
    confirmed="diverged on gloo too",
)
TEXT = """\
DIVERGED: ddp on 2 ranks, widths 4-4-2, Adam, 2 microbatches of 4 + 4 rows, 2
  steps, float64, in sim
  first: step 0, gradient, layers.0.linear.weight[2, 0] on rank 1
    expected 0.5
    actual   1.0   (1.25e+13 x tolerance)
  then:  step 0 gradient of layers.0.linear.bias, step 0 update of 2 tensors,
         step 1 loss
  why:   all gradients are the sum over the 2 dp ranks, not the mean
  where: in every step, also when it starts from the reference's values
  confirmed: diverged on gloo too
  again: run the case below in @example(...), or its JSON in `equivcheck check`"""


def evaluated(code: str) -> object:
    """Evaluate a case's code with nothing but its own imports."""
    imports, case = ast.parse(code).body[:-1], ast.parse(code).body[-1]
    assert isinstance(case, ast.Expr)
    variables: dict[str, object] = {}
    exec(compile(ast.Module(imports, []), "imports", "exec"), variables)
    return eval(compile(ast.Expression(case.value), "case", "eval"), variables)


def test_a_divergence_is_told_in_ten_lines() -> None:
    """Scenario in words, first divergence, followers, why, where, confirmed, how to run it again, code. Lines are wrapped."""
    text, code = DIVERGED.describe().removesuffix(DIVERGED.code()), DIVERGED.code()

    assert text == f"{TEXT}\n"
    assert 1 + len(DIVERGED.evidence()) <= 10
    assert max(map(len, text.splitlines())) <= 80
    assert evaluated(code) == ON_DDP
    assert max(map(len, code.splitlines())) <= CODE_WIDTH


def test_a_program_is_printed_with_its_imports() -> None:
    """Its code runs as it is printed, too."""
    program = TensorProgram(mesh=(2,), statements=(Leaf(shape=(2,), placements=("S(0)",)), Operation(name="neg")))
    verdict = ProgramVerdict(outcome=Outcome.EQUIVALENT, program=program, world="sim")
    assert evaluated(verdict.code()) == program


def test_a_loss_is_named_once() -> None:
    """It needs no tensor name after the phase."""
    assert DIVERGED.divergence is not None
    loss = replace(DIVERGED.divergence, phase=Phase.LOSS, tensor="loss", index=(), rank=-1)
    assert "  first: step 0, loss averaged over ranks\n" in replace(DIVERGED, divergence=loss).describe()


def test_every_face_has_the_same_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """The command line adds the time, and the finding's README has the same text."""
    print_verdict(Console(width=80, no_color=True), DIVERGED)
    printed = capsys.readouterr().out

    assert printed == "\n".join([TEXT.replace("in sim\n", "in sim, 0 ms\n"), DIVERGED.code(), ""])
    assert DIVERGED.describe() in readme("0123456789ab", DIVERGED, environment())


def test_that_nothing_explains_it_is_said_only_where_it_was_asked() -> None:
    """A verdict without a diagnosis run has no "why" line."""
    unexplained = replace(DIVERGED, diagnosis=None)

    assert "why:   unexplained: no known fault reproduces this" in unexplained.describe()
    assert "why:" not in replace(unexplained, drift="").describe()


def test_calls_that_differ_point_at_an_unexplained_fault() -> None:
    """Only calls in the first wrong step do, because later calls may differ as a consequence."""
    calls = "all_reduce.sum over tp in compute"
    for step, is_named in ((0, True), (1, False)):
        followers = (f"step {step} communication {calls}",)
        text = replace(DIVERGED, diagnosis=None, followers=followers).unexplained_text
        assert text.endswith(f"this; calls differ in the same step: {calls}") is is_named


def test_ranks_in_one_place_share_a_line() -> None:
    """A hang on many ranks fits in ten lines, too."""
    waiting = [RankReport(rank=rank, state=RankState.WAITING, pending=f"barrier {rank % 6}") for rank in range(8)]
    failure = Failure(kind=FailureKind.DEADLOCK, summary="no rank can go on", reports=tuple(waiting))
    verdict = Verdict(outcome=Outcome.HUNG, scenario=ON_DDP, world="sim", reason=failure.summary, failure=failure)

    assert "ranks 0, 6 waiting barrier 0" in verdict.evidence()
    assert verdict.evidence()[-2] == "and 2 more ranks elsewhere"
    assert 1 + len(verdict.evidence()) <= 10


def test_an_error_is_explained_when_it_is_read_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis raises hundreds while it shrinks, so only a printed one costs a diagnosis. It can be pickled."""
    asked: list[Scenario] = []

    def explain(verdict: Verdict, _alter: object) -> Verdict:
        asked.append(verdict.scenario)
        return replace(verdict, drift="in every step, also when it starts from the reference's values")

    monkeypatch.setattr("equivcheck.oracle.verdict.verdict._explain", explain)
    with pytest.raises(NotEquivalent) as caught:
        replace(DIVERGED, diagnosis=None, drift="").assert_equivalent()
    assert not asked

    assert "in every step, also when it starts from the reference's values" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert asked == [ON_DDP]


def test_a_diagnosis_that_fails_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict stays, with the diagnosis's error as a note."""

    def explain(*_: object) -> Verdict:
        raise KeyError("no such cause")

    monkeypatch.setattr("equivcheck.oracle.verdict.verdict._explain", explain)
    plain = replace(DIVERGED, diagnosis=None, drift="")
    with pytest.raises(NotEquivalent) as caught:
        plain.assert_equivalent()

    assert str(caught.value) == f"{plain.describe()}\n(no diagnosis: KeyError: 'no such cause')"
    assert str(NotEquivalent("a text")) == "a text"
