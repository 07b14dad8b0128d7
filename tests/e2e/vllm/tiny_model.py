"""A Llama of 4 layers with random weights and a byte tokenizer, made in a second and without a network.

The weights are scaled so that every layer contributes: what the model says depends on the whole of its prompt, hence on
every block of its KV cache. With weights near zero any KV would give the same answer, and a comparison would prove
nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LAYERS = 4
HEADS = 8
KV_HEADS = 4
HEAD_DIM = 64
HIDDEN = HEADS * HEAD_DIM
INTERMEDIATE = 1024
VOCABULARY = 259
BEGIN, END, PAD = 256, 257, 258
MAX_TOKENS = 8192


def make_tiny_model(directory: Path, seed: int = 0, kv_heads: int = KV_HEADS, **changes: Any) -> Path:
    """Writes the model whose weights are drawn from `seed` into `directory`, which is returned; `changes` to its configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (1.5 / math.sqrt(shape[-1]))

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": random(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": random(HIDDEN, HIDDEN),
            prefix + "self_attn.k_proj.weight": random(kv_heads * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": random(kv_heads * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": random(HIDDEN, HIDDEN),
            prefix + "mlp.gate_proj.weight": random(INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": random(INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": random(HIDDEN, INTERMEDIATE),
            prefix + "input_layernorm.weight": torch.ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "dtype": "float32",
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path, more: Sequence[str] = ()) -> None:
    """A token per byte, then those for begin, end and padding, then the special tokens `more`."""
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<s>": BEGIN, "</s>": END, "<pad>": PAD, **{token: VOCABULARY + i for i, token in enumerate(more)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>", *more])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
