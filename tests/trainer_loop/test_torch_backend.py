from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_rows import VOCAB, make_row, save_model

from fathom.config.families import Dtype, Schedule
from fathom.config.trainer import OptimizerConfig, TrainerConfig
from fathom.core.errors import CheckpointError
from fathom.core.records.bias import LogitBias, TokenBias
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.torch_backend import TorchBackend

OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=2, schedule=Schedule.COSINE, weight_decay=0.1)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), tied=request.param)


def _backend(folder, dtype=Dtype.FLOAT32, **options):
    config = TrainerConfig(
        steps=8, groups_per_step=1, dtype=dtype, optimizer=OPTIMIZER.model_copy(update=options), threads=1
    )
    return TorchBackend(folder, config)


def _rows(seed=0, count=3):
    rng = np.random.default_rng(seed)
    return [make_row(rng, f"t{i}", prompt=2 + i, sampled=3 + i, kept=i == 1) for i in range(count)]


def _train(backend, steps, seed=0):
    updates = []
    for step in range(backend.step, backend.step + steps):
        backend.accumulate(PackedRows.of_rows(_rows(seed + step)), lambda outputs: (-outputs.logprobs.mean(), None))
        updates.append(backend.update())
    return updates


def _copy(backend):
    return {name: tensor.detach().clone() for name, tensor in backend.weights().items()}


def _same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_packed_log_probabilities_equal_those_of_each_row_alone(folder):
    backend, rows = _backend(folder), _rows()
    packed = backend.logprobs(PackedRows.of_rows(rows))
    alone = torch.cat([backend.logprobs(PackedRows.of_rows([row])) for row in rows])
    assert torch.allclose(packed, alone, atol=1e-5)
    assert bool((packed <= 0).all())


def test_a_packed_bias_is_that_of_its_own_row(folder):
    backend, rows = _backend(folder), _rows()
    bias = LogitBias(ids=(1, 4), values=(3.0, -100.0))
    biased = replace(rows[1], kept=None, bias=TokenBias(biases=(bias,), which=np.array([-1, 0, 0, -1], np.int32)))
    packed = backend.logprobs(PackedRows.of_rows([rows[0], biased, rows[2]]))
    plain = backend.logprobs(PackedRows.of_rows([rows[0], replace(biased, bias=None), rows[2]]))
    alone = torch.cat([backend.logprobs(PackedRows.of_rows([row])) for row in (rows[0], biased, rows[2])])
    assert torch.allclose(packed, alone, atol=1e-5)
    assert torch.nonzero((packed - plain).abs() > 1e-4).flatten().tolist() == [4, 5]


def test_tokens_after_the_last_loss_token_change_nothing(folder):
    rng = np.random.default_rng(1)
    row = make_row(rng, prompt=4, sampled=6)
    head = slice(0, 3)
    short = type(row)(
        **{
            name: getattr(row, name)
            for name in ("trajectory", "group", "branch", "kept", "bias", "routes", "mixed_routes", "token_ids")
        },
        **{
            name: getattr(row, name)[head]
            for name in ("positions", "logprobs", "policy_version", "kv_version", "temperature")
        },
    )
    backend = _backend(folder)
    whole, part = backend.logprobs(PackedRows.of_rows([row])), backend.logprobs(PackedRows.of_rows([short]))
    assert torch.allclose(whole[:3], part, atol=1e-6)


@pytest.mark.parametrize("dtype", Dtype)
def test_resuming_goes_on_bit_for_bit(folder, dtype, tmp_path):
    straight = _backend(folder, dtype)
    expected = _train(straight, 5)

    first = _backend(folder, dtype)
    _train(first, 2)
    first.save(tmp_path)
    resumed = _backend(folder, dtype)
    resumed.load(tmp_path)
    assert resumed.step == 2
    assert _train(resumed, 3) == expected[2:]
    assert _same(_copy(straight), _copy(resumed))

    straight.save(tmp_path / "straight")
    resumed.save(tmp_path / "resumed")
    for file in sorted(path.name for path in (tmp_path / "straight").glob("*.safetensors")):
        assert (tmp_path / "straight" / file).read_bytes() == (tmp_path / "resumed" / file).read_bytes()


