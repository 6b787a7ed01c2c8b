"""Generated pages as MyST Markdown."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import click
from rich.pretty import pretty_repr

from generator import sources
from generator.issue_text import is_reported, issue_text, sentence_of

CODE_WIDTH = 80
"""Maximum characters in a line of code."""
GAPS, FIXED = "Gaps in torch", "Fixed limits"
"""Headings for the two kinds of limits."""
SHOWS = {"shows": "yes", "does not": "no", "cannot run": "-"}
"""Table cells for script results."""
TIMES = " x "
"""Separator between parallelisms in a layout's name."""
NOT_SUPPORTED = re.compile(r"^(.+? (?:is|are) not supported[^:]*): (.+)$")
"""Pattern for a limit's reason."""
OLDEST_VERSION = ">=2.9"
"""Specifier that all supported versions meet."""
RESULTS = sources.ROOT / "docs" / "results"
"""Folder with measured tables in TOML, one file for each measurement."""


def limits() -> str:
    """Limits of each layout, with their reasons."""
    sections = [_limits_of(name, found) for name, found in sources.limits_by_layout().items() if found]
    return "\n\n".join([_LIMITS, *sections]) + "\n"


def _limits_of(name: str, found: Iterable[sources.AnyLimit]) -> str:
    kinds: dict[str, list[str]] = {GAPS: [], FIXED: []}
    for limit in found:
        api, colon, rest = sentence(limit).partition(": ")
        text = f"**{_prose(api)}**{colon}{_prose(rest)}" if colon else _prose(api)
        kinds[GAPS if getattr(limit, "upstream", False) else FIXED].append(f"- {text}")
    lists = ["\n".join([f"{title}:\n", *reasons]) for title, reasons in kinds.items() if reasons]
    return "\n\n".join([f"## {f'`{name}`' if name else 'Any layout'}", *lists])


def sentence(limit: sources.AnyLimit) -> str:
    """A limit's reason as a sentence: ``API: SITUATION is not supported, because CONSEQUENCE``."""
    text = NOT_SUPPORTED.sub(r"\1, because \2", limit.reason)
    return f"{text}{f' (torch {_versions(limit.torch)})' if limit.torch else ''}."


def _versions(specifier: str) -> str:
    """Affected versions in words: ``2.11 and newer``, ``before 2.11`` or ``all``."""
    words = {">=": "{} and newer", "<": "before {}"}
    parts = [part for part in specifier.split(",") if part not in ("", OLDEST_VERSION)]
    found = [re.fullmatch(r"(>=|<)([\d.]+)", part) for part in parts]
    return ", ".join(words[each[1]].format(each[2]) if each else part for each, part in zip(found, parts, strict=True)) or "all"


def interventions() -> str:
    """Additions to the ranks' code, with their reasons."""
    entries = (f"- {_prose(one['what'])}: {_prose(one['why'])} ({_prose(one['upstream'])})" for one in sources.interventions())
    return "\n\n".join([_INTERVENTIONS, "\n".join(entries)]) + "\n"


def mutants() -> str:
    """All mutants by family."""
    families = dict.fromkeys(mutant.family for mutant in sources.mutants().values())
    sections = [_mutants_of(family) for family in families]
    return "\n\n".join([_MUTANTS.format(count=len(sources.mutants())), *sections]) + "\n"


def _mutants_of(family: object) -> str:
    title = str(family.value).replace("_", " ").capitalize()
    return "\n\n".join([f"## {title}", *(_mutant(each) for each in sources.mutants().values() if each.family is family)])


def _mutant(mutant: object) -> str:
    return (
        f"`{mutant.name}`\n: {_prose(mutant.wrong)}\n\n"
        f"  *Layouts*: {_briefly(mutant.layouts)}. *Smallest scenario*: {_smallest(mutant.minimum)}."
    )


def _smallest(minimum: object) -> str:
    counts = ((minimum.ranks, "rank"), (minimum.layers, "layer"), (minimum.steps, "step"))
    return ", ".join(_counted(count, noun) for count, noun in counts)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _briefly(layouts: Iterable[str]) -> str:
    """Layout names, grouped by the inner parallelism: ``ddp, fsdp2; over tensor_parallel: fsdp2``."""
    alone = [name for name in layouts if TIMES not in name]
    over: dict[str, list[str]] = {}
    for name in layouts:
        outer, times, inner = name.partition(TIMES)
        if times:
            over.setdefault(inner, []).append(outer)
    parts = [", ".join(alone)] if alone else []
    return _prose("; ".join(parts + [f"over {inner}: {', '.join(outers)}" for inner, outers in over.items()]))


