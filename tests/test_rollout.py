"""Sampling: what a plain forward per token would draw, with a cache that finished responses leave."""

from __future__ import annotations

import pytest
import torch
import transformers
from test_packing import MODELS, VOCABULARY, qwen2
from torch import Tensor

from grpo_kernels.training import ConfigError, rollout
from grpo_kernels.training.policy import Policy
from grpo_kernels.training.rollout import sample

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16]]


def greedy_one_by_one(model: transformers.PreTrainedModel, limit: int, end_ids: list[int]) -> list[list[int]]:
    """No cache, no batch: the whole sequence again for every token."""
    responses = []
    for prompt in PROMPTS:
        ids = list(prompt)
        while len(ids) - len(prompt) < limit and (len(ids) == len(prompt) or ids[-1] not in end_ids):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        responses.append(ids[len(prompt) :])
    return responses


@pytest.mark.parametrize("compact_below", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("max_sequences", [0, 1, 2])
def test_greedy_equals_a_forward_per_token(
    compact_below: float, max_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "COMPACT_BELOW", compact_below)
    model = qwen2().double()
    unlimited = greedy_one_by_one(model, 12, [])
    end_ids = [unlimited[0][2], unlimited[1][5]]  # so that responses end at different times, one of them not at all
    expected = greedy_one_by_one(model, 12, end_ids)
    assert len({len(response) for response in expected}) == 3
    responses = sample(
        Policy(model), PROMPTS, num_generations=1, max_completion_length=12, temperature=0, end_ids=end_ids,
        max_sequences=max_sequences,
    )  # fmt: skip
    assert responses == expected


@pytest.mark.parametrize("name", MODELS)
def test_greedy_of_any_causal_lm(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.4 * torch.randn_like(parameter))  # at their own scale they repeat one token
    model.tie_weights()
    expected = greedy_one_by_one(model, 6, [])
    assert len({token for response in expected for token in response}) > 2
    responses = sample(
        Policy(model), PROMPTS, num_generations=2, max_completion_length=6, temperature=0, end_ids=[VOCABULARY]
    )
    assert responses == [response for response in expected for _ in range(2)]


def test_draws_follow_the_tempered_distribution() -> None:
    model, temperature, count = qwen2(), 0.7, 20_000
    responses = sample(
        Policy(model), [PROMPTS[0], PROMPTS[1]], num_generations=count, max_completion_length=2,
        temperature=temperature, end_ids=[VOCABULARY], generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    for group, prompt in enumerate(PROMPTS[:2]):
        drawn = torch.tensor(responses[group * count : (group + 1) * count])
        with torch.no_grad():
            first = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double() / temperature, dim=-1)
            after = model(torch.tensor([[*prompt, token] for token in range(VOCABULARY)])).logits[:, -1]
            second = first @ torch.softmax(after.double() / temperature, dim=-1)
        for position, expected in enumerate((first, second)):
            assert chi_square(drawn[:, position], expected) < 100  # 60 degrees of freedom: 99.9 % lie below 99.6
        untempered = torch.softmax(torch.log(first) * temperature, dim=-1)
        assert chi_square(drawn[:, 0], untempered) > 1000  # the test can tell the two apart


def chi_square(drawn: Tensor, probabilities: Tensor) -> float:
    observed = torch.bincount(drawn, minlength=len(probabilities)).double()
    expected = probabilities * len(drawn)
    return ((observed - expected) ** 2 / expected).sum().item()


def test_a_seed_repeats_and_groups_differ() -> None:
    policy = Policy(qwen2())

    def draw(seed: int) -> list[list[int]]:
        return sample(
            policy, PROMPTS, num_generations=4, max_completion_length=6, temperature=1.0, end_ids=[1],
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    assert len({tuple(response) for response in draw(0)[:4]}) > 1


def test_a_prompt_is_read_once_and_finished_responses_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, shapes = Policy(qwen2()), []
    forward = policy.next_logits

    def watched(input_ids: Tensor, mask: Tensor, cache: object) -> Tensor:
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids, mask, cache)  # type: ignore[arg-type]

    monkeypatch.setattr(policy, "next_logits", watched)
    end_ids = list(range(0, VOCABULARY, 2))  # every second token ends a response
    responses = sample(
        policy, PROMPTS, num_generations=32, max_completion_length=9, temperature=3.0, end_ids=end_ids,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert shapes[0] == (3, 6)
    lengths = torch.tensor([len(response) for response in responses])
    for t, (rows, columns) in enumerate(shapes[1:], start=1):
        still_running = int((lengths > t).sum())
        assert columns == 1
        assert still_running <= rows <= still_running / 0.9 + 1
    assert len(shapes) == lengths.max()


def test_the_end_token_is_kept_and_a_cut_response_has_none() -> None:
    responses = sample(
        Policy(qwen2()), PROMPTS, num_generations=16, max_completion_length=5, temperature=2.0,
        end_ids=[1, 3, 17, 30, 44], generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    ended = [response for response in responses if response[-1] in (1, 3, 17, 30, 44)]
    assert 0 < len(ended) < len(responses)
    for response in responses:
        assert not {1, 3, 17, 30, 44} & set(response[:-1])
        assert response in ended or len(response) == 5


def test_one_token_needs_one_forward() -> None:
    responses = sample(Policy(qwen2()), PROMPTS, num_generations=1, max_completion_length=1, temperature=0, end_ids=[1])
    assert [len(response) for response in responses] == [1, 1, 1]


def test_a_model_that_decodes_otherwise_than_it_reads_is_refused() -> None:
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2, initializer_range=0.4, eos_token_id=1
    )
    with pytest.raises(ConfigError, match=r"must decode with a KV cache behind padding, got .* MambaForCausalLM"):
        Policy(transformers.MambaForCausalLM(config).eval())