def test_a_checkpoint_holds_no_pickle_and_a_loadable_model(folder, tmp_path):
    backend = _backend(folder, Dtype.BFLOAT16)
    _train(backend, 1)
    backend.save(tmp_path)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert not [name for name in names if name.endswith((".pt", ".bin", ".pkl", ".pth"))]
    assert _same(_copy(_backend(tmp_path / "model", Dtype.BFLOAT16)), _copy(backend))


def test_bfloat16_weights_are_the_cast_of_masters_that_keep_small_updates(folder):
    backend = _backend(folder, Dtype.BFLOAT16, lr=1e-5, warmup_steps=0, schedule=Schedule.CONSTANT, weight_decay=0.0)
    before = _copy(backend)
    _train(backend, 1)
    masters = backend.masters
    assert all(master.dtype is torch.float32 for master in masters.values())
    assert any(not torch.equal(master, before[name].float()) for name, master in masters.items())
    for name, tensor in backend.weights().items():
        assert tensor.dtype is torch.bfloat16
        assert torch.equal(tensor, masters[name].bfloat16())


def test_bfloat16_gradients_of_micro_batches_add_up_in_float32(folder):
    """64 equal micro-batches give 64 times the gradient of one; a bfloat16 sum would have stopped growing."""
    backend, packed = _backend(folder, Dtype.BFLOAT16), PackedRows.of_rows(_rows())
    backend.accumulate(packed, lambda outputs: (outputs.logprobs.sum(), None))
    once = {name: master.grad.clone() for name, master in backend.masters.items()}
    for _ in range(63):
        backend.accumulate(packed, lambda outputs: (outputs.logprobs.sum(), None))
    for name, master in backend.masters.items():
        assert torch.allclose(master.grad, 64 * once[name], rtol=1e-5)


def test_float32_masters_are_the_parameters_themselves(folder):
    backend = _backend(folder)
    assert all(backend.weights()[name] is master for name, master in backend.masters.items())


@pytest.mark.parametrize("dtype", Dtype)
def test_a_non_finite_gradient_changes_nothing(folder, dtype):
    backend = _backend(folder, dtype)
    _train(backend, 1)
    before = _copy(backend)
    backend.accumulate(PackedRows.of_rows(_rows()), lambda outputs: (outputs.logprobs.sum() * float("nan"), None))
    update = backend.update()
    assert not update.applied
    assert np.isnan(update.grad_norm)
    assert backend.step == 1
    assert _same(before, _copy(backend))
    reference = _backend(folder, dtype)
    _train(reference, 1)
    _train(backend, 1), _train(reference, 1)
    assert _same(_copy(backend), _copy(reference))


def test_the_gradient_is_clipped_to_the_global_norm(folder):
    free, clipped = _backend(folder, max_grad_norm=1e9), _backend(folder, max_grad_norm=1e-12)
    norms = [_train(backend, 1)[0].grad_norm for backend in (free, clipped)]
    assert norms[0] == norms[1] > 1e-3
    # Adam's first step does not see the gradient's scale, except through eps.
    start = _copy(_backend(folder, weight_decay=0.0))
    moved = [sum(float((t - start[n]).abs().sum()) for n, t in _copy(b).items()) for b in (free, clipped)]
    assert moved[1] < 0.5 * moved[0]


def test_weight_decay_spares_norms(folder):
    backend = _backend(folder, weight_decay=0.5, lr=0.1, warmup_steps=0)
    before = _copy(backend)
    backend.accumulate(PackedRows.of_rows(_rows()), lambda outputs: (outputs.logprobs.sum() * 0.0, None))
    backend.update()
    after = _copy(backend)
    for name in before:
        shrinks = before[name].ndim >= 2
        assert torch.allclose(after[name], before[name] * (0.95 if shrinks else 1.0), atol=1e-6)


