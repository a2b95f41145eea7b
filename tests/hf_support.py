"""Small random models of transformers, a batch for each, and the loss of the logits that they make themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed; the extra [train] lists it")

import transformers

import grpo_kernels as gk

SIZES = {
    "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any], float | None, float]] = {
    "plain": ("Qwen2", {}, None, 1.0),
    "softcap": ("Gemma2", {"final_logit_softcapping": 1.5, "head_dim": 8}, 1.5, 1.0),
    "logit_scale": ("Cohere", {"logit_scale": 0.3}, None, 0.3),
    "logits_scaling divides": ("Granite", {"logits_scaling": 2.5}, None, 0.4),
    "logits_scaling multiplies": ("HyperCLOVAX", {"logits_scaling": 2.5}, None, 2.5),
    "lm_head_multiplier": ("FalconH1", {"lm_head_multiplier": 0.7, "mamba_d_ssm": 16, "mamba_n_heads": 2}, None, 0.7),
    "experts": ("Mixtral", {"num_local_experts": 4}, None, 1.0),
    "scaled before the head": ("MiniCPM3", LATENT | {"dim_model_base": 8}, None, 0.5),
    "around the backbone": ("OPT", {"word_embed_proj_dim": 16, "ffn_dim": 24}, None, 1.0),
    "other names": ("GPT2", {"n_positions": 32}, None, 1.0),
}


ATTENTION = {"Gemma2": "eager"}  # which makes NaN of padding on the left in float64


def causal_lm(kind: str, tied: bool = False, **options: Any) -> Any:
    """In float64, with logits large enough to be capped."""
    config = getattr(transformers, f"{kind}Config")(**SIZES | options | {"tie_word_embeddings": tied})
    experts = {"experts_implementation": "eager"} if kind == "Mixtral" else {}  # the grouped product has no float64
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION.get(kind, "sdpa"), **experts
    )
    model = model.double().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=0.5)
    return model


def batch(kind: str = "Qwen2") -> dict[str, Any]:
    """Prompts padded on the left, completions on the right."""
    rng = torch.Generator().manual_seed(0)
    attention = torch.ones(3, 9, dtype=torch.int64)
    attention[0, : 0 if kind in ATTENTION else 2] = 0
    attention[1, 7:] = 0
    return {
        "input_ids": torch.randint(3, 37, (3, 9), generator=rng),
        "attention_mask": attention,
        "completion_mask": attention[:, 4:],
        "advantages": torch.tensor([1.0, -0.7, 0.3]),
        "old_per_token_logps": -3 + torch.rand(3, 5, generator=rng, dtype=torch.float64),
    }


def from_logits(model: Any, config: gk.GRPOLossConfig, given: dict[str, Any]) -> gk.GRPOLossOutput:
    """The same loss of what the model's own forward returns."""
    logits = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
    rest = {name: given[name] for name in ("advantages", "old_per_token_logps", "completion_mask")}
    return gk.grpo_loss(logits[:, 3:-1].double(), given["input_ids"][:, 4:], config=config, **rest)
