"""Tests for the JSON codec."""

from __future__ import annotations

import copy
import json
import math
import timeit
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis.vendor.pretty import pretty
from rich.pretty import pretty_repr

import equivcheck.scenario as nouns
from equivcheck.errors import InvalidScenario, UsageError
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.scenario import (
    DDP,
    Adam,
    Axis,
    ClipNorm,
    Data,
    Layer,
    Layout,
    Mesh,
    Model,
    Parallelism,
    Resume,
    Scenario,
    StepLR,
    Training,
)
from equivcheck.scenario.file_format import codec, converter
from equivcheck.scenario.file_format.codec import decode, dump, encode, from_json, load, register_parallelism, to_json
from equivcheck.strategies import scenarios
from equivcheck.worlds.failure import Failure, FailureKind, RankReport, RankState
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase

SCENARIO = Scenario(
    training=Training(
        model=Model(features=2, layers=(Layer(width=2), Layer(width=2, shares=0))),
        data=Data(microbatches=(2,)),
        optimizer=Adam(),
        schedule=StepLR(),
        clipping=ClipNorm(),
    ),
    layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(DDP(),)),
)

LAYER = ("training", "model", "layers", 0)
SOURCE = ("training", "model", "source")
OPTIMIZER = ("training", "optimizer")

