"""README.md in a finding's folder."""

from __future__ import annotations

from equivcheck.campaign.findings.environment import Environment
from equivcheck.campaign.findings.versions import ShownIn
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.system.printable import escape_unprintable

_TEMPLATE = """\
# {layout} on {ranks}: {outcome}

{reason}

```
{description}
```

Found on {date} in world `{world}`, with equivcheck {equivcheck}, torch {torch}, NumPy {numpy} and Python {python} on {platform}.

To see if it still shows, run this in the folder that contains the store:

    equivcheck replay {fingerprint}

To check the case without the store, run this in the finding's folder:

    equivcheck check scenario.json --world {world}{beyond}

{versions}
{stacks}"""
_NOT_BISECTED = "To find the torch versions in which it begins and ends:\n\n    equivcheck bisect {fingerprint}"
_BISECTED = "From torch {oldest} to {newest}, it {shown_in} (versions.json, from `equivcheck bisect`)."


def readme(fingerprint: str, verdict: CaseVerdict, found_in: Environment, shown_in: ShownIn | None = None) -> str:
    """Return the text for a finding's README.md: the failure, its environment, and commands to reproduce it."""
    ranks = verdict.case.num_ranks
    versions = _NOT_BISECTED.format(fingerprint=fingerprint)
    if shown_in is not None:
        versions = _BISECTED.format(oldest=shown_in.versions[0], newest=shown_in.versions[-1], shown_in=shown_in)
    stacks = "".join(
        f"\n## Rank {report.rank}, {report.state.value}\n\n```\n{escape_unprintable(report.stack.rstrip())}\n```\n"
        for report in (verdict.failure.reports if verdict.failure else ())
        if report.stack
    )
    return _TEMPLATE.format(
        layout=verdict.case.summary_row[0],
        ranks="1 rank" if ranks == 1 else f"{ranks} ranks",
        outcome=verdict.outcome.value,
        reason=escape_unprintable(verdict.reason) or "No reason was given.",
        description=verdict.describe(),
        fingerprint=fingerprint,
        world=verdict.world,
        beyond=" --beyond" if verdict.beyond else "",
        versions=versions,
        stacks=stacks,
        **{name: getattr(found_in, name) for name in ("date", "equivcheck", "torch", "numpy", "python", "platform")},
    )
