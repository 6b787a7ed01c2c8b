"""The generated pages, as MyST Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
from rich.pretty import pretty_repr

from equivcheck.layouts.base.interventions import INTERVENTIONS
from generator import sources

"""The scripts of known issues, as seen from the generated pages."""
CODE_WIDTH = 80
"""Characters of a line of code."""
GAPS, FIXED = "Gaps of torch", "Fixed limits"
"""Two kinds of limits."""
SHOWS = {"shows": "yes", "does not": "no", "cannot run": "-"}
"""What the table says of what a script did."""
TIMES = " x "
"""What stands between the parallelisms of a layout's name."""


def limits() -> str:
    """What each layout cannot run, and why."""
    sections = [_limits_of(name, found) for name, found in sources.limits_by_layout().items() if found]
    return "\n\n".join([_LIMITS, *sections]) + "\n"


def _limits_of(name: str, found: Iterable[sources.AnyLimit]) -> str:
    kinds: dict[str, list[str]] = {GAPS: [], FIXED: []}
    for limit in found:
        kinds[GAPS if getattr(limit, "upstream", False) else FIXED].append(f"- {_prose(sources.reason_with_versions(limit))}")
    lists = ["\n".join([f"{title}:\n", *reasons]) for title, reasons in kinds.items() if reasons]
    return "\n\n".join([f"## {f'`{name}`' if name else 'Any layout'}", *lists])


def interventions() -> str:
    """What is added to the ranks' code, and why."""
    entries = (f"- {_prose(one.what)}: {_prose(one.why)} ({one.upstream})" for one in INTERVENTIONS)
    return "\n\n".join([_INTERVENTIONS, "\n".join(entries)]) + "\n"


def mutants() -> str:
    """Every mutant, family by family."""
    families = dict.fromkeys(mutant.family for mutant in sources.mutants().values())
    sections = [_mutants_of(family) for family in families]
    return "\n\n".join([_MUTANTS.format(count=len(sources.mutants())), *sections]) + "\n"


def _mutants_of(family: object) -> str:
    title = str(family.value).replace("_", " ").capitalize()
    return "\n\n".join([f"## {title}", *(_mutant(each) for each in sources.mutants().values() if each.family is family)])


def _mutant(mutant: object) -> str:
    return (
        f"`{mutant.name}`\n: {_prose(mutant.wrong)}\n\n"
        f"  *Layouts*: {_briefly(mutant.layouts)}. *Shown by*: {_smallest(mutant.minimum)}."
    )


def _smallest(minimum: object) -> str:
    counts = ((minimum.ranks, "rank"), (minimum.layers, "layer"), (minimum.steps, "step"))
    return ", ".join(_counted(count, noun) for count, noun in counts)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _briefly(layouts: Iterable[str]) -> str:
    """Names of layouts, with those over another parallelism after the others: ``ddp, fsdp2; over tensor_parallel: fsdp2``."""
    alone = [name for name in layouts if TIMES not in name]
    over: dict[str, list[str]] = {}
    for name in layouts:
        outer, times, inner = name.partition(TIMES)
        if times:
            over.setdefault(inner, []).append(outer)
    parts = [", ".join(alone)] if alone else []
    return _prose("; ".join(parts + [f"over {inner}: {', '.join(outers)}" for inner, outers in over.items()]))


def known_issues() -> str:
    """Every problem of torch on file: what, in which versions, the smallest scenario and the script that show it."""
    smallest = sources.smallest_scenarios()
    found = sources.all_known_issues()
    versions = list(dict.fromkeys(version for row in sources.measured().values() for version in row))
    rows = [
        (f"[`{issue.id}`](#{_anchor(issue.id)})", issue.kind.value.replace("_", " "), *_shows(issue, versions)) for issue in found
    ]
    table = _table(("issue", "kind", *versions), rows)
    sections = [_issue(issue, smallest.get(issue.id)) for issue in found]
    return "\n\n".join([_ISSUES.format(count=len(found)), table, *sections]) + "\n"


def _shows(issue: object, versions: Iterable[str]) -> Iterable[str]:
    """Of each version, what the script of an issue did there."""
    row = sources.measured()[issue.id]
    return (SHOWS[row[version].shows.value] if version in row else "" for version in versions)


