"""Tiny models as folders that the engine can serve. Random weights, wide enough that tokens depend on every block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}


LLAMA_OPTIONS = ("--attention-backend", "torch_native", "--max-total-tokens", "4096", "--context-length", "1024")

DSV4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 448,
    "v_head_dim": 512,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 4,
    "index_head_dim": 128,
    "index_n_heads": 8,
    "index_topk": 512,
    "sliding_window": 128,
    "window_size": 128,
    "compress_rope_theta": 40000,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "num_hash_layers": 1,
    "n_hash_layers": 1,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_nextn_predict_layers": 0,
    "swiglu_limit": 10.0,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}

DSV4_OPTIONS = (
    "--load-format", "dummy", "--swa-full-tokens-ratio", "0.5", "--max-total-tokens", "8192",
    "--context-length", "2048",
)  # fmt: skip


def write_dsv4(folder: Path) -> Path:
    """A DeepSeek-V4 of four layers, one of each kind; its arithmetic is the toy's (standins/toy_dsv4.py)."""
    (folder / "config.json").write_text(json.dumps(DSV4))
    write_tokenizer(folder)
    return folder


def write_llama(folder: Path, *, weights: bool = True, layers: int = LLAMA["num_hidden_layers"]) -> Path:
    """A Llama of two layers, or of as many as are asked for."""
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": layers}))
    write_tokenizer(folder)
    if weights:
        _write_weights(folder, layers)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, and names for the rest of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-not-found]

    names = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<unused{number}>" for number in range(VOCABULARY - len(names))]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 2048,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_weights(folder: Path, layers: int) -> None:
    hidden, inner = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    heads, kv_heads, dim = LLAMA["num_attention_heads"], LLAMA["num_key_value_heads"], LLAMA["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (heads * dim, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv_heads * dim, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv_heads * dim, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, heads * dim),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}
    save_weights(folder, shapes)


def save_weights(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Draw weights in the order in which they are named; they depend on nothing but names and shapes."""
    import torch
    from safetensors.torch import save_file  # type: ignore[import-not-found]

    generator = torch.Generator().manual_seed(20)
    weights = {
        name: (torch.randn(shape, generator=generator) * 0.3 if len(shape) > 1 else torch.ones(shape)).to(
            torch.bfloat16
        )
        for name, shape in shapes.items()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
