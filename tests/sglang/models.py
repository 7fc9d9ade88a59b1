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


def write_llama(folder: Path, *, weights: bool = True) -> Path:
    """A Llama of two layers."""
    (folder / "config.json").write_text(json.dumps(LLAMA))
    _write_tokenizer(folder)
    if weights:
        _write_weights(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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


def _write_weights(folder: Path) -> None:
    """Weights that depend on nothing but this code: drawn by name, in a fixed order."""
    import torch
    from safetensors.torch import save_file

    hidden, inner = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    heads, kv_heads, dim = LLAMA["num_attention_heads"], LLAMA["num_key_value_heads"], LLAMA["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for layer in range(LLAMA["num_hidden_layers"]):
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
    generator = torch.Generator().manual_seed(20)
    weights = {
        name: (torch.randn(shape, generator=generator) * 0.3 if len(shape) > 1 else torch.ones(shape)).to(
            torch.bfloat16
        )
        for name, shape in shapes.items()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