def test_the_reference_stays_and_the_policy_comes_back(folder, tmp_path):
    backend, packed = _backend(folder), PackedRows.of_rows(_rows())
    start = backend.logprobs(packed)
    backend.keep_reference()
    _train(backend, 3)
    policy, weights = backend.logprobs(packed), _copy(backend)
    assert torch.equal(backend.reference_logprobs(packed), start)
    assert _same(weights, _copy(backend))
    assert torch.equal(backend.logprobs(packed), policy)
    assert not torch.equal(policy, start)
    backend.save(tmp_path)
    resumed = _backend(folder)
    resumed.load(tmp_path)
    assert torch.equal(resumed.reference_logprobs(packed), start)


def test_a_phase_begins_with_a_fresh_optimizer(folder, tmp_path):
    used = _backend(folder)
    _train(used, 2)
    used.save(tmp_path / "used")
    fresh = _backend(tmp_path / "used" / "model")
    used.begin_phase(OPTIMIZER, 8)
    assert used.step == 0
    assert _train(used, 2) == _train(fresh, 2)
    assert _same(_copy(used), _copy(fresh))


def test_bad_checkpoints_are_refused_with_a_reason(folder, tmp_path):
    backend = _backend(folder)
    with pytest.raises(CheckpointError, match="cannot be read"):
        backend.load(tmp_path / "nothing")
    _train(backend, 1)
    backend.save(tmp_path / "float32")
    with pytest.raises(CheckpointError, match=r"trainer\.dtype"):
        _backend(folder, Dtype.BFLOAT16).load(tmp_path / "float32")
    (tmp_path / "float32" / "model" / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        backend.load(tmp_path / "float32")
    (tmp_path / "float32" / "optimizer.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be read"):
        backend.load(tmp_path / "float32")


def test_logprobs_cover_the_vocabulary(folder):
    """Probabilities of all next tokens add up to 1."""
    rng = np.random.default_rng(3)
    row = make_row(rng, prompt=4, sampled=1)
    total = 0.0
    for token in range(VOCAB):
        row.token_ids[-1] = token
        total += float(_backend(folder).logprobs(PackedRows.of_rows([row])).exp())
    assert total == pytest.approx(1.0, abs=1e-5)


def test_entropies_come_when_asked_and_have_a_gradient(folder):
    backend, packed = _backend(folder), PackedRows.of_rows(_rows())
    seen = []

    def loss_of(outputs):
        seen.append(outputs)
        return (outputs.logprobs if outputs.entropy is None else outputs.entropy).sum(), None

    backend.accumulate(packed, loss_of)
    backend.discard()
    backend.accumulate(packed, loss_of, entropy=True)
    norm = backend.update().grad_norm
    plain, asked = seen
    assert plain.entropy is None
    assert torch.equal(plain.logprobs, asked.logprobs)
    assert bool((asked.entropy >= 0).all())
    assert float(asked.entropy.detach().max()) <= np.log(VOCAB) + 1e-5
    assert float(asked.entropy.detach()[3:7].max()) <= np.log(7) + 1e-5  # row 1 was drawn from kept sets
    assert norm > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", Dtype)
def test_a_cuda_device_trains_like_the_cpu_and_resumes_bit_for_bit(folder, dtype, tmp_path):
    config = TrainerConfig(steps=8, groups_per_step=1, dtype=dtype, device="cuda", optimizer=OPTIMIZER)
    backend, cpu = TorchBackend(folder, config), _backend(folder, dtype)
    norms = [[update.grad_norm for update in _train(each, 2)] for each in (backend, cpu)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4 if dtype is Dtype.FLOAT32 else 5e-2)
    backend.save(tmp_path)
    resumed = TorchBackend(folder, config)
    resumed.load(tmp_path)
    assert _train(resumed, 2) == _train(backend, 2)
    assert _same(_copy(backend), _copy(resumed))
