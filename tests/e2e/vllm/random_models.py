"""Models of other kinds than the tiny Llama, and adapters for it, with random weights, made without a network.

As in `tiny_model`, weights are scaled so that every layer, every token and every image counts in what the model says.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    PreTrainedModel,
)

from tests.e2e.vllm.tiny_model import BEGIN, END, HIDDEN, LAYERS, MAX_TOKENS, PAD, VOCABULARY, write_tokenizer

LATENT_DIM = 576
"""Of 512 dimensions that all heads share and 64 that know the position: the only size that vLLM's CPU kernel has."""
IMAGE_TOKENS = 4
IMAGE_PIXELS = 28
ADAPTER_RANK = 8


def make_latent_model(directory: Path) -> Path:
    """A DeepSeek-V2 of two dense layers: multi-head latent attention, whose KV cache is one vector per token and layer."""
    config = DeepseekV2Config(
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=1,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    return _save(DeepseekV2ForCausalLM(config), directory)


def make_image_model(directory: Path) -> Path:
    """A BLIP-2 whose Llama of two layers gets an image of 28 x 28 pixels as four tokens before the text."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY + 1,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PAD,
        architectures=["LlamaForCausalLM"],
    )
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**sizes, image_size=IMAGE_PIXELS, patch_size=IMAGE_PIXELS // 2),
        qformer_config=Blip2QFormerConfig(**sizes, encoder_hidden_size=128, cross_attention_frequency=1, vocab_size=VOCABULARY),
        text_config=text,
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=VOCABULARY,
    )
    _save(Blip2ForConditionalGeneration(config), directory, ["<image>"])
    size = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    pictures = {"image_processor_type": "BlipImageProcessor", "size": size, "processor_class": "Blip2Processor"}
    (directory / "preprocessor_config.json").write_text(json.dumps(pictures))
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": "Blip2Processor", "num_query_tokens": IMAGE_TOKENS}))
    return directory


def make_image(path: Path, seed: int) -> Path:
    """Noise drawn from `seed`."""
    pixels = torch.randint(0, 256, (IMAGE_PIXELS, IMAGE_PIXELS, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(path)
    return path


def make_adapter(directory: Path, seed: int) -> Path:
    """A LoRA adapter of the tiny Llama that changes the queries and so, from the second layer on, keys and values too."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj."
        weights[prefix + "lora_A.weight"] = torch.randn(ADAPTER_RANK, HIDDEN, generator=generator) / math.sqrt(HIDDEN)
        weights[prefix + "lora_B.weight"] = torch.randn(HIDDEN, ADAPTER_RANK, generator=generator)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def _save(model: PreTrainedModel, directory: Path, extra_tokens: list[str] | None = None) -> Path:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                fan_in = 1.0 if "embed" in name else weight[0].numel() / 2.25
                weight.copy_(torch.randn(weight.shape, generator=generator) / math.sqrt(fan_in))
    model.save_pretrained(directory)
    write_tokenizer(directory, extra_tokens or [])
    return directory
