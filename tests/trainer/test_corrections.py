import pytest
import torch
from objective_fixture import FIXTURE, SEQUENCE, VECTORS, close, fixture_tokens, flat, sampled

from fathom.config.families import Aggregation, Correction, RejectionDenominator
from fathom.config.objective import ObjectiveConfig
from fathom.core.records.step import MaskReason
from fathom.trainer.objective.aggregation import AGGREGATIONS
from fathom.trainer.objective.corrections import CORRECTIONS, SampledTokens, mean_weight, vetoed_by, weigh
from fathom.trainer.objective.plan import prepare_step
from fathom.trainer.objective.policy_loss import bounded_ratio


def by_sequence(per_sequence: list[float]) -> torch.Tensor:
    return torch.tensor(per_sequence, dtype=torch.float64)[SEQUENCE]


def of_ratios(log_ratio: torch.Tensor, sequence: list[int]) -> SampledTokens:
    return SampledTokens(
        log_ratio=log_ratio,
        logp_behaviour=torch.full_like(log_ratio, -0.5),
        sequence=torch.tensor(sequence),
        sequences=max(sequence) + 1,
    )


def test_every_correction_is_implemented():
    assert set(CORRECTIONS) == set(Correction)


def test_ratio():
    expected = VECTORS["token_ratio"]["expected"]
    close(sampled().log_ratio, flat(expected["log_ratio"]))
    close(bounded_ratio(sampled().log_ratio), flat(expected["ratio"]))


def test_token_tis():
    vector = VECTORS["token_TIS"]
    made = CORRECTIONS[Correction.TOKEN_TIS](sampled(), 0.0, vector["inputs"]["C"])
    close(made.weights, flat(vector["expected"]["weight"]))
    close(made.capped.double().mean(), vector["expected"]["clip_fraction_token_mean"])
    assert not (made.popped | made.vetoed).any()


def test_token_tis_is_capped_from_below_too():
    made = CORRECTIONS[Correction.TOKEN_TIS](sampled(), 0.5, 2.0)
    assert made.weights.min() == 0.5
    assert made.capped.sum() == 3


def test_icepop():
    vector = VECTORS["icepop"]
    made = CORRECTIONS[Correction.ICEPOP](sampled(), vector["inputs"]["alpha"], vector["inputs"]["beta"])
    close(made.weights, flat(vector["expected"]["weight"]))
    close(made.popped.double().mean(), vector["expected"]["popped_token_fraction"])


def test_icepop_keeps_its_bounds():
    tokens = of_ratios(torch.tensor([0.5, 2.0], dtype=torch.float64).log(), [0, 0])
    low, high = bounded_ratio(tokens.log_ratio).tolist()
    assert not CORRECTIONS[Correction.ICEPOP](tokens, low, high).popped.any()


def test_sequence_ratios():
    expected = VECTORS["sequence_and_geometric_ratio"]["expected"]
    close(sampled().sequence_sums(sampled().log_ratio), expected["sum_log_ratio"])
    close(sampled().sequence_means(sampled().log_ratio), expected["mean_log_ratio"])
    unbounded = CORRECTIONS[Correction.SEQUENCE_TIS](sampled(), 0.0, 1e6)
    close(unbounded.weights, by_sequence(expected["seq_ratio"]))


def test_sequence_tis_and_mis():
    vector = VECTORS["seq_TIS_and_seq_MIS"]
    low, high = vector["inputs"]["C_low"], vector["inputs"]["C_high"]
    tis = CORRECTIONS[Correction.SEQUENCE_TIS](sampled(), low, high)
    close(tis.weights, by_sequence(vector["expected"]["seq_TIS_weight"]))
    assert SEQUENCE[tis.capped].unique().tolist() == [2]
    mis = CORRECTIONS[Correction.SEQUENCE_MIS](sampled(), low, high)
    close(mis.weights, by_sequence(vector["expected"]["seq_MIS_weight_two_sided"]))
    assert len(SEQUENCE[mis.vetoed].unique()) == vector["expected"]["seq_MIS_rejected"]


@pytest.mark.parametrize("band", VECTORS["geo_RS"]["inputs"]["bands"])
def test_geometric_gate(band):
    keep = VECTORS["geo_RS"]["expected"][f"keep_{band[0]}_{band[1]}"]
    made = CORRECTIONS[Correction.GEOMETRIC_RS](sampled(), *band)
    assert (~made.vetoed).tolist() == by_sequence(keep).bool().tolist()
    assert made.weights.tolist() == by_sequence(keep).tolist()


