"""Packs: every layout gives the logits, the loss and the gradients of one sequence after the other, without leaks."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import transformers
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.training.packing import Layout, make_packs
from grpo_kernels.training.policy import Policy

CPU = torch.device("cpu")
VOCABULARY = 61
PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15]]
COMPLETIONS = [[20, 21, 1], [22, 1], [23, 24, 25, 26], [1], [30, 31], [32, 33, 34, 1]]  # two to a prompt
LAYOUTS: list[Layout] = ["block", "varlen", "padded"]


def qwen2(**changes: object) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.15, tie_word_embeddings=True, eos_token_id=1, **changes,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config).eval()


def packs_of(layout: Layout, max_tokens: int = 1000, prompts: Sequence = PROMPTS, completions: Sequence = COMPLETIONS):
    return make_packs(prompts, completions, layout=layout, max_tokens=max_tokens, device=CPU)


def one_by_one(model: transformers.PreTrainedModel, prompts: Sequence = PROMPTS, completions: Sequence = COMPLETIONS):
    """Logits (N, V) of the rows that predict completion tokens, a plain forward per sequence."""
    rows = []
    for i, completion in enumerate(completions):
        prompt = prompts[i // (len(completions) // len(prompts))]
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0]
        rows.append(logits[len(prompt) - 1 : -1])
    return torch.cat(rows)


def test_block_layout_by_hand() -> None:
    (pack,) = packs_of("block", prompts=[[5, 6], [9]], completions=[[20, 21, 1], [22, 1], [1], [30, 31]])
    assert pack.input_ids.tolist() == [[5, 6, 20, 21, 22, 9, 30]]  # a prompt once; no completion's last token
    assert pack.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1]]
    assert pack.rows.tolist() == [1, 2, 3, 1, 4, 5, 5, 6]
    assert pack.completion_ids.tolist() == [20, 21, 1, 22, 1, 1, 30, 31]
    assert pack.cu_seqlens.tolist() == [0, 3, 5, 6, 8]
    assert pack.attention_mask is not None
    assert pack.attention_mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],  # the second completion sees its prompt and itself, not the first
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]


def test_varlen_and_padded_layouts_by_hand() -> None:
    prompts, completions = [[5, 6]], [[20, 21, 1], [22]]
    (varlen,) = packs_of("varlen", prompts=prompts, completions=completions)
    assert varlen.input_ids.tolist() == [[5, 6, 20, 21, 5, 6]]
    assert varlen.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert varlen.attention_mask is None
    assert varlen.rows.tolist() == [1, 2, 3, 5]
    (padded,) = packs_of("padded", prompts=prompts, completions=completions)
    assert padded.input_ids.tolist() == [[5, 6, 20, 21], [5, 6, 0, 0]]
    assert padded.attention_mask is not None
    assert padded.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert padded.rows.tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("max_tokens", [1, 6, 9, 14, 1000])
def test_packs_cover_every_sequence_once_within_the_limit(layout: Layout, max_tokens: int) -> None:
    packs = packs_of(layout, max_tokens)
    assert [i for pack in packs for i in range(len(COMPLETIONS))[pack.sequences]] == list(range(len(COMPLETIONS)))
    flat = [token for completion in COMPLETIONS for token in completion]
    for pack in packs:
        assert pack.completion_ids.tolist() == flat[pack.tokens]
        lengths = [len(completion) for completion in COMPLETIONS[pack.sequences]]
        assert pack.cu_seqlens.diff().tolist() == lengths
        assert pack.input_ids.numel() <= max_tokens or len(lengths) == 1


def test_a_range_of_sequences_keeps_the_batch_numbering() -> None:
    packs = make_packs(PROMPTS, COMPLETIONS, layout="block", max_tokens=1000, device=CPU, first=2, last=4)
    assert [(pack.sequences, pack.tokens) for pack in packs] == [(slice(2, 4), slice(5, 10))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("max_tokens", [7, 1000])
def test_logits_are_those_of_one_sequence_after_the_other(layout: Layout, max_tokens: int) -> None:
    model = qwen2().double()
    policy = Policy(model)
    with torch.no_grad():
        logits = torch.cat([policy.logits(pack) for pack in packs_of(layout, max_tokens)])
        torch.testing.assert_close(logits, one_by_one(model), rtol=0, atol=1e-12)


def total_loss(policy: Policy, layout: Layout, max_tokens: int, dtype: torch.dtype) -> Tensor:
    """The packed loss, off-policy and with KL, summed over packs with one normaliser; backward done."""
    generator = torch.Generator().manual_seed(1)
    count = sum(map(len, COMPLETIONS))
    old = (-4 + 0.5 * torch.randn(count, generator=generator)).to(dtype)
    ref = (-4 + 0.5 * torch.randn(count, generator=generator)).to(dtype)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0], dtype=dtype)
    config = gk.GRPOLossConfig(loss_type="grpo", beta=0.1, entropy_coef=0.01, temperature=0.7)
    total = torch.zeros((), dtype=dtype)
    for pack in packs_of(layout, max_tokens):
        loss = gk.grpo_loss(
            policy.logits(pack), pack.completion_ids, config=config, advantages=advantages[pack.sequences],
            cu_seqlens=pack.cu_seqlens, old_per_token_logps=old[pack.tokens], ref_per_token_logps=ref[pack.tokens],
            normalizer=len(COMPLETIONS), entropy_normalizer=count, inplace=True,
        ).loss  # fmt: skip
        loss.backward()
        total += loss.detach()
    return total


@pytest.mark.parametrize("max_tokens", [7, 1000])
@pytest.mark.parametrize("layout", ["block", "varlen"])
def test_packed_equals_padded_in_loss_and_every_gradient(layout: Layout, max_tokens: int) -> None:
    packed, padded, exact = (Policy(qwen2()) for _ in range(3))
    exact.double()
    loss, expected = (
        total_loss(packed, layout, max_tokens, torch.float32),
        total_loss(padded, "padded", 1000, torch.float32),
    )
    truth = total_loss(exact, "padded", 1000, torch.float64)
    assert abs(loss.item()) > 0.01
    assert abs(loss.item() - expected.item()) <= 1e-6
    assert abs(loss.item() - truth.item()) <= 1e-6
    for (name, ours), theirs, true in zip(
        packed.named_parameters(), padded.parameters(), exact.parameters(), strict=True
    ):
        assert ours.grad is not None and theirs.grad is not None and true.grad is not None, name
        assert ours.grad.abs().max() > 1e-4, name
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6, msg=name)
        torch.testing.assert_close(ours.grad.double(), true.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_sequences_change_nothing_bitwise(layout: Layout) -> None:
    policy = Policy(qwen2())
    prompts, completions = copy.deepcopy(PROMPTS), copy.deepcopy(COMPLETIONS)
    prompts[0] = [40, 41, 42]
    completions[0], completions[1], completions[3] = [43, 44, 45], [46, 47], [48]
    kept = slice(5, 9)  # of the second group's first completion
    with torch.no_grad():
        (before,), (after,) = packs_of(layout), packs_of(layout, prompts=prompts, completions=completions)
        assert before.completion_ids[kept].tolist() == COMPLETIONS[2]
        assert torch.equal(policy(before)[kept], policy(after)[kept])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_head_never_runs(layout: Layout) -> None:
    """Its weight is for the loss; asked for logits, it reads completion rows only."""
    model = qwen2()
    policy = Policy(model)
    rows = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: rows.append(tuple(inputs[0].shape)))
    (pack,) = packs_of(layout)
    assert policy(pack).shape == (sum(map(len, COMPLETIONS)), 32)
    assert rows == []
    policy.logits(pack)
    assert rows == [(sum(map(len, COMPLETIONS)), 32)]


def test_logits_may_be_overwritten_by_the_loss() -> None:
    for policy in (Policy(qwen2()), Policy(capped())):
        logits = policy.logits(packs_of("padded")[0])
        assert not logits._is_view() and not logits.is_leaf


def capped() -> transformers.PreTrainedModel:
    """A model whose logits are not head(body(ids))."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3, final_logit_softcapping=3.0, sliding_window=2,
        query_pre_attn_scalar=8, eos_token_id=1, bos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()


