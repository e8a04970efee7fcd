"""Random models of each supported family, a few thousand parameters each."""

from __future__ import annotations

from itertools import accumulate

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from fathom.model.attention import PackedAttention

VOCAB = 61
CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
    "deepseek_v3": DeepseekV3Config,
}
MOE = ("qwen3_moe", "mixtral", "deepseek_v3")
_OWN = {
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
    },
}


def random_config(family="llama", **entries):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return CONFIGS[family](**(sizes | _OWN.get(family, {}) | entries))


def random_model(family="llama", seed=0, **entries):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(random_config(family, **entries), attn_implementation="sdpa").eval()


def random_ids(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def packed(rows):
    """(token ids, position ids, plan) of sequences laid end to end."""
    lengths = [len(row) for row in rows]
    return torch.cat(rows), torch.cat([torch.arange(length) for length in lengths]), PackedAttention(lengths)


def split(tensor, rows):
    ends = list(accumulate(len(row) for row in rows))
    return [tensor[end - len(row) : end] for end, row in zip(ends, rows, strict=True)]
