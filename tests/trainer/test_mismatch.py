import numpy as np
import pytest
from objective_fixture import VECTORS, sampled

from fathom.trainer.objective.mismatch import measure_by_age, measure_mismatch

LOG_RATIO = sampled().log_ratio.numpy()
NOWHERE = np.zeros(9, dtype=bool)


def test_worked_example():
    expected = VECTORS["metrics"]["expected"]
    made = measure_mismatch(LOG_RATIO, np.log(2) < LOG_RATIO, NOWHERE)
    assert made is not None
    assert made.tokens == 9
    assert made.abs_log_ratio_mean == pytest.approx(expected["abs_logprob_diff_token_mean"])
    assert made.abs_log_ratio_max == pytest.approx(1.8)
    assert made.k1 == pytest.approx(expected["k1_KL_rollout_old_token_mean"])
    assert made.k2 == pytest.approx(expected["k2_token_mean"])
    assert made.k3 == pytest.approx(expected["k3_token_mean"])
    assert made.ratio_mean == pytest.approx(expected["ratio_mean"])
    assert made.ratio_max == pytest.approx(expected["ratio_max"])
    assert made.ratio_p50 == pytest.approx(np.exp(0.05))
    assert expected["ratio_min"] < made.ratio_p01 < made.ratio_p50 < made.ratio_p99 < made.ratio_max
    assert made.ess == pytest.approx(expected["ESS_fraction_token_pooled"])
    assert made.clipped_share == pytest.approx(2 / 9)
    assert made.popped_share == 0


def test_ess_and_chi2_agree_for_ratios_of_mean_one():
    ratio = np.array([0.5, 0.8, 1.7])
    made = measure_mismatch(np.log(ratio), NOWHERE[:3], NOWHERE[:3])
    assert made is not None
    assert made.ess == pytest.approx(1 / (1 + ((ratio**2).mean() - 1)))


def test_no_tokens_report_nothing():
    assert measure_mismatch(LOG_RATIO[:0], NOWHERE[:0], NOWHERE[:0]) is None
    assert measure_mismatch(np.array([np.nan, np.inf]), NOWHERE[:2], NOWHERE[:2]) is None
    assert measure_by_age(LOG_RATIO[:0], NOWHERE[:0], NOWHERE[:0], np.zeros(0, int), np.zeros(0, int)) == ()


def test_tokens_that_are_not_finite_are_left_out():
    log_ratio = np.append(LOG_RATIO, np.nan)
    rejected = np.append(NOWHERE, True)
    assert measure_mismatch(log_ratio, rejected, rejected) == measure_mismatch(LOG_RATIO, NOWHERE, NOWHERE)


def test_extreme_ratios_are_finite():
    made = measure_mismatch(np.array([-1e6, 1e6], dtype=np.float32), NOWHERE[:2], NOWHERE[:2])
    assert made is not None
    assert np.isfinite([made.k1, made.k2, made.k3, made.ratio_max, made.ess]).all()
    assert made.abs_log_ratio_max == 1e6


def test_slices_partition_the_tokens_by_both_ages():
    ages = np.array([0, 0, 2, 1, 1, 1, 0, 2, 2])
    kv_ages = np.array([0, 1, 2, 1, 1, 2, 0, 2, 3])
    slices = measure_by_age(LOG_RATIO, LOG_RATIO > 0.5, NOWHERE, ages, kv_ages)
    assert [(s.age, s.kv_age) for s in slices] == [(0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3)]
    whole = measure_mismatch(LOG_RATIO, LOG_RATIO > 0.5, NOWHERE)
    assert whole is not None
    assert sum(s.mismatch.tokens for s in slices) == whole.tokens
    assert sum(s.mismatch.tokens * s.mismatch.k3 for s in slices) / 9 == pytest.approx(whole.k3)
    assert slices[0].mismatch == measure_mismatch(LOG_RATIO[[0, 6]], NOWHERE[:2], NOWHERE[:2])
