"""Tiny models of other attention families, as folders that the engine can serve: MLA, a sliding-window hybrid, and
one of K and V heads that the engine can serve with DP attention (its Llama cannot).

All run on the engine's own layers; all their MLPs are dense, because experts have no CPU kernel without AMX.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.sglang.models import VOCABULARY, save_weights, write_tokenizer

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}

MLA: dict[str, Any] = {
    **_COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "rope_theta": 10000.0,
    # The engine's only rotary embedding for MLA on a CPU.
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
}

OPTIONS = (
    "--attention-backend", "torch_native", "--max-total-tokens", "4096", "--context-length", "1024",
    # Sums in bfloat16 depend on who shares a batch, and with them the tokens, natively as well.
    "--dtype", "float32", "--kv-cache-dtype", "bfloat16",
)  # fmt: skip

MLA_OPTIONS = OPTIONS

WINDOW = 64

SWA: dict[str, Any] = {
    **_COMMON,
    "architectures": ["MellumForCausalLM"],
    "model_type": "mellum",
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense"] * 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
}

SWA_OPTIONS = (*OPTIONS, "--swa-full-tokens-ratio", "0.5")

QWEN3: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
}


THE_MODEL = "the model itself"
"""In the options of a server: the folder of its model."""

SPECULATION_OPTIONS = (
    *OPTIONS, "--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", THE_MODEL,
    "--speculative-num-steps", "1", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2",
)  # fmt: skip
"""The model drafts for itself; in a batch its drafts are right most of the time."""


def write_mla(folder: Path, *, weights: bool = True) -> Path:
    """A model of three layers that keeps one latent per token."""
    hidden, heads = MLA["hidden_size"], MLA["num_attention_heads"]
    nope, rope, rank, v_dim = (
        MLA[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "v_head_dim")
    )
    attention = {
        "q_proj": (heads * (nope + rope), hidden),
        "kv_a_proj_with_mqa": (rank + rope, hidden),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (nope + v_dim), rank),
        "o_proj": (hidden, heads * v_dim),
    }
    return _write(folder, MLA, attention, weights)


def write_swa(folder: Path, *, weights: bool = True) -> Path:
    """A model of four layers, every other one with a sliding window of 64 tokens."""
    return _write(folder, SWA, _heads(SWA), weights)


def write_qwen3(folder: Path, *, weights: bool = True) -> Path:
    """A model of two layers of K and V heads."""
    return _write(folder, QWEN3, _heads(QWEN3), weights)


def _heads(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, kv_heads, dim = (
        config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    return {
        "q_proj": (heads * dim, hidden),
        "k_proj": (kv_heads * dim, hidden),
        "v_proj": (kv_heads * dim, hidden),
        "q_norm": (dim,),
        "k_norm": (dim,),
        "o_proj": (hidden, heads * dim),
    }


def _write(folder: Path, config: dict[str, Any], attention: dict[str, tuple[int, ...]], weights: bool) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    if not weights:
        return folder
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
        }
    save_weights(folder, shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)})
    return folder
