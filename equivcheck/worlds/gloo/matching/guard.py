"""Stops a rank before it takes part in a collective that does not match the call on another rank."""

from __future__ import annotations

import pickle
import time

from equivcheck.worlds.gloo.channel import Channel
from equivcheck.worlds.gloo.matching.journal import Issued, Journal
from equivcheck.worlds.gloo.matching.table import Table

MISMATCH_TAG = b"m"
"""First byte of a message about a mismatch; a pickled `Mismatch` follows."""
_LONG = 3600.0


def guard_collectives(rank: int, table: int, channel: Channel) -> Journal:
    """Start a guard that compares each later collective in this process with the other ranks' calls.

    If two calls do not match, a `Mismatch` is sent through `channel`, and the rank waits to be killed. `table` is the file
    descriptor for the `Table` that all ranks share.
    """
    from equivcheck.worlds.gloo.matching.torch_private import listen_to_collectives

    journal = Journal(rank, Table(table))

    def compare(issued: Issued, group: str, ranks: tuple[int, ...]) -> None:
        mismatch = journal.mismatch(issued, group, ranks)
        if mismatch is not None:
            channel.send(MISMATCH_TAG + pickle.dumps(mismatch))
            while True:  # until the owner, who asks for the stack first, ends this process
                time.sleep(_LONG)

    listen_to_collectives(compare)
    return journal
