import pytest
import torch
from objective_fixture import FIXTURE, VECTORS, close, flat, theta

from fathom.config.families import KlEstimator
from fathom.trainer.objective.kl import KL_ESTIMATORS, kl_loss

ENUMERATED = VECTORS["kl_estimator_expected_gradients"]
POLICY = torch.tensor(ENUMERATED["inputs"]["policy_logits"], dtype=torch.float64)
REFERENCE = torch.tensor(ENUMERATED["inputs"]["reference_logits"], dtype=torch.float64).log_softmax(0)


def test_every_estimator_is_implemented():
    assert set(KL_ESTIMATORS) == set(KlEstimator)


@pytest.mark.parametrize("estimator", KlEstimator)
def test_token_values_and_gradients(estimator):
    expected, logp = VECTORS["kl_penalty_theta_ref"]["expected"], theta()
    made = kl_loss(estimator, logp, flat(FIXTURE["logp_ref"]))
    close(made.detach(), flat(expected[estimator]))
    close(made.detach().mean(), expected[f"{estimator}_token_mean"])
    made.sum().backward()
    gradient = expected[f"d{estimator}_dlogp"]
    close(logp.grad, torch.ones(9) if estimator is KlEstimator.K1 else flat(gradient))


def test_importance_weighted_k3():
    logp = theta().detach()
    importance = (logp - flat(FIXTURE["logp_old"])).exp()
    made = kl_loss(KlEstimator.K3, logp, flat(FIXTURE["logp_ref"]), importance)
    close(made.mean(), VECTORS["kl_penalty_theta_ref"]["expected"]["k3_unbiased_IS_token_mean"])


@pytest.mark.parametrize("estimator", KlEstimator)
def test_expected_value_and_gradient_over_all_tokens(estimator):
    expected, logits = ENUMERATED["expected"], POLICY.clone().requires_grad_()
    logp = logits.log_softmax(0)
    value = (logp.exp().detach() * kl_loss(estimator, logp, REFERENCE)).sum()
    close(value.detach(), expected[f"value_E[{estimator}]"])
    value.backward()
    close(logits.grad, expected[f"E[grad {estimator}]"])


def test_only_k2_has_the_gradient_of_the_kl_and_k3_that_of_its_reverse():
    expected = ENUMERATED["expected"]
    close(expected["E[grad k2]"], expected["grad reverse KL(pi||ref)"])
    close(expected["E[grad k3]"], expected["grad forward KL(ref||pi)"])


@pytest.mark.parametrize("estimator", [KlEstimator.K1, KlEstimator.K3])
def test_importance_with_its_gradient_restores_the_gradient_of_the_kl(estimator):
    logits = POLICY.clone().requires_grad_()
    logp = logits.log_softmax(0)
    behaviour = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    importance = logp.exp() / behaviour
    (behaviour * kl_loss(estimator, logp, REFERENCE, importance)).sum().backward()
    close(logits.grad, ENUMERATED["expected"]["grad reverse KL(pi||ref)"])


@pytest.mark.parametrize("estimator", KlEstimator)
@pytest.mark.parametrize("x", [-500.0, -99.0, 99.0, 500.0])
def test_far_apart_is_finite_and_never_pushes_further_apart(estimator, x):
    logp = torch.tensor([x], requires_grad=True)
    made = kl_loss(estimator, logp, torch.zeros(1))
    made.sum().backward()
    assert logp.grad is not None
    assert made.isfinite().all()
    assert logp.grad.isfinite().all()
    if estimator is not KlEstimator.K1:
        assert float(logp.grad) * x >= 0
