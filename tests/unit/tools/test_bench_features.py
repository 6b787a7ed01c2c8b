"""`tools.bench_features`: scenarios without batch features, and the ratio of their costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivcheck.layouts.composition.limits import limit_reason
from equivcheck.scenario import CrossEntropy
from tools.bench_features import generated, interval, measure, ratio_of, without_features


def test_scenarios_lose_all_features_and_nothing_else() -> None:
    """A scenario without features is supported, and equal to the scenario with their defaults."""
    drawn = generated(200, 0)
    assert len(drawn) == 200
    assert any(without_features(scenario) != scenario for scenario in drawn)
    for scenario in drawn:
        plain = without_features(scenario)
        training = plain.training
        weighs_labels = isinstance(training.loss, CrossEntropy) and training.loss.weighs_labels
        features = (training.has_trailing_window, training.model.packs_documents, training.model.predicts_two, weighs_labels)
        assert not any(features)
        assert limit_reason(training, plain.layout) is None
        parts = {"model": training.model, "loss": training.loss, "data": training.data}
        assert replace(scenario, training=replace(scenario.training, **parts)) == plain  # type: ignore[arg-type]


def test_each_scenario_is_measured_with_and_without_features() -> None:
    """Both measured times are CPU seconds of a check."""
    assert all(min(pair) > 0 for pair in measure(generated(1, 0), 0))


def test_the_ratio_is_that_of_the_sums() -> None:
    """The ratio lies in its interval, and equal pairs have no interval."""
    pairs = [(2.0, 1.0), (1.0, 2.0), (6.0, 3.0)]
    low, high = interval(pairs, 0)
    assert ratio_of(pairs) == pytest.approx(1.5)
    assert low < 1.5 < high
    assert interval([(1.0, 2.0)] * 5, 0) == (0.5, 0.5)