def test_veto_drops_the_whole_trajectory_and_no_other():
    vector = VECTORS["veto"]
    log_ratio = torch.tensor([*vector["inputs"]["log_ratio"], 0.3], dtype=torch.float64)
    tokens = of_ratios(log_ratio, [0, 0, 0, 1])
    threshold = vector["inputs"]["threshold"]
    assert vetoed_by(tokens, threshold).tolist() == [True, True, True, False]
    made = weigh(ObjectiveConfig(veto=threshold), tokens)
    assert made.weights[:3].tolist() == [0, 0, 0]
    assert made.vetoed.tolist() == [True, True, True, False]
    assert not vetoed_by(tokens, 1e-5).any()


def test_veto_looks_below_the_clamp():
    tokens = of_ratios(torch.tensor([-22.0]), [0])
    assert not vetoed_by(tokens, 1e-10).any()
    assert vetoed_by(tokens, 1e-9).all()


def test_batch_normalise():
    expected = VECTORS["batch_normalise"]["expected"]
    everywhere = torch.ones(len(SEQUENCE), dtype=torch.bool)
    tis = weigh(ObjectiveConfig(), sampled()).weights
    close(mean_weight(tis, sampled(), everywhere, by_sequence=False), expected["token_mean_weight"])
    close(weigh(ObjectiveConfig(batch_normalise=True), sampled()).weights, flat(expected["token_weights_normalised"]))

    sequence = ObjectiveConfig(correction=Correction.SEQUENCE_TIS)
    mean = mean_weight(weigh(sequence, sampled()).weights, sampled(), everywhere, by_sequence=True)
    close(mean, expected["seq_mean_weight_valid_sequences"])
    normalised = ObjectiveConfig(correction=Correction.SEQUENCE_TIS, batch_normalise=True)
    close(weigh(normalised, sampled()).weights, by_sequence(expected["seq_weights_normalised"]))


def test_normalised_weights_add_up_to_the_denominator_under_both_conventions():
    for convention in RejectionDenominator:
        config = ObjectiveConfig(
            correction=Correction.ICEPOP,
            correction_low=0.5,
            correction_high=5.0,
            batch_normalise=True,
            rejection_denominator=convention,
        )
        plan = prepare_step(config, fixture_tokens(config))
        assert plan.gate is not None
        assert plan.denominators.tokens == {RejectionDenominator.ALL: 9, RejectionDenominator.KEPT: 7}[convention]
        assert float(plan.gate.weights.sum()) == pytest.approx(plan.denominators.tokens)


def test_nothing_left_is_not_normalised():
    config = ObjectiveConfig(veto=0.999, batch_normalise=True)
    tokens = of_ratios(torch.tensor([-1.0, -2.0]), [0, 1])
    assert weigh(config, tokens).weights.tolist() == [0, 0]


@pytest.mark.parametrize("convention", RejectionDenominator)
def test_denominator_after_rejection(convention):
    vector = VECTORS["RS_denominators"]
    config = ObjectiveConfig(
        correction=Correction.ICEPOP,  # inside [.5, 2] its weight is that of token TIS
        correction_low=0.5,
        correction_high=2.0,
        rejection_denominator=convention,
    )
    plan = prepare_step(config, fixture_tokens(config))
    assert plan.gate is not None
    weighted = plan.gate.weights * flat(vector["inputs"]["token_loss"])
    close(weighted.sum(), vector["expected"]["numerator"])
    mean = (AGGREGATIONS[Aggregation.TOKEN_MEAN](plan.denominators, SEQUENCE, None) * weighted).sum()
    name = "original" if convention is RejectionDenominator.ALL else "kept"
    close(mean, vector["expected"][f"token_mean_{name}_denominator"])


def test_reasons_are_told_apart():
    config = ObjectiveConfig(
        correction=Correction.ICEPOP, correction_low=0.5, correction_high=2.0, mask_truncated=True, veto=0.42
    )
    tokens = fixture_tokens(config)
    assert tokens.logp_old is not None
    tokens.truncated[SEQUENCE == 0] = True
    tokens.logp_old[-1] = float("nan")
    gate = prepare_step(config, tokens).gate
    assert gate is not None
    reasons = list(MaskReason)
    named = [None if code < 0 else reasons[code] for code in gate.mask_codes.tolist()]
    veto, truncated = MaskReason.VETO, MaskReason.TRUNCATED
    assert named == [truncated] * 3 + [veto] * 4 + [None, MaskReason.NON_FINITE]
    assert gate.rejected.tolist() == [False] * 3 + [True] * 4 + [False] * 2
    assert (gate.weights != 0).tolist() == gate.in_gradient.tolist()


def test_fixture_is_the_one_of_the_figures():
    assert sampled().log_ratio.shape == (9,)
    assert FIXTURE["reward"] == [0.0, 1.0, 0.6, 0.0]