def known_issues() -> str:
    """Known issues in torch: a table with a line for each, then a section for each with folded details."""
    smallest = sources.smallest_scenarios()
    found = sources.all_known_issues()
    rows = [
        (
            f"[{_prose(issue.title)}](#{_anchor(issue.id)})",
            _effect_of_issue(issue),
            _prose(_versions(issue.torch)),
        )
        for issue in found
    ]
    table = _table(("problem", "effect", "torch"), rows)
    sections = [_issue(issue, smallest.get(issue.id)) for issue in found]
    return "\n\n".join([_ISSUES.format(count=len(found)), table, *sections]) + "\n"


def _effect_of_issue(issue: object) -> str:
    return "silent" if issue.kind.value == "wrong_numbers" else "raises"


def _issue(issue: object, smallest: object | None) -> str:
    script = sources.issue_script(issue)
    explanation = script.split('"""')[1].split("\n\n")[1]
    row = sources.measured_results()[issue.id]
    reasons = {version: each.reason.rstrip(".") for version, each in row.items() if each.reason}
    facts = [
        f"- **Effect**: {issue.kind.value.replace('_', ' ')}",
        f"- **Layouts**: {', '.join(f'`{tag}`' for tag in issue.layouts) or 'none that is generated'}",
        f"- **Upstream**: {_upstream(issue.link or 'not reported')}",
        *([f"- **Workaround**: {_workaround(issue)}"] if issue.without else []),
        *(f"- **torch {version}**: the script cannot run: {_prose(why)}" for version, why in reasons.items()),
    ]
    shown = _table(("torch", *row), [("shows", *(SHOWS[each.shows.value] for each in row.values()))])
    details = [_prose(explanation), "\n".join(facts), shown]
    if smallest is not None:
        details += ["Smallest scenario that shows it:", f"```python\n{pretty_repr(smallest, max_width=CODE_WIDTH)}\n```"]
    details += [f"Script `{issue.id}.py` for {_counted(issue.ranks, 'rank')}, which needs only torch:", f"```python\n{script}```"]
    summary = _prose(f"{issue.title}.")
    return "\n\n".join([f"({_anchor(issue.id)})=\n\n## {_prose(issue.id)}", summary, _folded("Details and script", details)])


def _folded(summary: str, parts: Iterable[str]) -> str:
    return "\n\n".join([f"<details><summary>{summary}</summary>", *parts, "</details>"])


def dtensor_differences() -> str:
    """Known errors in DTensor: a table with a line for each, then a section for each with folded details."""
    rows = [
        (f"[{_prose(sentence_of(each))}](#{_place(each.id)})", _effect(each), _prose(_versions(each.torch)))
        for each in sorted(sources.ON_FILE, key=lambda each: bool(each.raises))
    ]
    table = _table(("problem", "effect", "torch"), rows)
    sections = [_difference(each) for each in sources.ON_FILE]
    return "\n\n".join([_DIFFERENCES.format(count=len(rows)), table, *sections]) + "\n"


def _effect(known: object) -> str:
    return " or ".join(["silent"] * bool(known.phases) + ["raises"] * bool(known.raises))


def _difference(known: object) -> str:
    reported = _upstream(known.link.split()[0].rstrip(":")) if is_reported(known) else _prose(known.link.split(":")[0])
    condition = f", if a tensor is: {_prose(', '.join(sorted(known.facts)))}" if known.facts else ""
    facts = [
        f"- **Effect**: {_effect(known)}",
        f"- **Operations**: {', '.join(f'`{name}`' for name in known.operations) or 'any, recognised by the error'}{condition}",
        f"- **Upstream**: {reported}",
    ]
    shown = _table(("torch", *known.shows), [("result", *known.shows.values())])
    text = f"````markdown\n{issue_text(known, sources.smallest_programs()[known.id])}````"
    details = _folded("Details, and the text of an issue with a script", ["\n".join(facts), shown, text])
    return "\n\n".join([f"({_place(known.id)})=\n\n## {_prose(known.id)}", _prose(known.link), details])


def _place(identifier: str) -> str:
    return "difference-" + identifier.replace("_", "-")


def results() -> str:
    """Measured figures, from files in `docs/results`."""
    sections = [_result(tomllib.loads(path.read_text("utf-8"))) for path in sorted(RESULTS.glob("*.toml"))]
    return "\n\n".join([_RESULTS, *sections]) + "\n"


def _result(found: Mapping[str, object]) -> str:
    parts = [f"## {found['title']}", found["about"].strip()]
    if "command" in found:
        parts.append(f"```sh\n{found['command']}\n```")
    parts.append(_table(tuple(found["columns"]), [tuple(map(str, row)) for row in found["rows"]]))
    return "\n\n".join([*parts, *filter(None, [found.get("notes", "").strip()])])


def _workaround(issue: object) -> str:
    return _prose((sources.WORKAROUNDS[issue.without].__doc__ or "").strip())


def _upstream(link: str) -> str:
    return f"<{link}>" if link.startswith("http") else _prose(link)