MISFITS: list[tuple[tuple[str | int, ...], Any, str]] = [
    ((*LAYER, "widht"), 2, "training.model.layers[0].widht: unknown field. Expected one of: width, bias, activation, norm"),
    ((*LAYER, "kind"), "conv", 'training.model.layers[0].kind: "conv" is not valid. Expected one of: linear'),
    (LAYER, {"width": 2}, "training.model.layers[0].kind: missing field. Expected one of: linear"),
    (("training", "data", "kind"), "tokens", 'training.data.kind: "tokens" is not valid. Expected one of: rows'),
    (SOURCE, 2, "training.model.source: 2 is not valid: it is an integer. Expected an object"),
    (SOURCE, {"kind": "features"}, "training.model.source.features: missing field. Features has no default for it"),
    ((*SOURCE, "kind"), "images", 'training.model.source.kind: "images" is not valid. Expected one of: features, tokens'),
    ((*SOURCE, "features"), "2", 'training.model.source.features: "2" is not valid: it is a string. Expected an integer'),
    ((*SOURCE, "size"), 2, "training.model.source.size: unknown field. Expected one of: features"),
    (
        ("training", "model", "features"),
        2,
        "training.model.features: unknown field. Expected one of: source, length, document_length, layers, head",
    ),
    (("training", "loss"), "mse_mean", 'training.loss: "mse_mean" is not valid: it is a string. Expected an object'),
    (("training", "loss", "kind"), "huber", 'training.loss.kind: "huber" is not valid. Expected one of: mse_mean, mse_sum'),
    (("training", "loss", "delta"), 1.0, "training.loss.delta: unknown field. Expected no other field"),
    (("a b\n",), 2, '"a b\\n": unknown field. Expected one of: training, layout, schedule_seed'),
    ((*LAYER, "width"), True, "training.model.layers[0].width: true is not valid: it is a boolean. Expected an integer"),
    ((*LAYER, "width"), "2", 'training.model.layers[0].width: "2" is not valid: it is a string. Expected an integer'),
    ((*LAYER, "width"), 2.0, "training.model.layers[0].width: 2.0 is not valid: it is a number. Expected an integer"),
    ((*LAYER, "width"), None, "training.model.layers[0].width: null is not valid. Expected an integer"),
    ((*LAYER, "width"), 0, "training.model.layers[0]: Layer.width 0 is not valid. Expected 1 to 32"),
    ((*LAYER, "bias"), 1, "training.model.layers[0].bias: 1 is not valid: it is an integer. Expected a boolean"),
    ((*LAYER, "norm"), "batch", 'training.model.layers[0].norm: "batch" is not valid. Expected one of: layer, rms'),
    (
        (*LAYER, "activation"),
        ["relu"],
        'training.model.layers[0].activation: ["relu"] is not valid. Expected one of: identity, relu',
    ),
    ((*LAYER, "shares"), "0", 'training.model.layers[0].shares: "0" is not valid: it is a string. Expected an integer'),
    (LAYER, [], "training.model.layers[0]: [] is not valid: it is a list. Expected an object"),
    (("training", "model", "layers"), {}, "training.model.layers: {} is not valid: it is an object. Expected a list"),
    (("training", "model", "layers"), "ab", 'training.model.layers: "ab" is not valid: it is a string. Expected a list'),
    (
        ("training", "data", "microbatches"),
        [2, "3"],
        'training.data.microbatches[1]: "3" is not valid: it is a string. Expected an integer',
    ),
    (("training", "data", "microbatches"), [], "training.data: Data.microbatches of length 0 is not valid. Expected 1 to 4"),
    ((*OPTIMIZER, "kind"), "Lion", 'training.optimizer.kind: "Lion" is not valid. Expected one of: SGD, Adam'),
    ((*OPTIMIZER, "kind"), 3, "training.optimizer.kind: 3 is not valid. Expected one of: SGD, Adam"),
    ((*OPTIMIZER, "kind"), "SGD", "training.optimizer.amsgrad: unknown field. Expected one of: lr, weight_decay"),
    (OPTIMIZER, {}, "training.optimizer.kind: missing field. Expected one of: SGD, Adam"),
    (OPTIMIZER, None, "training.optimizer: null is not valid. Expected an object"),
    ((*OPTIMIZER, "lr"), "fast", 'training.optimizer.lr: "fast" is not valid: it is a string. Expected a number'),
    ((*OPTIMIZER, "lr"), False, "training.optimizer.lr: false is not valid: it is a boolean. Expected a number"),
    (
        (*OPTIMIZER, "lr"),
        10**400,
        "training.optimizer.lr: 1000000000000000000000000000000000000... is too large for a float",
    ),
    ((*OPTIMIZER, "lr"), "inf", "training.optimizer: Adam.lr inf is not valid. Expected a finite number above 0"),
    ((*OPTIMIZER, "betas"), [0.9], "training.optimizer.betas: a list of length 1 is not valid. Expected 2 entries"),
    (
        ("training", "clipping", "kind"),
        "Adam",
        'training.clipping.kind: "Adam" is not valid. Expected one of: ClipNorm, ClipValue',
    ),
    (
        ("training", "schedule", "kind"),
        "OneCycleLR",
        'training.schedule.kind: "OneCycleLR" is not valid. Expected one of: StepLR',
    ),
    (
        ("layout", "parallelisms", 0, "kind"),
        "zero",
        'layout.parallelisms[0].kind: "zero" is not valid. Expected one of: ddp, replicate',
    ),
    (("layout", "parallelisms"), [], "layout: Layout.parallelisms () is not valid. Expected at least one parallelism"),
    (("schedule_seed",), -1, "Scenario.schedule_seed -1 is not valid. Expected 0 to"),
    (("format",), 3, "format: 3 is not valid: it is newer than this version of equivcheck reads. Expected 1 to 2"),
    (("format",), 0, "format: 0 is not valid. Expected 1 to 2"),
    (("format",), True, "format: true is not valid: it is a boolean. Expected an integer"),
    (("kind",), "program", 'kind: "program" is not valid. Expected scenario'),
]

NOT_JSON = [
    ("", "invalid JSON: Expecting value: line 1 column 1"),
    ("{", "invalid JSON: Expecting property name"),
    ('{"format": NaN}', "invalid JSON: NaN is not valid. Expected a finite number"),
    ('{"format": -Infinity}', "invalid JSON: -Infinity is not valid. Expected a finite number"),
    ('{"format": 1, "format": 1}', 'invalid JSON: field "format" occurs twice'),
    ("[" * 100_000, "invalid JSON: maximum recursion depth exceeded"),
    ("[]", "[] is not valid: it is a list. Expected an object"),
    ("null", "null is not valid. Expected an object"),
    ("{}", "format: missing field. Expected 1 to 2"),
    ('{"format": 2}', "kind: missing field. Expected scenario"),
]


