"""The end of a page of the docs: what each judge said of each program. ``python -m typed.page`` asks them anew and writes it."""

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
BEGIN = "## Of each program\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program, as it is or with a change."""

    program: Program
    """That is right."""
    change: Change | None
    """None for the program itself."""

    @property
    def name(self) -> str:
        """Of the program, and of its change."""
        return f"{self.program.name}: {self.change.about if self.change else 'right'}"

    @property
    def is_wrong(self) -> bool:
        """Whether it trains something else."""
        return self.change is not None and self.change.is_wrong


CASES = tuple(Case(program=program, change=change) for program in PROGRAMS for change in (None, *program.changes))


def measured() -> dict[str, Judged]:
    """What was said of each case when the page was written."""
    return {name: Judged(**found) for name, found in json.loads(MEASURED.read_text("utf-8")).items() if name != "spmd_types"}


def measured_version() -> str:
    """Of the type checker."""
    return json.loads(MEASURED.read_text("utf-8"))["spmd_types"]


def tail() -> str:
    """Totals, what a judge does not see or refuses, and a table for each program."""
    found = measured()
    return "\n\n".join([_totals(found), _lists(found), BEGIN.rstrip(), *(_table(program, found) for program in PROGRAMS)]) + "\n"


JUDGES: dict[str, Callable[[Judged], bool]] = {
    "runs": lambda said: said.is_seen,
    "types": lambda said: bool(said.types),
    "types, in forward and backward alone": lambda said: said.is_refused_before,
    "runs or types": lambda said: said.is_seen or bool(said.types),
}


def _totals(found: dict[str, Judged]) -> str:
    wrong = [found[case.name] for case in CASES if case.is_wrong]
    right = [found[case.name] for case in CASES if not case.is_wrong]
    head = [f"| spmd_types {measured_version()} | wrong programs that are seen | right ones that are refused |", "|---|---|---|"]
    lines = [
        f"| {name} | {sum(map(sees, wrong))} of {len(wrong)} | {sum(map(sees, right))} of {len(right)} |"
        for name, sees in JUDGES.items()
    ]
    seen = [each for each in wrong if each.is_seen]
    causes = f"Of the {len(seen)} that runs see, the verdict names a cause for {sum(bool(each.cause) for each in seen)}."
    changed = sum(case.change is not None and not case.is_wrong for case in CASES)
    kinds = f"Right are {len(PROGRAMS)} programs as they are, and {changed} after a change."
    return "\n".join([*head, *lines, "", f"{kinds} {causes}"])


def _lists(found: dict[str, Judged]) -> str:
    wrong = [case for case in CASES if case.is_wrong]
    right = [case for case in CASES if not case.is_wrong]
    return "\n\n".join(
        [
            _list("Wrong, and runs do not see it", [case for case in wrong if not found[case.name].is_seen]),
            _list("Right, and types refuse it", [case for case in right if found[case.name].types]),
        ]
    )


def _list(title: str, cases: Iterable[Case]) -> str:
    return "\n".join([f"{title}:\n", *(f"- {case.name}" for case in cases)])


def _table(program: Program, found: dict[str, Judged]) -> str:
    head = [f"### {program.name}\n", "| change | types | runs differ first | cause that is named |", "|---|---|---|---|"]
    return "\n".join([*head, *(_row(case, found[case.name]) for case in CASES if case.program is program)])


def _row(case: Case, judged: Judged) -> str:
    about = case.change.about if case.change else "none"
    about = about if case.is_wrong else f"*{about}*"
    types = f"{'of gradients: ' * judged.needs_gradients}{judged.types}" if judged.types else "accept"
    return f"| {about} | {types} | {judged.first or judged.outcome} | {judged.cause} |"


def write() -> None:
    """Ask both judges about every case, and bring the page up to date."""
    rows = {case.name: asdict(judged(case.program, case.change, explain=True)) for case in CASES}
    MEASURED.write_text(json.dumps({"spmd_types": version("spmd_types")} | rows, indent=1) + "\n", "utf-8")
    text = PAGE.read_text("utf-8")
    PAGE.write_text(text[: text.index("| spmd_types ")] + tail(), "utf-8")


if __name__ == "__main__":
    write()