def _anchor(issue_id: str) -> str:
    return "issue-" + issue_id.replace("_", "-")


def _prose(text: str) -> str:
    """Docstring text as Markdown. Backticks keep their meaning; all other special characters are escaped."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.replace("``", "`").split()))
    return "".join(part if part.startswith("`") else re.sub(r"([_*\[\]<>|#])", r"\\\1", part) for part in parts)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cli() -> str:
    """Help texts for the program and each command."""
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
    """Scenario classes by topic."""
    nouns = sources.nouns()
    sections = [f"## {topic.replace('_', ' ').capitalize()}\n\n{_documented(nouns[topic])}" for topic in TOPICS]
    return "\n\n".join([_SCENARIO, *sections]) + "\n"


def _documented(names: Iterable[str]) -> str:
    lines = [f".. autoclass:: equivcheck.scenario.{name}\n   :members:\n   :undoc-members:" for name in names]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def private_api() -> str:
    """Every module that uses private torch API, with the names that it uses."""
    return "\n\n".join([_PRIVATE_API, *map(_private_use, sources.private_uses())]) + "\n"


def _private_use(use: sources.PrivateUse) -> str:
    facts = [f"- **Tested with**: torch {use.versions}"]
    if use.names:
        facts.append(f"- **Names**: {', '.join(f'`{name}`' for name in use.names)}")
    return "\n\n".join([f"## `{use.module}`", _prose(use.text), "\n".join(facts)])


TOPICS = (
    "scenario",
    "training",
    "model",
    "layers",
    "linear",
    "token_layers",
    "experts",
    "lora",
    "loss",
    "data",
    "optimizer",
    "schedule",
    "clipping",
    "layout",
    "mesh",
    "parallelisms",
    "data_parallel",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline",
    "execution",
    "rounding",
)
"""Topic order in the reference."""

_SCENARIO = """\
# Scenarios

A scenario is built from these classes in `equivcheck.scenario`. They are frozen dataclasses. They print as code without
defaults, and raise `InvalidScenario` if you build one with a value outside its range."""

_PRIVATE_API = """\
# Private torch API

equivcheck uses these private parts of torch. A new version of torch may change them, so each module says with which versions it
was tested."""

_LIMITS = """\
# Limits of each layout

If your scenario is beyond a limit, the outcome is UNSUPPORTED, with the reason below. The generator repairs such scenarios:
it takes the nearest scenario within the limits.

*Gaps in torch* are situations in which torch raises. `frontier()` draws such scenarios; a run must then be correct or raise
on every rank. *Fixed limits* are situations in which the layout cannot be built, or computes something else by definition,
so a comparison would prove nothing."""

_INTERVENTIONS = """\
# Additions to the ranks' code

Ranks call torch as you would. This page lists all exceptions. Each has its reason, and in parentheses the problem in torch
that it works around. A check says nothing about a problem that is worked around here."""

_MUTANTS = """\
# Mutants

These {count} parallel trainings are wrong on purpose. `equivcheck selftest` plants each in generated scenarios, and reports
which were reached, caught, shrunk and explained. Each `equivcheck fuzz` run plants one as its control. *Smallest scenario*
is the smallest one that can show the error."""

_ISSUES = """\
# Known issues of torch

equivcheck recognises {count} problems of torch. If a check meets one, its outcome is KNOWN, and not a finding. *Silent*
problems give wrong numbers without an error; the others raise or hang.

Each section has a script that needs only torch, and its result on each torch version: *yes* if it shows the problem, *no* if
it does not, *-* if it cannot run. The tests run these scripts on the installed version, so a fix is noticed."""

_DIFFERENCES = """\
# Known errors of DTensor

Sweeps over operations and placements, and random programs, found these {count} problems. If a check of a tensor program
meets one, its outcome is KNOWN. *Silent* problems give wrong values or gradients without an error.

The smallest program for each problem ran on every torch version, on `gloo` processes. Its result is *wrong* (silently),
*raises*, *hangs*, *right* or *refused* (with a clear error), or empty if it did not run. "No report found" means that a
search of torch's issues found none. Each section has a text that you can paste into an issue."""

_RESULTS = """\
# Measured results

All measured figures of the documentation stand on this page. Each table has the command that measures it, the torch version
and the machine. The tables come from files in `docs/results`."""

PAGES: dict[str, Callable[[], str]] = {
    "limits": limits,
    "interventions": interventions,
    "mutants": mutants,
    "known_issues": known_issues,
    "dtensor_differences": dtensor_differences,
    "results": results,
    "cli": cli,
    "scenario": scenario,
    "private_api": private_api,
}
"""Pages by file name."""


def write(folder: Path) -> None:
    """Write each page that has changed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        path, text = folder / f"{name}.md", page()
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
