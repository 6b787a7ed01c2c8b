"""Layouts: a parallelism on a mesh that it can spread over."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.layouts.registry import layout_kinds
from equivcheck.scenario import FSDP1, Layout, Parallelism
from equivcheck.scenario.mesh import MAX_RANKS
from equivcheck.strategies.chance import below
from equivcheck.strategies.mesh import meshes_of
from equivcheck.strategies.parallelism import parallelisms_of


@st.composite
def layouts(draw: DrawFn, *, tags: tuple[str, ...] | None = None, max_ranks: int = MAX_RANKS) -> Layout:
    """Layouts of one parallelism each, equally often those with the tags given (default: every registered one).

    Raises `UsageError` when drawn from, if a tag is not registered.
    """
    parallelism = draw(parallelisms_of(draw(_tags(tags))))
    choices = _axes(parallelism)
    names = choices[draw(below(len(choices)))]
    return Layout(mesh=draw(meshes_of(names, max_ranks)), parallelisms=(parallelism,))


@cache
def _tags(tags: tuple[str, ...] | None) -> SearchStrategy[str]:
    return st.sampled_from(tuple(layout_kinds()) if tags is None else tags)


def _axes(parallelism: Parallelism) -> tuple[tuple[str, ...], ...]:
    """The alternatives of axes that fit the options of a parallelism."""
    if not isinstance(parallelism, FSDP1):
        return parallelism.axes
    return tuple(names for names in parallelism.axes if (len(names) == 2) == parallelism.strategy.is_hybrid)
