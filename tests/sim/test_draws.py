"""Random durations: their mean and spread are those asked for, neighbours are alike, and a fit finds both again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import UNSET
from numpy.typing import NDArray

from lockstep.sim.calibrate.spreads import deviations, lasting_spread, spread_of
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost import (
    UNCALIBRATED,
    Calibration,
    CalibrationError,
    Duration,
    decode_shape,
    extend_shape,
    roofline_model,
)
from lockstep.sim.cost.draws import drawn_factor, likeness
from lockstep.sim.cost.model import LastingSpread

COUNT = 6_000
LASTING = LastingSpread(share=0.6, batches=8)


def factors(spread: float, lasting: LastingSpread | None, key: str = "1 a") -> NDArray[np.float64]:
    expected = Duration(200.0, 200.0 * spread, lasting)
    return np.array([drawn_factor(expected, key, number) for number in range(COUNT)])


def correlation(values: NDArray[np.float64], lag: int) -> float:
    centred = np.log(values) - np.log(values).mean()
    return float((centred[:-lag] * centred[lag:]).mean() / (centred * centred).mean())


@pytest.mark.parametrize("lasting", [None, LASTING, LastingSpread(share=1.0, batches=1)])
@pytest.mark.parametrize("spread", [0.05, 0.4])
def test_durations_have_the_mean_and_the_spread_of_the_cost_model(spread: float, lasting: LastingSpread | None) -> None:
    drawn = factors(spread, lasting)
    assert drawn.mean() == pytest.approx(1.0, abs=0.1 * spread)
    assert drawn.std() == pytest.approx(spread, rel=0.1)
    assert np.median(drawn) < drawn.mean()
    assert drawn.min() > 0.0


def test_a_duration_without_a_spread_is_its_mean() -> None:
    assert drawn_factor(Duration(200.0), "1 a", 3) == 1.0
    assert drawn_factor(Duration(0.0, 5.0), "1 a", 3) == 1.0


def test_batches_that_follow_each_other_are_alike() -> None:
    drawn = factors(0.3, LASTING)
    for lag in (1, 4, 8, 12):
        expected = LASTING.share * float(likeness(np.array([lag / LASTING.batches]))[0])
        assert correlation(drawn, lag) == pytest.approx(expected, abs=0.05), lag
    assert correlation(drawn, 40) == pytest.approx(0.0, abs=0.05)
    assert correlation(factors(0.3, None), 1) == pytest.approx(0.0, abs=0.05)
    assert abs(float(np.corrcoef(drawn, factors(0.3, LASTING, key="1 b"))[0, 1])) < 0.05  # another engine


@pytest.mark.parametrize("lasting", [LASTING, LastingSpread(share=0.3, batches=2)])
@pytest.mark.parametrize("spread", [0.05, 0.4])
def test_a_fit_finds_the_spread_and_the_part_that_lasts(spread: float, lasting: LastingSpread) -> None:
    drawn = factors(spread, lasting)
    found = lasting_spread(deviations(drawn, spread_of(drawn)))
    assert spread_of(drawn) == pytest.approx(spread, rel=0.1)
    assert isinstance(found, LastingSpread)
    assert found.batches == lasting.batches
    assert found.share == pytest.approx(lasting.share, abs=0.1)


def test_a_fit_finds_nothing_in_common_where_there_is_nothing() -> None:
    drawn = factors(0.2, None)
    assert lasting_spread(deviations(drawn, spread_of(drawn))) is UNSET
    assert lasting_spread(deviations(np.ones(500), 0.0)) is UNSET  # all batches take their expected time
    assert lasting_spread(np.ones(20)) is UNSET  # too few


def calibration(**fields: Any) -> Calibration:
    return Calibration(engine="none", residuals=UNCALIBRATED.residuals, **fields)


def test_a_calibration_keeps_the_part_that_lasts_and_gives_it_to_every_duration() -> None:
    with_part = calibration(spread=0.2, prompt_spread=0.1, lasting_spread=LASTING)
    assert Calibration.from_bytes(with_part.to_json().encode(), "file") == with_part
    base = roofline_model(load_model("qwen3-0.6b"), load_gpu("h200"))
    cost = with_part.cost_model(base)
    for shape in (extend_shape(500), decode_shape(8, 300)):
        assert cost.batch_us(shape).lasting == LASTING
    assert cost.describe()["lasting_spread"] == {"share": 0.6, "batches": 8}
    without = calibration(spread=0.2)
    assert "lasting_spread" not in without.to_json()
    assert without.cost_model(base).batch_us(decode_shape(8, 300)).lasting is None
    text = with_part.to_json().replace('"share": 0.6', '"share": 1.6')
    with pytest.raises(CalibrationError, match=r"file: .*<= 1"):
        Calibration.from_bytes(text.encode(), "file")
