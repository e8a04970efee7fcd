"""Families of variants. Each has one literal dict where it is implemented; a test checks that the dict covers it."""

from __future__ import annotations

from enum import StrEnum


class EngineKind(StrEnum):
    """Which engine generates."""

    EMBEDDED = "embedded"
    SCRIPTED = "scripted"
    VLLM = "vllm"


class Speculation(StrEnum):
    """Who drafts tokens for the engine to check, several in one forward."""

    NONE = "none"
    """Nobody: one token after the other."""
    NGRAM = "ngram"
    """What came after the last two or three tokens the last time."""
    DRAFT_MODEL = "draft_model"
    """A small model of the same vocabulary."""


class TransportKind(StrEnum):
    """How weights travel."""

    SHARED = "shared"
    DISK = "disk"
    BROADCAST = "broadcast"
    P2P = "p2p"
    DELTA = "delta"


class FabricKind(StrEnum):
    """What writes from one process's memory into another's, for `sync.transport = "p2p"`."""

    NIXL = "nixl"
    """NIXL over UCX: RDMA, shared memory or TCP."""
    MOONCAKE = "mooncake"
    """Mooncake's Transfer Engine over TCP."""
    MEMORY = "memory"
    """Within one process only: for tests."""


class CollectiveBackend(StrEnum):
    """What carries a broadcast."""

    AUTO = "auto"
    """NCCL where trainer and engines each hold weights on a GPU of their own, else Gloo."""
    GLOO = "gloo"
    NCCL = "nccl"


class OnStale(StrEnum):
    """What happens when a step would over-age a group."""

    WAIT = "wait"
    DROP = "drop"
    REQUEUE = "requeue"


class Dtype(StrEnum):
    """Element type of a forward."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class ObjectiveKind(StrEnum):
    """A named objective (`config/objectives`): a policy loss, a way to advantages, and defaults for the rest."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    DAPO = "dapo"
    GSPO = "gspo"
    CISPO = "cispo"
    REINFORCE_PP = "reinforce_pp"
    REINFORCE_PP_BASELINE = "reinforce_pp_baseline"
    RLOO = "rloo"
    PPO = "ppo"
    DPPO = "dppo"
    IPO = "ipo"


class PolicyLossKind(StrEnum):
    """How log-probabilities and advantages become a loss of each token (`algorithms.md` D.2, D.4, D.5)."""

    CLIP = "clip"
    """The clipped ratio of each token."""
    SEQUENCE_CLIP = "sequence_clip"
    """The clipped ratio of the whole trajectory, by its length."""
    CLIPPED_WEIGHT = "clipped_weight"
    """-log-probability, weighted by the clipped ratio as a constant."""
    REINFORCE = "reinforce"
    """-log-probability, without a ratio."""
    SIGNED_REGION = "signed_region"
    """The ratio to the behaviour policy, dropped where the probability has moved too far the advantage's way."""
    REGION = "region"
    """The ratio to the behaviour policy, dropped where the probability has moved too far either way."""


class AdvantageSource(StrEnum):
    """Where the advantages of tokens come from (`algorithms.md` D.1, D.6, D.7)."""

    GROUP = "group"
    """A trajectory's reward beside those of its group; all its tokens share it."""
    RETURNS = "returns"
    """What a token and those after it earned."""
    CRITIC = "critic"
    """What a token and those after it earned beyond what a value model expected."""


class Advantage(StrEnum):
    """Advantages from a group of rewards (`algorithms.md` D.1)."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    MAXRL = "maxrl"
    RAFT = "raft"


class Aggregation(StrEnum):
    """How token losses become one number (`algorithms.md` D.9)."""

    TOKEN_MEAN = "token_mean"
    SEQ_MEAN_TOKEN_MEAN = "seq_mean_token_mean"
    SEQ_MEAN_TOKEN_SUM = "seq_mean_token_sum"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq_mean_token_sum_norm"


class Correction(StrEnum):
    """Weight for tokens sampled by another distribution than the trainer's (`algorithms.md` C.1)."""

    NONE = "none"
    TOKEN_TIS = "token_tis"
    ICEPOP = "icepop"
    SEQUENCE_TIS = "sequence_tis"
    SEQUENCE_MIS = "sequence_mis"
    GEOMETRIC_RS = "geometric_rs"
    TOKEN_RS = "token_rs"
    K2_RS = "k2_rs"
    K3_RS = "k3_rs"
    KPOP = "kpop"


