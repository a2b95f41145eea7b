"""A transformer small enough to enumerate: prompt (a, b), answer (y1, y2), every answer of every prompt in one forward.

One pre-norm block of width 24 with causal attention, under 10 000 parameters. Answers are exactly two digits, so there
are 100 x 100 sequences, and grad J, V(x) and all constants are sums, not estimates. The ten possible y1 branch off the
prompt in one sequence of twelve tokens, a and b first, each y1 seeing a, b and itself.

Tasks: "pair" rewards y1 + y2 = a + b, which many answers fulfil, so that a good policy stays random. "sum" rewards the
one answer that spells a + b in two digits; there no baseline beats V(x) after a supervised start. "sum_bonus" is "sum"
plus 1 for any answer, a constant that only the estimator without a baseline feels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_choice
from .bandit import Atoms

TASKS = ("pair", "sum", "sum_bonus")
DIGITS = 10
PROMPTS = torch.cartesian_prod(torch.arange(DIGITS), torch.arange(DIGITS))  # [100, 2]
Parameters = dict[str, Tensor]
_WIDTH, _HEADS = 24, 2


def rewards(task: str) -> Tensor:
    """`[100, 100]` reward of each answer (10 y1 + y2) of each prompt (10 a + b), float64."""
    check_choice("rewards", "task", task, TASKS)
    total = PROMPTS.sum(1)
    first, second = torch.arange(100) // DIGITS, torch.arange(100) % DIGITS
    answer = first + second if task == "pair" else torch.arange(100)
    right = (answer == total.unsqueeze(1)).to(torch.float64)
    return right + 1 if task == "sum_bonus" else right


def make_parameters(seed: int) -> Parameters:
    """Random weights, float32."""
    generator = torch.Generator().manual_seed(seed)
    d = _WIDTH

    def draw(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    return {
        "tokens": draw(DIGITS, d, std=0.5),
        "places": draw(3, d, std=0.5),
        "norm1": torch.ones(d),
        "qkv": draw(d, 3 * d, std=d**-0.5),
        "mix": draw(d, d, std=d**-0.5),
        "norm2": torch.ones(d),
        "up": draw(d, 4 * d, std=d**-0.5),
        "down": draw(4 * d, d, std=0.5 * (4 * d) ** -0.5),
        "norm3": torch.ones(d),
        "head": draw(d, DIGITS, std=d**-0.5),
    }


def count_parameters(parameters: Parameters) -> int:
    """How many numbers."""
    return sum(value.numel() for value in parameters.values())


def log_probabilities(parameters: Parameters, prompts: Tensor) -> Tensor:
    """log pi(answer | prompt): digits `[n, 2]` to `[n, 100]`, answers numbered 10 y1 + y2, in nats."""
    n = len(prompts)
    ids = torch.cat([prompts, torch.arange(DIGITS).expand(n, DIGITS)], 1)  # [n, 12]
    hidden = body(parameters, ids, torch.tensor([0, 1, *[2] * DIGITS]))[:, 1:]  # after b; after each y1
    steps = torch.log_softmax(hidden @ parameters["head"], -1)  # [n, 11, 10]
    return (steps[:, 0].unsqueeze(2) + steps[:, 1:]).flatten(1)


def body(parameters: Parameters, ids: Tensor, places: Tensor) -> Tensor:
    """Rows `[n, L, 24]` that the head multiplies: tokens `[n, L]` at places `[L]` see those before, and themselves."""
    d = _WIDTH
    x = parameters["tokens"][ids] + parameters["places"][places]
    q, k, v = (_norm(x) * parameters["norm1"] @ parameters["qkv"]).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (_HEADS, d // _HEADS)).transpose(1, 2) for part in (q, k, v))
    seen = (places.unsqueeze(1) > places) | torch.eye(len(places), dtype=torch.bool)
    weights = (q @ k.transpose(-1, -2) / math.sqrt(d / _HEADS)).masked_fill(~seen, -torch.inf).softmax(-1)
    x = x + (weights @ v).transpose(1, 2).flatten(2) @ parameters["mix"]
    x = x + F.gelu(_norm(x) * parameters["norm2"] @ parameters["up"]) @ parameters["down"]
    return _norm(x) * parameters["norm3"]


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def warm_up(task: str, *, seed: int = 1, steps: int = 360, batch: int = 32, learning_rate: float = 1e-3) -> Parameters:
    """Supervised steps on random right answers of random prompts: a start that is sometimes right."""
    parameters = {name: value.requires_grad_() for name, value in make_parameters(seed).items()}
    optimizer = torch.optim.Adam(list(parameters.values()), lr=learning_rate)
    generator = torch.Generator().manual_seed(seed + 1)
    right = rewards(task)
    right = (right == right.amax(1, keepdim=True)).to(torch.float64)
    for _ in range(steps):
        prompts = torch.randint(len(PROMPTS), (batch,), generator=generator)
        answers = torch.multinomial(right[prompts], 1, generator=generator)
        loss = -log_probabilities(parameters, PROMPTS[prompts]).gather(1, answers).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in parameters.items()}


def expected_reward(parameters: Parameters, right: Tensor) -> Tensor:
    """J, exact."""
    return (log_probabilities(parameters, PROMPTS).exp() * right).sum(1).mean()


def exact_atoms(parameters: Parameters, task: str, *, dtype: torch.dtype = torch.float32) -> Atoms:
    """All prompts, all answers, their rewards, and the score of each over all parameters, `[100, 100, d]`."""
    right = rewards(task)
    names = list(parameters)
    wide = {name: value.detach().to(torch.float64) for name, value in parameters.items()}

    def of_prompt(prompt: Tensor) -> dict[str, Tensor]:
        def answers(values: Parameters) -> Tensor:
            return log_probabilities(values, prompt.unsqueeze(0))[0]

        found: dict[str, Tensor] = torch.func.jacrev(answers)(wide)
        return found

    rows = []
    for prompt in PROMPTS:
        found = of_prompt(prompt)
        rows.append(torch.cat([found[name].flatten(1) for name in names], 1).to(dtype))
    with torch.no_grad():
        probabilities = log_probabilities(wide, PROMPTS).exp()
    return Atoms(probabilities, right, torch.stack(rows))
