"""Prints the full names of torch's state, one a line, after simulated ranks have run and all modules are imported."""

from __future__ import annotations

import warnings

from equivcheck.system.collection import rare_collections

with rare_collections(), warnings.catch_warnings():
    from equivcheck.worlds import probes
    from equivcheck.worlds.audit.table import is_outside
    from equivcheck.worlds.audit.walk import import_all, walk
    from equivcheck.worlds.pool import ranks

    warnings.simplefilter("ignore")
    world = ranks("sim", probes.NUM_RANKS)
    for program, arguments in (
        (probes.check_redistributions, (0,)),
        (probes.check_double_sharding, ("linear", 5)),
        (probes.check_loss_parallel, ()),
    ):
        world.run(program, *arguments)
    import_all(is_outside)
print("\n".join(sorted(walk(is_outside))))
