"""The model that needs no download: Qwen2 architecture, one token per byte, made on the spot and warmed up.

A random model never answers right, so no group has a reward to learn from. The warm-up, a few hundred supervised steps
on the task's own answers, brings it to where some of a group's responses are right: the state in which GRPO meets a
pretrained model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from .config import EmbeddedConfig
from .packing import make_packs
from .policy import Policy

PAD, END = "<pad>", "<end>"
MAX_POSITIONS = 2048
INITIAL_STD = 0.06  # transformers' 0.02 suits models ten times as wide; this learns sums in half the steps


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per byte, so one per ASCII character, and any text has tokens; plus `<pad>` and `<end>` (end of text).

    Qwen2's own class with an alphabet and no merges: AutoTokenizer takes that class for every Qwen2 folder, whatever
    the folder's files say.
    """
    tokens = [PAD, END, *sorted(ByteLevel.alphabet())]
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        unk_token=PAD,  # no byte is unknown
        eos_token=END,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
    )


def make_model(config: EmbeddedConfig, tokenizer: Qwen2Tokenizer) -> PreTrainedModel:
    """A Qwen2 causal LM with random weights from torch's global generator; float32, tied head."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=4 * config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_heads,
            max_position_embeddings=MAX_POSITIONS,
            initializer_range=INITIAL_STD,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def warm_up(
    policy: Policy,
    pairs: Callable[[int, int], tuple[list[list[int]], list[list[int]]]],
    config: EmbeddedConfig,
    *,
    max_tokens: int,
    report: Callable[[int, float], None],
) -> None:
    """Minimise -log p(answer | prompt) over `warmup_steps` batches with AdamW at a constant learning rate.

    Args:
        pairs: (first, count) -> token ids of that many prompts and of their answers, end token included.
        max_tokens: input tokens of one forward, as in `make_packs`.
        report: told each finished step and its mean loss per answer token, in nats.
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.warmup_learning_rate, betas=(0.9, 0.99))
    size = config.warmup_batch_size
    for step in range(config.warmup_steps):
        prompts, answers = pairs(step * size, size)
        num_tokens = sum(map(len, answers))
        packs = make_packs(prompts, answers, layout=policy.layout, max_tokens=max_tokens, device=policy.device)
        total = torch.zeros((), device=policy.device)
        for pack in packs:
            logits = policy.logits(pack)  # (n, V)
            loss = F.cross_entropy(logits, pack.completion_ids, reduction="sum") / num_tokens
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        report(step + 1, total.item())