def _versions(issue: object) -> str:
    """The range of an issue, and why its script cannot run on others, if that is so."""
    row = sources.measured()[issue.id]
    reasons = {version: found.reason.rstrip(".") for version, found in row.items() if found.reason}
    return _prose(
        f"torch {issue.torch}" + "".join(f"; on {version} its script cannot run: {why}" for version, why in reasons.items())
    )


def _issue(issue: object, smallest: object | None) -> str:
    script = sources.issue_script(issue)
    explanation = script.split('"""')[1].split("\n\n")[1]
    facts = [
        f"- **Kind**: {issue.kind.value.replace('_', ' ')}",
        f"- **Versions**: {_versions(issue)}",
        f"- **Layouts**: {', '.join(f'`{tag}`' for tag in issue.layouts) or 'none of those that are generated'}",
        f"- **Upstream**: {_upstream(issue.link or 'not reported')}",
        *([f"- **Avoided if**: {_avoided_where(issue)}"] if issue.without else []),
    ]
    parts = [f"({_anchor(issue.id)})=\n\n## {_prose(issue.id)}", _prose(f"{issue.title}."), _prose(explanation), "\n".join(facts)]
    if smallest is not None:
        parts += ["The smallest scenario that shows it:", f"```python\n{pretty_repr(smallest, max_width=CODE_WIDTH)}\n```"]
    return "\n\n".join([*parts, _script(f"{issue.id}.py", issue.ranks, script)])


def dtensor_differences() -> str:
    """What DTensor is known to get wrong, with a script and the text of an issue for each."""
    versions = list(dict.fromkeys(version for each in sources.ON_FILE for version in each.shows))
    rows = [
        (
            f"[{_prose(sources.sentence_of(each))}](#{_place(each.id)})",
            *(each.shows.get(version, "") for version in versions),
        )
        for each in sorted(sources.ON_FILE, key=lambda each: bool(each.raises))
    ]
    sections = [_difference(each) for each in sources.ON_FILE]
    return "\n\n".join([_DIFFERENCES.format(count=len(rows)), _table(("what", *versions), rows), *sections]) + "\n"


def _difference(known: object) -> str:
    reported = _upstream(known.link.split()[0].rstrip(":")) if sources.is_reported(known) else _prose(known.link.split(":")[0])
    facts = [
        f"- **Shows**: {' or '.join(_ways(known))}",
        f"- **Versions**: torch {_prose(known.torch)}",
        f"- **Operations**: {', '.join(f'`{name}`' for name in known.operations) or 'any, told by the error'}"
        + (f", where a tensor is: {_prose(', '.join(sorted(known.facts)))}" if known.facts else ""),
        f"- **Upstream**: {reported}",
    ]
    text = f"````markdown\n{sources.issue_text(known)}````"
    details = f"<details><summary>As the text of an issue, with a script of torch alone</summary>\n\n{text}\n\n</details>"
    return "\n\n".join([f"({_place(known.id)})=\n\n## {_prose(known.id)}", _prose(known.link), "\n".join(facts), details])


def _ways(known: object) -> Iterator[str]:
    """How it shows."""
    if known.phases:
        yield "wrong values or gradients, without an error"
    if known.raises:
        yield "an error, or no end"


def _place(identifier: str) -> str:
    return "difference-" + identifier.replace("_", "-")


def _avoided_where(issue: object) -> str:
    """What a scenario is like in which the issue cannot show: the first sentence of its workaround."""
    return _prose((sources.WORKAROUNDS[issue.without].__doc__ or "").strip())


def _upstream(link: str) -> str:
    return f"<{link}>" if link.startswith("http") else _prose(link)


def _script(name: str, ranks: int, text: str) -> str:
    summary = f"Script on {_counted(ranks, 'rank')}, torch alone: <code>{name}</code>"
    code = f"```python\n{text}```"
    return f"<details><summary>{summary}</summary>\n\n{code}\n\n</details>"


def _anchor(issue_id: str) -> str:
    return "issue-" + issue_id.replace("_", "-")


