"""From a task's examples to the token ids that the policy reads, and the ids that end what it writes."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .bounds import ConfigError
from .config import ModelConfig
from .tasks import Example


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], model: ModelConfig
) -> list[list[int]]:
    """Token ids of each example's prompt, in the tokenizer's chat template if the settings want one."""
    texts = [example.prompt for example in examples]
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if model.chat_template == "always" and not has_template:
        raise ConfigError('encode_prompts: model.chat_template = "always" must have a template, got none. Use "auto".')
    if has_template and model.chat_template != "never":
        system = [{"role": "system", "content": model.system_prompt}] if model.system_prompt else []
        chats = [[*system, {"role": "user", "content": text}] for text in texts]
        texts = [str(tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False)) for c in chats]
        encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    elif model.system_prompt:
        raise ConfigError("encode_prompts: model.system_prompt must have a chat template, got none in use. Remove it.")
    else:
        encoded = tokenizer(texts)["input_ids"]
    for text, ids in zip(texts, encoded, strict=True):
        if not ids:
            raise ValueError(f"encode_prompts: prompts must have at least one token, got {text!r}. Add some text.")
    return encoded


def encode_answers(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[list[int]]:
    """Token ids of each entry's own answer, the end token last; ConfigError for entries without one."""
    for example in examples:
        if "answer" not in example.entry:
            raise ConfigError(
                f"encode_answers: entries must have an answer for the warm-up to learn, got {sorted(example.entry)}. "
                "Set model.path to a pretrained model, which needs no warm-up."
            )
    texts = [str(example.entry["answer"]) for example in examples]
    return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a response: the tokenizer's end token and those of the generation config."""
    ids: set[int] = set()
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    for source in (tokenizer.eos_token_id, configured):
        ids.update([source] if isinstance(source, int) else source or [])
    if not ids:
        raise ConfigError("end_token_ids: the tokenizer must have an end token, got none. Set its eos_token.")
    return sorted(ids)