def test_layout_follows_the_attention() -> None:
    assert Policy(qwen2()).layout == "block"
    assert Policy(qwen2(), packing=False).layout == "padded"
    assert Policy(qwen2(use_sliding_window=True, sliding_window=2, max_window_layers=0)).layout == "padded"
    assert Policy(capped()).layout == "padded"


SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, eos_token_id=1)
    ),  # ALiBi: takes no positions
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=1)
    ),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**SMALL, intermediate_size=48, eos_token_id=1)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, intermediate_size=48)),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SMALL, num_key_value_heads=2, intermediate_size=48, sliding_window=3)
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=16, max_position_embeddings=64)
    ),
    "cohere": lambda: transformers.CohereForCausalLM(
        transformers.CohereConfig(**SMALL, intermediate_size=48, logit_scale=0.25, eos_token_id=1, bos_token_id=2)
    ),  # scaled logits
    "gemma2": capped,
}


@pytest.mark.parametrize("name", MODELS)
def test_any_causal_lm_gives_its_own_logits(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    policy = Policy(model)
    with torch.no_grad():
        packs = packs_of(policy.layout, max_tokens=20)
        torch.testing.assert_close(
            torch.cat([policy.logits(pack) for pack in packs]), one_by_one(model), rtol=1e-5, atol=5e-6
        )
