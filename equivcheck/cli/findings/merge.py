"""`equivcheck merge`: merge stores from several machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equivcheck.cli.options import json_option, print_json, store_option
from equivcheck.cli.shell import ExitCode
from equivcheck.scenario.scenario import count
from equivcheck.system.printable import escape_unprintable

if TYPE_CHECKING:
    from equivcheck.campaign.history.merging import Merged


@click.command()
@click.argument("sources", metavar="STORE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@store_option
@json_option
def merge(sources: tuple[Path, ...], store: Path, as_json: bool) -> ExitCode:
    """Add findings and history of each STORE to one store.

    The sources are not changed. If several have a finding, its smallest scenario is kept. Merging a store twice adds nothing.
    """
    from equivcheck.campaign.history.merging import merge as merge_store
    from equivcheck.campaign.history.merging import require_sources

    require_sources(sources, store)
    merged = [merge_store(source, store) for source in sources]
    for each in merged:
        for line in each.broken:
            click.echo(escape_unprintable(line), err=True)
    if as_json:
        print_json({"store": str(store), "merged": [_object(each) for each in merged]})
    else:
        for each in merged:
            click.echo(escape_unprintable(_line(each)))
    return ExitCode.NOTHING_FOUND


def _line(merged: Merged) -> str:
    from equivcheck.campaign.findings.store import Kept

    new, better, seen = (merged.kept[kept] for kept in (Kept.NEW, Kept.BETTER, Kept.SEEN))
    found = f"{count(new, 'new finding')}, {better} with a better example, {seen} seen before"
    return f"{merged.store}: {found}; {count(merged.num_runs, 'new run')}"


def _object(merged: Merged) -> dict[str, Any]:
    from equivcheck.campaign.findings.store import Kept

    kept = {kept.value: merged.kept[kept] for kept in (Kept.NEW, Kept.BETTER, Kept.SEEN)}
    return {"store": str(merged.store), "findings": kept, "runs": merged.num_runs, "broken": list(merged.broken)}
