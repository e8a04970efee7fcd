"""What happens in a run that tunes on rows of files: supervised fine-tuning and preference training."""

from __future__ import annotations

import msgspec


class TuningPrepared(msgspec.Struct, frozen=True, tag="tuning_prepared.1"):
    """The rows were read, checked and rendered. Once for each incarnation."""

    kind: str
    """`sft` or `dpo`."""
    samples: int
    """Samples to train on: conversations, or pairs."""
    held_out: int
    """Samples to evaluate on."""
    rows: int
    """Sequences of the samples to train on; more than one a sample where a template cannot go on from an answer."""
    loss_tokens: int
    """Tokens of these that are imitated or compared."""
    tokens: int
    """All tokens of these, context included."""
    left_out: int
    """Samples left out as too long."""
    truncated: int
    """Samples whose end was cut off."""
    also_held_out: int
    """Training samples left out because they are held out too."""
    steps: int
    """Steps that the run will take."""
    digest: str
    """BLAKE3 (hex) of the samples to train on and of what decides their order."""
    held_out_digest: str = ""
    """BLAKE3 (hex) of the samples to evaluate on. Empty: the run was made before this was recorded."""


class TuningStepped(msgspec.Struct, frozen=True):
    """An optimizer step on samples, whatever its loss: what every kind of it records, never an event by itself."""

    number: int
    """From 1."""
    epoch: int
    """Pass over the samples, from 0."""
    samples: tuple[int, ...]
    """Places of the samples trained, in the order of the step."""
    loss: float
    """The number differentiated."""
    tokens: int
    """Tokens in the gradient."""
    non_finite: int
    """Tokens of conversations, or pairs, refused for a log-probability that is not finite."""
    forward_tokens: int
    """Tokens of the forwards, context included."""
    grad_norm: float
    """Gradient norm before clipping."""
    lr: float
    """Learning rate."""
    step_s: float
    """Seconds."""
    weights_digest: str
    """Root digest of the cast weights after the step."""


class SupervisedStepped(TuningStepped, frozen=True, tag="supervised_stepped.1"):
    """An optimizer step on conversations."""

    nll: float
    """Mean negative log-likelihood of a token in the gradient, before the step."""


class SupervisedEvaluated(msgspec.Struct, frozen=True, tag="supervised_evaluated.1"):
    """The held-out conversations, scored."""

    step: int
    """Steps behind the weights."""
    loss: float
    """Mean negative log-likelihood of a token."""
    tokens: int
    """Tokens."""
    per_sample: tuple[float, ...]
    """Mean negative log-likelihood of a token of each conversation, in their order, for paired comparisons."""
    probability: float
    """Mean over the conversations of the probability that exactly these answers are sampled at temperature 1."""
    probabilities: tuple[float, ...]
    """That probability of each."""
    seconds: float
    """Seconds it took."""


class ReferenceScored(msgspec.Struct, frozen=True, tag="reference_scored.1"):
    """The reference's log-probabilities of all pairs, once, before the first step."""

    weights_digest: str
    """Root digest of the reference's cast weights: those the run starts from."""
    scores_digest: str
    """BLAKE3 (hex) of the file that keeps the scores."""
    pairs: int
    """Pairs, held-out ones included."""
    seconds: float
    """Seconds it took."""


class PreferenceStepped(TuningStepped, frozen=True, tag="preference_stepped.1"):
    """An optimizer step on pairs. Means are over the pairs in the gradient, before the step."""

    accuracy: float
    """Share of pairs whose chosen answer has the larger reward; an equal one counts half."""
    margin: float
    """Mean reward of the chosen answers minus that of the rejected."""
    chosen_reward: float
    """Mean reward of the chosen answers: beta times their log-ratio to the reference."""
    rejected_reward: float
    """The same of the rejected."""


class PreferenceEvaluated(msgspec.Struct, frozen=True, tag="preference_evaluated.1"):
    """The held-out pairs, scored."""

    step: int
    """Steps behind the weights."""
    loss: float
    """Mean loss of a pair, without imitation."""
    accuracy: float
    """Share of pairs whose chosen answer has the larger reward; an equal one counts half."""
    preferred: float
    """Share of pairs whose chosen answer is the likelier one under the policy itself, whatever the reference says."""
    margins: tuple[float, ...]
    """Reward of the chosen answer minus that of the rejected, of each pair, in their order."""
    log_odds: tuple[float, ...]
    """Log-probability of the chosen answer minus that of the rejected, of each pair."""
    chosen_reward: float
    """Mean reward of the chosen answers."""
    rejected_reward: float
    """The same of the rejected."""
    chosen_probability: float
    """Mean probability that exactly the chosen answer is sampled at temperature 1."""
    rejected_probability: float
    """The same of the rejected."""
    chosen_probabilities: tuple[float, ...]
    """That probability of each chosen answer, in the pairs' order."""
    seconds: float
    """Seconds it took."""


class ModelSaved(msgspec.Struct, frozen=True, tag="model_saved.1"):
    """The trained model is whole on disk, as a Hugging Face folder or an adapter."""

    step: int
    """Steps behind it."""
    path: str
    """Folder, relative to the run's."""
    weights_digest: str
    """Root digest of its cast weights."""


TuningEvent = (
    TuningPrepared
    | SupervisedStepped
    | SupervisedEvaluated
    | ReferenceScored
    | PreferenceStepped
    | PreferenceEvaluated
    | ModelSaved
)
"""Every kind of these."""