def _prose(text: str) -> str:
    """Text of the code as Markdown: what is code in it stays so, and no other character means anything."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.replace("``", "`").split()))
    return "".join(part if part.startswith("`") else re.sub(r"([_*\[\]<>|#])", r"\\\1", part) for part in parts)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cli() -> str:
    """What `--help` says, of the program and of each command."""
    width = {"terminal_width": CODE_WIDTH, "max_content_width": CODE_WIDTH}
    with click.Context(sources.main, info_name="equivcheck", **width, **sources.main.context_settings) as context:
        sections = [_help(sources.main, context)]
        for name, command in sources.main.commands.items():
            with click.Context(command, info_name=name, parent=context, **width) as inner:
                sections.append(f"## `{name}`\n\n{_help(command, inner)}")
    return "\n\n".join(["# Command line", *sections]) + "\n"


def _help(command: click.Command, context: click.Context) -> str:
    return f"```text\n{command.get_help(context)}\n```"


def scenario() -> str:
    """Every noun, by topic: what a scenario is made of."""
    nouns = sources.nouns()
    topics = sorted(nouns, key=lambda topic: TOPICS.index(topic) if topic in TOPICS else len(TOPICS))
    sections = [f"## {topic.replace('_', ' ').capitalize()}\n\n{_documented(nouns[topic])}" for topic in topics]
    return "\n\n".join([_SCENARIO, *sections]) + "\n"


def _documented(names: Iterable[str]) -> str:
    lines = [f".. autoclass:: equivcheck.scenario.{name}\n   :members:\n   :undoc-members:" for name in names]
    return "\n".join(["```{eval-rst}", *lines, "```"])


TOPICS = (
    "scenario",
    "training",
    "model",
    "layer_base",
    "token_layers",
    "experts",
    "loss",
    "data",
    "optimizer",
    "schedule",
    "clipping",
    "layout",
    "mesh",
    "parallelism",
    "pipeline",
)
"""In which order the reference has them; others come last."""

_SCENARIO = """\
# Scenarios

The values of which a scenario is made, all in `equivcheck.scenario`. They are frozen, print as code that leaves out defaults, and
are checked when they are built: a value outside its range raises `InvalidScenario`."""

_LIMITS = """\
# What each layout cannot run

A scenario beyond a limit is UNSUPPORTED, with the reason below. The generator draws nothing beyond a limit: it repairs a
scenario to the nearest one within it.

There are two kinds. *Gaps of torch*: torch refuses or fails there; the strategy `frontier` goes beyond them, where a run must be
right or raise on every rank. *Fixed limits*: the layout cannot be built, or computes something else by definition, so that a
comparison would prove nothing."""

_INTERVENTIONS = """\
# What equivcheck adds to the ranks' code

The ranks call torch as its users do. What they do beside that, or in another way, is here, each with the reason, and in
parentheses the problem of torch that it avoids. A check says nothing about what is avoided."""

_MUTANTS = """\
# Mutants

{count} parallel trainings that are wrong on purpose. `equivcheck selftest` plants each in generated scenarios and reports which
were reached, caught, shrunk and explained; every `equivcheck fuzz` run has one of them as its control. *Shown by* is the
smallest scenario in which the fault can be seen."""

_ISSUES = """\
# Problems of torch on file

{count} problems of torch that equivcheck recognises. A check that meets one of them is KNOWN instead of a finding. Each has a
script that shows it with torch alone. The table has what each script did on each version of torch (*yes*: it shows the problem;
*no*: it does not; *-*: it cannot run there). The tests run those that are to show it on the torch that is installed, so that a
fix is noticed."""

_DIFFERENCES = """\
# What DTensor gets wrong

{count} causes that sweeps over operations and placements, and random programs, have met. A check of a tensor program that meets
one is KNOWN. For each, the smallest program that shows it ran on each version of torch over `gloo` processes: *wrong* values or
gradients without an error, *raises* or *hangs*, *right*, or *refused* with a clear error; nothing where it was not tried. "No
report found" means that searches of torch's issues found none. Each has the text of an issue that is made from its entry."""

PAGES: dict[str, Callable[[], str]] = {
    "limits": limits,
    "interventions": interventions,
    "mutants": mutants,
    "known_issues": known_issues,
    "dtensor_differences": dtensor_differences,
    "cli": cli,
    "scenario": scenario,
}
"""By the name of the file."""


def write(folder: Path) -> None:
    """Write every page that has changed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        path, text = folder / f"{name}.md", page()
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