class Proximal(StrEnum):
    """What the policy ratio is centred on (`algorithms.md` B.4)."""

    DECOUPLED = "decoupled"
    """Trainer's log-probabilities before the first step on the batch, recomputed and kept for all its steps."""
    BYPASS = "bypass"
    """The behaviour log-probabilities themselves, stored with the record."""
    LOGLINEAR = "loglinear"
    """Between behaviour and current log-probabilities, by the token's age: one version behind the current policy."""


class KlEstimator(StrEnum):
    """KL penalty estimators (`algorithms.md` D.8)."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class KlPlacement(StrEnum):
    """Where the KL penalty to the reference enters."""

    LOSS = "loss"
    """Differentiated, beside the policy loss."""
    REWARD = "reward"
    """Subtracted from the rewards, as a constant."""


class DistillationForm(StrEnum):
    """What of two distributions is compared (`algorithms.md` D.8)."""

    SAMPLED_TOKEN = "sampled_token"
    """The token that the student sampled: an estimate of the reverse KL."""
    TOP_K = "top_k"
    """The likeliest ids of student, teacher, or both."""
    FULL_VOCABULARY = "full_vocabulary"
    """Every id: the reverse KL itself."""


class IdSet(StrEnum):
    """Which ids of two top-k sets are compared."""

    ONLY_STUDENT = "only_student"
    """The student's."""
    ONLY_TEACHER = "only_teacher"
    """The teacher's."""
    INTERSECTION = "intersection"
    """Those in both."""
    UNION = "union"
    """Those in either."""
    XOR = "xor"
    """Those in exactly one."""


class IdWeight(StrEnum):
    """How compared ids are weighted."""

    STUDENT_P = "student_p"
    """By the student's probability."""
    TEACHER_P = "teacher_p"
    """By the teacher's probability."""
    NONE = "none"
    """All alike."""


class RejectionDenominator(StrEnum):
    """What the loss divides by after tokens were rejected (`algorithms.md` C.4)."""

    ALL = "all"
    KEPT = "kept"


class OptimizerKind(StrEnum):
    """How masters follow their gradient."""

    ADAMW = "adamw"
    """Adam with decoupled weight decay; two float32 moments for each element."""
    MUON = "muon"
    """Muon (orthogonalised momentum) for the matrices inside the model, AdamW for embeddings, head, norms and biases.
    Its steps are scaled to AdamW's size, so a learning rate means the same for both."""
    ADAM8BIT = "adam8bit"
    """AdamW with moments of 8 bits in blocks (bitsandbytes), a quarter of the memory."""


class ReferenceKind(StrEnum):
    """Which weights a KL penalty is measured against."""

    FROZEN = "frozen"
    """Those RL started from."""
    PERIODIC = "periodic"
    """Those of the latest of every so many steps."""
    EMA = "ema"
    """An exponential moving average of the policy's."""


class Schedule(StrEnum):
    """Learning-rate schedule after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class LoraPublish(StrEnum):
    """What engines get of a model that is trained by an adapter."""

    ADAPTER = "adapter"
    """The adapter alone, computed with beside the frozen base: exactly the trainer's function."""
    MERGED = "merged"
    """The whole model with the update added and rounded to its element type: for engines that know no adapters. What
    the rounding loses is recorded with every publication."""


class Tracker(StrEnum):
    """Where metrics go besides the ledger."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


class TooLong(StrEnum):
    """What becomes of a sample that does not fit the model's context (`fathom sft`, `fathom dpo`)."""

    REFUSE = "refuse"
    """The run does not start."""
    LEAVE_OUT = "leave_out"
    """It is left out and counted."""
    TRUNCATE = "truncate"
    """Its tokens beyond the limit are left out, and it is counted; without a token to imitate it is left out."""
