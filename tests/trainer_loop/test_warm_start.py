from __future__ import annotations

import numpy as np
import pytest
from random_rows import VOCAB, save_model

from fathom.config.trainer import OptimizerConfig, TrainerConfig, WarmStartConfig
from fathom.core.errors import DataError, StepStoppedError
from fathom.core.records.demonstration import Demonstration
from fathom.trainer.backends.torch_backend import TorchBackend
from fathom.trainer.loop.warm_start import warm_start


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def _backend(folder):
    return TorchBackend(folder, TrainerConfig(steps=5, groups_per_step=1))


def _demonstrations(count=12):
    """Counting upwards from a random start: each token follows from the one before it."""
    rng = np.random.default_rng(0)
    shown = []
    for index in range(count):
        start, length = rng.integers(0, VOCAB), 4 + index % 5
        ids = ((start + np.arange(length)) % VOCAB).astype(np.int32)
        shown.append(Demonstration(token_ids=ids, loss_mask=np.arange(length) > 0, source=f"count {index}"))
    return shown


def _config(steps, batch_size=4, lr=1e-2):
    return WarmStartConfig(steps=steps, batch_size=batch_size, tasks=12, optimizer=OptimizerConfig(lr=lr))


def _run(backend, config, budget=4096, seed=0, stop=lambda: False):
    return list(warm_start(backend, _demonstrations(), config, tokens_per_micro_batch=budget, seed=seed, stop=stop))


def test_it_learns_what_is_shown(folder):
    backend = _backend(folder)
    steps = _run(backend, _config(120))
    assert steps[0].loss > 2.5
    assert np.mean([step.loss for step in steps[-10:]]) < 0.3
    assert [step.step for step in steps] == list(range(1, 121))
    assert backend.step == 120


def test_it_ends_once_the_recent_loss_is_low_enough(folder):
    whole = [step.loss for step in _run(_backend(folder), _config(120))]
    config = _config(120).model_copy(update={"until_loss": 1.0})
    losses = [step.loss for step in _run(_backend(folder), config)]
    assert losses == whole[: len(losses)]
    assert np.mean(losses[-10:]) <= 1.0 < np.mean(losses[-11:-1])
    assert 10 <= len(losses) < 120


def test_the_first_loss_is_the_mean_over_all_tokens_of_the_step(folder):
    shown = _demonstrations()
    tokens = sum(int(one.loss_mask.sum()) for one in shown)
    for budget in (1, 4096):
        (step,) = _run(_backend(folder), _config(1, batch_size=12), budget)
        assert step.tokens == tokens
        assert step.loss == pytest.approx(_run(_backend(folder), _config(1, batch_size=12), 20)[0].loss, rel=1e-5)


def test_each_epoch_shows_everything_once_in_an_order_that_the_seed_fixes(folder):
    one, same, other = (_run(_backend(folder), _config(6), seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    total = sum(int(demonstration.loss_mask.sum()) for demonstration in _demonstrations())
    assert sum(step.tokens for step in one[:3]) == sum(step.tokens for step in one[3:]) == total


def test_it_stops_between_micro_batches_and_refuses_to_learn_from_nothing(folder):
    answers = iter([False, False, True])
    with pytest.raises(StepStoppedError):
        _run(_backend(folder), _config(3), budget=1, stop=lambda: next(answers))
    with pytest.raises(DataError, match="demonstrations"):
        list(warm_start(_backend(folder), [], _config(3), tokens_per_micro_batch=64, seed=0))
