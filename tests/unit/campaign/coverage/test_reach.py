"""Counting pairs of features as scenarios are drawn."""

from __future__ import annotations

import pickle
import sys
from dataclasses import fields, is_dataclass, replace
from itertools import combinations

from hypothesis import HealthCheck, Phase, given, settings

from equivcheck.campaign.coverage.features import Feature, features
from equivcheck.campaign.coverage.pairs import ModelFamily, by_families, family_of, format_pairs, legal_pairs, pairs_of
from equivcheck.campaign.coverage.reach import Reach, by_parts
from equivcheck.scenario import Attention, CrossEntropy, Data, Head, Layer, Model, Scenario, Split, Tokens, Training
from equivcheck.strategies import executions, scenarios
from equivcheck.strategies.layout import IN_SIXTY

from .test_features import SCENARIO

MOST_NEW = 0.05
"""Share of features that may be newer than the table."""
MOST_NEW_PAIRS = 0.0005
"""Share of drawn pairs of known features that may be newer than the table."""
EXTEND = "CONTRIBUTING.md, Release: extend the table"


def test_pairs_are_counted_once() -> None:
    """Every two features of a scenario in the table are a pair; the same scenario again adds none."""
    reach, count = Reach(), len(features(SCENARIO) & set(legal_pairs().features))
    reach.add(SCENARIO)
    assert reach.drawn_pairs.count == count * (count - 1) // 2
    reach.add(SCENARIO)
    assert (reach.drawn_pairs.count, reach.num_scenarios) == (count * (count - 1) // 2, 2)
    assert reach.drawn_pairs.count + reach.missing.count == reach.legal.count
    assert 0 < reach.share < 1
    assert sum(by_parts(reach.drawn_pairs).values()) == reach.drawn_pairs.count
    assert sum(by_families(reach.drawn_pairs).values()) == reach.drawn_pairs.count
    assert sum(by_families(reach.legal).values()) == reach.legal.count


def test_a_pair_is_of_the_family_that_alone_has_it() -> None:
    """A scenario of rows has pairs of rows alone; one of tokens of all three families."""
    rows, tokens = Reach(), Reach()
    rows.add(SCENARIO)
    model = Model(features=1, length=1, source=Tokens(vocabulary=2), layers=(Layer(width=1), Attention()), head=Head())
    tokens.add(replace(SCENARIO, training=Training(model=model, data=Data(microbatches=(1,)), loss=CrossEntropy())))
    count = rows.drawn_pairs.count
    assert by_families(rows.drawn_pairs) == {ModelFamily.TOKENS: 0, ModelFamily.SEQUENCES: 0, ModelFamily.ROWS: count}
    assert all(by_families(tokens.drawn_pairs).values())


def test_an_end_outside_the_plan_is_of_any_model() -> None:
    """Only a plan for an embedding or a head needs tokens."""
    families = {split: family_of(Feature("layout.parallelisms", "TensorParallel", "head", split.name)) for split in Split}
    assert families.pop(Split.NOT_IN_PLAN) is ModelFamily.ROWS
    assert set(families.values()) == {ModelFamily.TOKENS}


def test_counts_of_workers_add_up() -> None:
    """Merged, and sent to another process, they are what one would have counted."""
    one, other, both = Reach(), Reach(), Reach()
    layout = SCENARIO.layout
    second = Scenario(training=SCENARIO.training, layout=layout, resume=None)
    for reach, scenario in ((one, SCENARIO), (other, second), (both, SCENARIO), (both, second)):
        reach.add(scenario)
    one.merge(pickle.loads(pickle.dumps(other)))
    assert (one.drawn_pairs.rows, one.num_scenarios) == (both.drawn_pairs.rows, both.num_scenarios)


def test_the_table_is_read_as_it_is_written() -> None:
    """A set of pairs goes to text and back."""
    few = sorted(features(SCENARIO))[:4]
    pairs = pairs_of(few, combinations(few[:3], 2))
    assert pairs.count == 3
    assert list(pairs.of(3)) == []
    assert few[0].noun in format_pairs(pairs)


def test_the_table_of_legal_pairs_fits_the_nouns() -> None:
    """Drawn scenarios have few features and hardly any pairs that the table, extended at each release, lacks."""
    known = legal_pairs()
    assert list(known.features) == sorted(set(known.features))
    assert all(known.rows[other] >> number & 1 for number in range(len(known.features)) for other in known.of(number))
    reach = Reach()

    @settings(max_examples=100, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
    @given(scenarios(executions=executions(compiles=IN_SIXTY)))
    def note(scenario: Scenario) -> None:
        reach.add(scenario)

    note()
    assert 0 <= reach.legal.count - known.count <= MOST_NEW_PAIRS * reach.drawn_pairs.count, EXTEND
    assert len(reach.unknown) <= MOST_NEW * len(known.features), EXTEND


def test_the_table_names_fields_that_exist() -> None:
    """A field that gets another name is renamed in the table, too; otherwise its pairs would be missing in every run."""
    scenario_modules = [module for name, module in sys.modules.items() if name.startswith("equivcheck.scenario.")]
    nouns = {name: noun for module in scenario_modules for name, noun in vars(module).items() if is_dataclass(noun)}
    existing = {(name, field.name) for name, noun in nouns.items() for field in fields(noun)}
    assert {(each.noun, each.field.removesuffix("[]")) for each in legal_pairs().features} - existing == set()