@given(scenarios())
def test_reading_what_was_written_gives_an_equal_scenario(scenario: Scenario) -> None:
    """A scenario survives JSON."""
    assert from_json(to_json(scenario)) == scenario


@given(scenarios())
def test_repr_evaluates_to_an_equal_scenario(scenario: Scenario) -> None:
    """A printed scenario can be pasted back, as one line and broken over lines."""
    for text in (repr(scenario), pretty_repr(scenario, max_width=60), pretty(scenario)):
        assert eval(text, vars(nouns).copy()) == scenario


@given(scenarios())
def test_repr_leaves_out_what_has_its_default(scenario: Scenario) -> None:
    """The repr contains the class name and the fields that differ from their defaults."""
    for value in (scenario, scenario.training, scenario.training.optimizer, scenario.layout, *scenario.layout.parallelisms):
        for each in fields(value):
            is_default = each.default is not MISSING and getattr(value, each.name) == each.default
            assert (f"{each.name}={getattr(value, each.name)!r}" in repr(value)) or is_default
    assert repr(Layer(width=2, bias=False)) == "Layer(width=2, bias=False)"
    assert pretty(Layer(width=2, bias=False)) == repr(Layer(width=2, bias=False))


@pytest.mark.parametrize(("path", "value", "problem"), MISFITS)
def test_data_that_does_not_fit_is_one_line_that_names_the_place(path: tuple[str | int, ...], value: Any, problem: str) -> None:
    """Every error names the path, the value and the expected values."""
    data = json.loads(to_json(SCENARIO))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InvalidScenario) as raised:
        from_json(json.dumps(data), where="found.json")
    assert str(raised.value).startswith(f"found.json: {problem}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("text", "problem"), NOT_JSON)
def test_text_that_is_no_scenario_is_refused(text: str, problem: str) -> None:
    """Text that is not strict JSON, or not an object with a format, is refused."""
    with pytest.raises(InvalidScenario) as raised:
        from_json(text)
    assert str(raised.value).startswith(f"scenario: {problem}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("path", [("training",), ("training", "model"), (*LAYER, "width"), ("layout", "mesh", "axes", 0, "size")])
def test_a_missing_field_without_default_is_named(path: tuple[str | int, ...]) -> None:
    """A field without default must be present."""
    data = encode(SCENARIO)
    place = data
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    with pytest.raises(InvalidScenario, match=rf"{path[-1]}: missing field\. [A-Z]\w+ has no default for it\.$"):
        decode(Scenario, data)


def test_fields_with_a_default_may_be_left_out() -> None:
    """Only fields without default are required."""
    text = """{"kind": "scenario", "format": 2,
               "training": {"model": {"source": {"kind": "features", "features": 2}, "layers": [{"kind": "linear", "width": 3}]},
                            "data": {"kind": "rows", "microbatches": [2]}},
               "layout": {"mesh": {"axes": [{"name": "dp", "size": 2}]}, "parallelisms": [{"kind": "ddp"}]}}"""
    training = Training(model=Model(features=2, layers=(Layer(width=3),)), data=Data(microbatches=(2,)))
    assert from_json(text) == Scenario(training=training, layout=SCENARIO.layout)


def test_a_resume_is_part_of_a_scenario() -> None:
    """A checkpoint survives JSON and repr; a scenario without it decodes to none."""
    resume = Resume(layout=SCENARIO.layout, flatten_optimizer_state_dict=True)
    scenario = replace(SCENARIO, training=replace(SCENARIO.training, steps=2), resume=resume)
    assert from_json(to_json(scenario)) == scenario
    assert eval(repr(scenario), vars(nouns)) == scenario
    assert from_json(to_json(SCENARIO).replace(', "resume": null', "")) == SCENARIO


def test_an_integer_is_accepted_for_a_float() -> None:
    """An integer is accepted for a float."""
    assert repr(decode(Adam, {"kind": "Adam", "lr": 1}).lr) == "1.0"


def test_a_verdict_with_infinite_error_survives_strict_json() -> None:
    """JSON has no infinity, but the error of a missing tensor is one."""
    divergence = Divergence(
        step=0, phase=Phase.GRADIENT, tensor="w", difference=Difference.MISSING, rank=1, index=(0, 2), error=math.inf
    )
    failure = Failure(kind=FailureKind.DIED, summary="rank 0 died", reports=(RankReport(rank=0, state=RankState.DIED),))
    verdict = Verdict(outcome=Outcome.DIVERGED, scenario=SCENARIO, world="sim", divergence=divergence, failure=failure)
    assert decode(Verdict, load(dump(encode(verdict)))) == verdict


@pytest.fixture
def known_tags(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, type[Parallelism]]]:
    """Known tags, restored afterwards."""
    before = dict(converter.PARALLELISM_TAGS)
    codec._ask_entry_points.cache_clear()
    yield converter.PARALLELISM_TAGS
    converter.PARALLELISM_TAGS.clear()
    converter.PARALLELISM_TAGS.update(before)
    codec._ask_entry_points.cache_clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Local(Parallelism):
    """Third-party parallelism."""

    tag: ClassVar[str] = "local"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = (("dp",),)
    every: int = 1


class LocalKind:
    """Target of its entry point."""

    parallelism = Local


class EntryPoint:
    """Replacement for an `importlib.metadata.EntryPoint`."""

    def __init__(self, loaded: type | None) -> None:
        self.loaded = loaded

    def load(self) -> type:
        """Return the class, or fail like a broken import."""
        if self.loaded is None:
            raise ImportError("broken")
        return self.loaded


def test_a_third_partys_parallelism_is_found_when_its_tag_is_met(
    known_tags: dict[str, type[Parallelism]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entry points are loaded when a tag is unknown; a broken one does not hide the others."""
    monkeypatch.setattr(codec, "entry_points", lambda group: [EntryPoint(None), EntryPoint(LocalKind)])
    scenario = Scenario(training=SCENARIO.training, layout=Layout(mesh=SCENARIO.layout.mesh, parallelisms=(Local(every=2),)))
    assert "local" not in known_tags
    assert from_json(to_json(scenario)) == scenario


def test_registering_refuses_a_taken_tag_and_a_field_named_kind(known_tags: dict[str, type[Parallelism]]) -> None:
    """A tag belongs to one parallelism, and the codec reserves `kind`."""

    @dataclass(frozen=True, kw_only=True)
    class Taken(Parallelism):
        tag: ClassVar[str] = "ddp"

    @dataclass(frozen=True, kw_only=True)
    class Kinded(Parallelism):
        tag: ClassVar[str] = "kinded"
        kind: str = ""

    with pytest.raises(UsageError, match="'ddp' is not valid: it is taken"):
        register_parallelism(Taken)
    with pytest.raises(UsageError, match=r"Kinded\.kind is not a valid field"):
        register_parallelism(Kinded)
    with pytest.raises(UsageError, match="Expected a dataclass derived from Parallelism"):
        register_parallelism(LocalKind)  # type: ignore[arg-type]


def test_coding_a_scenario_costs_a_few_copies_of_it() -> None:
    """Coding must stay fast because findings, workers and replays code scenarios by the thousand."""
    text = to_json(SCENARIO)
    coded, copied = (
        min(timeit.repeat(call, number=1, repeat=50))
        for call in (lambda: from_json(to_json(from_json(text))), lambda: copy.deepcopy(SCENARIO))
    )
    assert coded < 10 * copied
