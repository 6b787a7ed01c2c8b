"""The docstring of a script: what is wrong, where it shows first, how to run it."""

from __future__ import annotations

import re

from equivcheck.layouts.base.script.form import Form
from equivcheck.layouts.base.script.numbers import Numbers
from equivcheck.layouts.base.script.text import paragraph
from equivcheck.mutants.mutant import Mutant
from equivcheck.oracle.known_issues.known import known_issues
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.scenario import Parallelism, Scenario
from equivcheck.system.printable import printable

TITLES: dict[str, str] = {
    "ddp": "DistributedDataParallel",
    "fsdp1": "FullyShardedDataParallel",
    "fsdp2": "fully_shard",
    "replicate": "replicate",
    "tensor_parallel": "parallelize_module",
    "spmd": "DTensor propagation",
    "pipeline": "a pipeline",
}
"""What users call each parallelism."""


def docstring(  # noqa: PLR0913 - all by keyword
    *, scenario: Scenario, form: Form, verdict: Verdict | None, mutant: Mutant | None, numbers: Numbers, name: str, torch: str
) -> list[str]:
    """The lines of the docstring."""
    ranks = scenario.layout.mesh.num_ranks
    parts = [paragraph(_title(scenario, verdict, mutant)), *_evidence(form, verdict)]
    if numbers is Numbers.DRAWN:
        parts.append(paragraph("Parameters and data are drawn by torch, and not those that this was first seen with."))
    parts.append(f"    torchrun --standalone --nproc-per-node {ranks} {name}")
    shows = "a difference shows" if verdict is None or verdict.failure is None else "it fails or a difference shows"
    parts.append(f"Exit code 1 when {shows}, 0 when none does. Seen on torch {torch}, CPU, gloo.")
    text = printable("\n\n".join(parts)).replace("\\", "\\\\").replace('"""', "'''")
    return [*f'"""{text}'.splitlines(), '"""']


def _title(scenario: Scenario, verdict: Verdict | None, mutant: Mutant | None) -> str:
    where = _where(scenario)
    if mutant is not None:
        return f"A parallel training with a bug ({where}): {_sentence(mutant.wrong)}"
    outcome = Outcome.EQUIVALENT if verdict is None else verdict.outcome
    if outcome is Outcome.CRASHED or (verdict is not None and verdict.failure is not None and not verdict.failure.hung):
        return f"Training fails with {where}, but not on one device."
    if outcome is Outcome.HUNG or (verdict is not None and verdict.failure is not None):
        return f"Training hangs with {where}."
    if verdict is not None and verdict.divergence is not None:
        return f"Training with {where} does not compute what one device computes."
    return f"Training with {where}, and on one device."


def _where(scenario: Scenario) -> str:
    names = " over ".join(_name(parallelism) for parallelism in reversed(scenario.layout.parallelisms))
    ranks = scenario.layout.mesh.num_ranks
    return f"{names} on {'1 rank' if ranks == 1 else f'{ranks} ranks'}"


def _name(parallelism: Parallelism) -> str:
    return TITLES.get(parallelism.tag, parallelism.tag)


def _evidence(form: Form, verdict: Verdict | None) -> list[str]:
    if verdict is None or not verdict.reason:
        return []
    reason = verdict.reason
    found = []
    if verdict.known:
        issue = next(issue for issue in known_issues() if issue.id == verdict.known)
        reason = reason.removeprefix(f"{issue.link}: ")
        found.append(paragraph(_sentence(_reported(issue.link))))
    if verdict.diagnosis is not None:
        found.append(paragraph(_sentence(form.translated(verdict.diagnosis.sentence))))
    reason = re.sub(r"\b(step \d+) clipping norm\b", r"\1 norm", re.sub(r"\b(step \d+) update ", r"\1 parameter ", reason))
    reason = re.sub(r"\b(step \d+) clipping ", r"\1 clipped gradient ", reason)
    first = "First divergence: " if verdict.divergence is not None else "What happens: " if verdict.failure is not None else ""
    return [*found, paragraph(_sentence(first + form.translated(reason)))]


def _reported(link: str) -> str:
    return f"Reported as {link}" if link.startswith("http") else link[:1].upper() + link[1:]


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
