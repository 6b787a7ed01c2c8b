"""What is generated besides single collectives: messages between ranks, and calls behind one handle. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from collectives.cases import ARITHMETIC, COMPLEX, DTYPES, MAX_SIZE, SEEDS, SIZES, Case, Kind, Values, dtypes_of, groups, shapes
from equivcheck.system.choice import PrintableEnum

MANY_TYPES = (*DTYPES, "int16", "uint16", "uint64")
"""Messages carry types that collectives do not."""
COALESCED = (Kind.ALL_REDUCE, Kind.ALL_GATHER_SINGLE, Kind.REDUCE_SCATTER_SINGLE)


class Form(PrintableEnum):
    """How messages are issued."""

    BLOCKING = "blocking"
    """``send`` and ``recv``, by all ranks in the same order of messages."""
    HANDLES = "handles"
    """``isend`` and ``irecv``, waited for at the end."""
    BATCH = "batch"
    """``batch_isend_irecv``."""


class Barrier(PrintableEnum):
    """How ranks wait for each other."""

    BLOCKING = "blocking"
    ASYNCHRONOUS = "asynchronous"
    MONITORED = "monitored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Messages between the members of a group; what is sent is drawn as for a broadcast from the sender."""

    form: Form
    """How they are issued."""
    messages: tuple[Case, ...]
    """Each a broadcast whose root is the sender."""
    receivers: tuple[int, ...]
    """Of each message, the receiver's rank within the group; never the sender's."""
    tags: tuple[int, ...]
    """Of each message."""
    order: tuple[int, ...]
    """In which receives are issued: indices of messages; those alike in sender, receiver and tag keep theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coalesced:
    """Collectives of one kind, type and reduction behind one handle."""

    functional: bool
    """Whether by ``_functional_collectives`` or by the coalescing manager."""
    asynchronous: bool
    """Whether the manager's handle is waited for."""
    cases: tuple[Case, ...]
    """The calls."""


@st.composite
def posts(draw: DrawFn, form: Form, size: int) -> Post:
    """Up to eight messages among the members of a group of at least two."""
    group = draw(groups(size).filter(lambda ranks: len(ranks) > 1))
    count = draw(st.integers(1, 8))
    messages, receivers, tags = [], [], []
    for _ in range(count):
        sender = draw(st.integers(0, len(group) - 1))
        receivers.append((sender + draw(st.integers(1, len(group) - 1))) % len(group))
        tags.append(draw(st.integers(0, 2)))
        messages.append(
            Case(
                kind=Kind.BROADCAST,
                group=group,
                dtype=draw(st.sampled_from(MANY_TYPES)),
                shape=draw(shapes()),
                root=sender,
                seed=draw(SEEDS),
            )
        )
    order = tuple(range(count)) if form is Form.BLOCKING else _interleaved(draw, messages, receivers, tags)
    return Post(form=form, messages=tuple(messages), receivers=tuple(receivers), tags=tuple(tags), order=order)


def _interleaved(draw: DrawFn, messages: list[Case], receivers: list[int], tags: list[int]) -> tuple[int, ...]:
    """Any order that keeps that of messages which only their order tells apart."""
    lanes: dict[tuple[int, int, int], list[int]] = {}
    for index, message in enumerate(messages):
        lanes.setdefault((message.root, receivers[index], tags[index]), []).append(index)
    keys = draw(st.permutations([key for key, lane in lanes.items() for _ in lane]))
    return tuple(lanes[key].pop(0) for key in keys)


@st.composite
def mails(draw: DrawFn, form: Form) -> tuple[int, tuple[Post, ...]]:
    """A world's size and some posts."""
    size = draw(st.integers(2, MAX_SIZE))
    return size, tuple(draw(st.lists(posts(form, size), min_size=1, max_size=4)))


@st.composite
def coalesced(draw: DrawFn, kind: Kind, size: int) -> Coalesced:
    """Up to four calls behind one handle."""
    op = "" if kind is Kind.ALL_GATHER_SINGLE else draw(st.sampled_from((*ARITHMETIC, "avg")))
    dtype = draw(st.sampled_from([dtype for dtype in dtypes_of(kind, op) if dtype != "bool"]))
    values = draw(st.sampled_from((Values.WHOLE, Values.NORMAL)))
    first = Case(kind=kind, group=draw(groups(size)), dtype=dtype, op=op, values=values)
    cases = tuple(
        replace(first, shape=draw(shapes(min_dims=0 if kind is Kind.ALL_REDUCE else 1)), seed=draw(SEEDS))
        for _ in range(draw(st.integers(1, 4)))
    )
    refused = kind is Kind.ALL_GATHER_SINGLE and dtype in COMPLEX  # by gloo: see `unsupported`
    return Coalesced(functional=not refused and draw(st.booleans()), asynchronous=draw(st.booleans()), cases=cases)


@st.composite
def coalesced_batches(draw: DrawFn, kind: Kind) -> tuple[int, tuple[Coalesced, ...]]:
    """A world's size and some coalesced calls."""
    size = draw(SIZES)
    return size, tuple(draw(st.lists(coalesced(kind, size), min_size=1, max_size=8)))
