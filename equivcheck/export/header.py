"""Writes a script's docstring: the failure, its first evidence, and the command to run the script."""

from __future__ import annotations

import re

from equivcheck.layouts.base.script.form import Form
from equivcheck.layouts.base.script.numbers import Numbers
from equivcheck.layouts.base.script.text import paragraph
from equivcheck.oracle.known_issues.known import known_issues
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.scenario import Scenario
from equivcheck.system.printable import escape_unprintable

TITLES: dict[str, str] = {
    "ddp": "DistributedDataParallel",
    "fsdp1": "FullyShardedDataParallel",
    "fsdp2": "fully_shard",
    "replicate": "replicate",
    "tensor_parallel": "parallelize_module",
    "spmd": "DTensor propagation",
    "pipeline": "a pipeline",
}
"""API name for each parallelism, by tag."""


def docstring(  # noqa: PLR0913 - all by keyword
    *, scenario: Scenario, form: Form, verdict: Verdict | None, numbers: Numbers, name: str, torch: str
) -> list[str]:
    """Return the script's docstring as lines, with quotes.

    It describes the verdict, and how to run the script, which is called `name`. `form` translates parameter names to those in the
    script, and `torch` is the version to mention.
    """
    ranks = scenario.layout.mesh.num_ranks
    parts = [paragraph(_title(scenario, verdict)), *_evidence(form, verdict)]
    if numbers is Numbers.DRAWN:
        parts.append(paragraph("Parameters and data are random numbers of torch, not the numbers of the original finding."))
    parts.append(f"    torchrun --standalone --nproc-per-node {ranks} {name}")
    failed = "the runs differ" if verdict is None or verdict.failure is None else "a rank fails or the runs differ"
    parts.append(f"Exit code 1 if {failed}, else 0. Seen on torch {torch}, CPU, gloo.")
    text = escape_unprintable("\n\n".join(parts)).replace("\\", "\\\\").replace('"""', "'''")
    return [*f'"""{text}'.splitlines(), '"""']


def _title(scenario: Scenario, verdict: Verdict | None) -> str:
    names = " over ".join(TITLES.get(each.tag, each.tag) for each in reversed(scenario.layout.parallelisms))
    ranks = scenario.layout.mesh.num_ranks
    layout = f"{names} on {'1 rank' if ranks == 1 else f'{ranks} ranks'}"
    outcome = Outcome.EQUIVALENT if verdict is None else verdict.outcome
    if outcome is Outcome.CRASHED or (verdict is not None and verdict.failure is not None and not verdict.failure.hung):
        return f"Training fails with {layout}, but not on one device."
    if outcome is Outcome.HUNG or (verdict is not None and verdict.failure is not None):
        return f"Training hangs with {layout}."
    if verdict is not None and verdict.divergence is not None:
        return f"Training with {layout} differs from training on one device."
    return f"Training with {layout}, and on one device."


def _evidence(form: Form, verdict: Verdict | None) -> list[str]:
    if verdict is None or not verdict.reason:
        return []
    reason = verdict.reason
    found = []
    if verdict.known:
        issue = next(issue for issue in known_issues() if issue.id == verdict.known)
        reason = reason.removeprefix(f"{issue.summary}: ")
        found.append(paragraph(f"Known problem of torch: {issue.summary}."))
    if verdict.diagnosis is not None:
        found.append(paragraph(_sentence(form.translate_names(verdict.diagnosis.sentence))))
    # Verdicts say "clipping norm", "update" and "clipping". Scripts print "norm", "parameter" and "clipped gradient" instead.
    reason = re.sub(r"\b(step \d+) clipping norm\b", r"\1 norm", re.sub(r"\b(step \d+) update ", r"\1 parameter ", reason))
    reason = re.sub(r"\b(step \d+) clipping ", r"\1 clipped gradient ", reason)
    first = "First divergence: " if verdict.divergence is not None else "Failure: " if verdict.failure is not None else ""
    return [*found, paragraph(_sentence(first + form.translate_names(reason)))]


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
