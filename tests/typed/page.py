"""Writes the tables at the end of a docs page. ``python -m typed.page`` asks both judges again and updates the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from examples.pages import ROOT
from typed import replicas, sequence, shards, tensor, tokens
from typed.judges import Judged, judged
from typed.program import Change, Program

PROGRAMS: tuple[Program, ...] = tuple(
    program for module in (tensor, sequence, replicas, shards, tokens) for program in module.PROGRAMS
)
PAGE = ROOT / "docs/explanation/type_checker_and_runs.md"
MEASURED = Path(__file__).with_name("judged.json")
BEGIN = "## Results by program\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program, unchanged or with one change."""

    program: Program
    """A correct program."""
    change: Change | None
    """None for the unchanged program."""

    @property
    def name(self) -> str:
        """Program and change, for display."""
        return f"{self.program.name}: {self.change.about if self.change else 'right'}"

    @property
    def is_wrong(self) -> bool:
        """Whether it trains another model than the unchanged program."""
        return self.change is not None and self.change.is_wrong


CASES = tuple(Case(program=program, change=change) for program in PROGRAMS for change in (None, *program.changes))


def measured() -> dict[str, Judged]:
    """Judgements by case name, from the last time the page was written."""
    return {name: Judged(**found) for name, found in json.loads(MEASURED.read_text("utf-8")).items() if name != "spmd_types"}


def measured_version() -> str:
    """Version of the type checker that was measured."""
    return json.loads(MEASURED.read_text("utf-8"))["spmd_types"]


def tail() -> str:
    """Totals, lists of wrong judgements, and a table for each program."""
    found = measured()
    return "\n\n".join([_totals(found), _lists(found), BEGIN.rstrip(), *(_table(program, found) for program in PROGRAMS)]) + "\n"


JUDGES: dict[str, Callable[[Judged], bool]] = {
    "runs": lambda said: said.is_seen,
    "types": lambda said: bool(said.types),
    "types, without types for gradients": lambda said: said.is_refused_before,
    "runs or types": lambda said: said.is_seen or bool(said.types),
}


def _totals(found: dict[str, Judged]) -> str:
    wrong = [found[case.name] for case in CASES if case.is_wrong]
    right = [found[case.name] for case in CASES if not case.is_wrong]
    head = [f"| spmd_types {measured_version()} | wrong programs found | correct programs rejected |", "|---|---|---|"]
    lines = [
        f"| {name} | {sum(map(sees, wrong))} of {len(wrong)} | {sum(map(sees, right))} of {len(right)} |"
        for name, sees in JUDGES.items()
    ]
    seen = [each for each in wrong if each.is_seen]
    causes = f"Of {len(seen)} wrong programs found by runs, {sum(bool(each.cause) for each in seen)} have a named cause."
    changed = sum(case.change is not None and not case.is_wrong for case in CASES)
    kinds = f"{len(PROGRAMS)} unchanged programs and {changed} changed ones are correct."
    return "\n".join([*head, *lines, "", f"{kinds} {causes}"])


def _lists(found: dict[str, Judged]) -> str:
    wrong = [case for case in CASES if case.is_wrong]
    right = [case for case in CASES if not case.is_wrong]
    return "\n\n".join(
        [
            _list("Wrong programs that runs do not find", [case for case in wrong if not found[case.name].is_seen]),
            _list("Correct programs that types reject", [case for case in right if found[case.name].types]),
        ]
    )


def _list(title: str, cases: Iterable[Case]) -> str:
    return "\n".join([f"{title}:\n", *(f"- {case.name}" for case in cases)])


def _table(program: Program, found: dict[str, Judged]) -> str:
    head = [f"### {program.name}\n", "| change | types | first difference in runs | named cause |", "|---|---|---|---|"]
    return "\n".join([*head, *(_row(case, found[case.name]) for case in CASES if case.program is program)])


def _row(case: Case, judged: Judged) -> str:
    about = case.change.about if case.change else "none"
    about = about if case.is_wrong else f"*{about}*"
    types = f"{'gradient types: ' * judged.needs_gradients}{judged.types}" if judged.types else "accept"
    first = judged.first.replace("loss loss", "loss")  # the phase and the tensor
    return f"| {about} | {types} | {first or judged.outcome} | {judged.cause} |"


def write() -> None:
    """Ask both judges about every case, and update the page."""
    rows = {case.name: asdict(judged(case.program, case.change, explain=True)) for case in CASES}
    MEASURED.write_text(json.dumps({"spmd_types": version("spmd_types")} | rows, indent=1) + "\n", "utf-8")
    text = PAGE.read_text("utf-8")
    PAGE.write_text(text[: text.index("| spmd_types ")] + tail(), "utf-8")


if __name__ == "__main__":
    write()
