"""A tiny random Llama, made on the spot: nothing is downloaded, and no tokenizer is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 1024
# A spread of 0.05 makes attention outweigh the last token's own embedding, so that a wrong context shows; the factor
# on the head peaks the distribution, so that a wrong engine shows. head_dim 128: FlashInfer takes 64, 128 and 256 only.
SPREAD, PEAK = 0.05, 2.0


def make_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write config and bf16 weights with ``save_pretrained``; returns the folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4, head_dim=128,
        num_key_value_heads=2, vocab_size=VOCABULARY, tie_word_embeddings=False, initializer_range=SPREAD,
        bos_token_id=1, eos_token_id=2, max_position_embeddings=1024,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(PEAK)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def load(folder: Path, device: str, dtype: Any, attention: str = "sdpa") -> Any:
    """The checkpoint as a Hugging Face model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    return model.to(device)


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random token ids; the same for one seed on every machine."""
    import random

    source = random.Random(seed)
    return [[source.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(count)]


def token_logprobs(model: Any, sequence: list[int], start: int) -> list[float]:
    """Log-probability of each token from ``start`` on, given those before it; softmax in float32."""
    import torch

    ids = torch.tensor([sequence], device=model.device)
    with torch.no_grad():
        logits = model(ids).logits[0].float().log_softmax(-1)
    targets = ids[0, start:]
    return list(logits[start - 1 : -1].gather(1, targets[:, None])[:, 0].tolist())
