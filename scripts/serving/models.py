"""Models that the benchmarks serve: few layers of real width, so that the real attention kernels run.

Weights are drawn from a fixed seed (:mod:`serving.weights.seeded_weights`). They say nothing, but every token and its
log probability depends on what the kernels read from the pools.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sglang.models import DSV4, VOCABULARY

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 32768,
}

# The widths of DeepSeek-V4-Flash, six layers, one of each kind; everything else as the tests have it.
_DSV4: dict[str, Any] = {
    **DSV4,
    "hidden_size": 4096,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "compress_ratios": [0, 4, 128, 4, 128, 0],
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "index_n_heads": 64,
    "compress_rope_theta": 160000,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 65536,
}


@dataclass(frozen=True)
class Model:
    """One model and how the engine serves it where only some of its kernels are at hand.

    Attributes:
        name: of the model.
        config: its ``config.json``.
        options: of the server.
        settings: environment variables of the engine.
        capacity_tokens: tokens of the pools.
    """

    name: str
    config: dict[str, Any]
    options: tuple[str, ...]
    capacity_tokens: int
    settings: dict[str, str] = field(default_factory=dict)

    def token_bytes(self, tp: int) -> int:
        """Bytes of one token's K and V on one rank, for models with plain heads."""
        if "compress_ratios" in self.config:
            raise ValueError(f"{self.name} has pools that tokens do not share evenly")
        heads = max(1, self.config["num_key_value_heads"] // tp)
        return int(self.config["num_hidden_layers"] * heads * self.config["head_dim"] * 2 * 2)

    def write(self, folder: Path) -> Path:
        """The model as a folder."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-not-found]

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**_COMMON, **self.config}))
        names = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        names += [f"<unused{number}>" for number in range(VOCABULARY - len(names))]
        tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, [], unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": self.config["max_position_embeddings"],
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder


THE_MODEL = "{model}"
"""In options: the folder of the model that is served."""

_QWEN3_OPTIONS = ("--attention-backend", "triton")
_DSV4_OPTIONS = (
    "--skip-server-warmup", "--dsa-topk-backend", "torch", "--max-running-requests", "16", "--chunked-prefill-size",
    "4096",
)  # fmt: skip
_DSV4_SETTINGS = {
    "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_POST": "0",
    "SGLANG_DSV4_MHC_PREWARM": "0",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "SGLANG_DSA_FUSE_TOPK": "false",
    "SGLANG_OPT_FP8_WO_A_GEMM": "0",
    "SGLANG_DSV4_FP4_EXPERTS": "0",
}
_ONE_DRAFT = (
    "--speculative-num-steps", "1", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2",
)  # fmt: skip

MODELS = {
    model.name: model
    for model in (
        Model("qwen3", _QWEN3, _QWEN3_OPTIONS, 400_000),
        Model("deepseek_v4", _DSV4, _DSV4_OPTIONS, 400_000, _DSV4_SETTINGS),
        # The model drafts for itself: as many drafts are right as can be, and every one is read from the draft's pools.
        Model(
            "qwen3_drafts",
            _QWEN3,
            (
                *_QWEN3_OPTIONS, *_ONE_DRAFT, "--speculative-algorithm", "STANDALONE",
                "--speculative-draft-model-path", THE_MODEL,
            ),
            200_000,
        ),
        Model(
            "deepseek_v4_mtp",
            {**_DSV4, "num_nextn_predict_layers": 1},
            (*_DSV4_OPTIONS, *_ONE_DRAFT, "--speculative-algorithm", "EAGLE"),
            400_000,
            _DSV4_SETTINGS,
        ),
    )
}  # fmt: skip
