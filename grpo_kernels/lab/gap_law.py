"""Where training settles at a constant step: the law of J* - J, predicted from the error of the gradient and simulated.

Near an optimum with curvature H = -grad^2 J (flat directions allowed) and gradient noise of covariance C, a small
constant step eta leaves the parameters with covariance W, H W + W H = eta C on the range of H, and

    J* - J  ~  (1/2) sum_j l_j chi^2_1,   l = eigenvalues of H^(1/2) W H^(1/2),   mean (eta / 4) MSE.

The playground: a table of softmax logits for 3 prompts x 3 actions, J = mean reward - beta KL(pi || pi_ref), whose
optimum is interior and known, so that the noise does not vanish there. The KL's gradient is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import complain
from .arrays import check_number, check_whole, seeded
from .simulate import draw

QUANTILES = (0.25, 0.5, 0.75, 0.9)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Rewards `[M, K]` of the actions, the reference policy `[M, K]`, the KL's weight; prompts are equally likely."""

    reward: Tensor
    reference: Tensor
    beta: float

    def optimum(self) -> Tensor:
        """Logits of pi* ~ pi_ref exp(r / beta)."""
        return self.reference.log() + self.reward / self.beta

    def objective(self, logits: Tensor) -> Tensor:
        """J of logits `[..., M, K]`."""
        logp = logits.log_softmax(-1)
        value = self.reward - self.beta * (logp - self.reference.log())
        expected: Tensor = (logp.exp() * value).sum(-1).mean(-1)
        return expected


@dataclass(frozen=True, slots=True)
class GapLaw:
    """The predicted law, and what chains of updates did."""

    mean: float
    quantiles: tuple[float, ...]
    """At `QUANTILES`."""
    rank: int
    """Directions in which J is not flat."""
    simulated_mean: float
    simulated_quantiles: tuple[float, ...]


def make_table(seed: int = 0, M: int = 3, K: int = 3, beta: float = 0.5) -> Table:
    """Random rewards in (0, 1) and a random reference."""
    if not check_number("make_table", "beta", beta, "Try 0.5.") > 0:
        raise ValueError(complain("make_table", "beta", "must be > 0", beta, "Without a KL the optimum has no noise."))
    generator = seeded("make_table", seed)
    reward = torch.rand(M, K, generator=generator, dtype=torch.float64)
    logits = 0.5 * torch.randn(M, K, generator=generator, dtype=torch.float64)
    return Table(reward, logits.softmax(1), beta)


def noise_covariance(table: Table, n: int, G: int) -> Tensor:
    """Covariance of the leave-one-out estimate at the optimum, over all logits, `[M K, M K]`, exact for any G >= 2."""
    M, K = table.reward.shape
    policy = table.optimum().softmax(1)
    total = torch.zeros(M * K, M * K, dtype=torch.float64)
    mean = torch.zeros(M * K, dtype=torch.float64)
    for x in range(M):
        scores = torch.zeros(K, M * K, dtype=torch.float64)
        scores[:, x * K : (x + 1) * K] = torch.eye(K, dtype=torch.float64) - policy[x]
        rho = table.reward[x] - policy[x] @ table.reward[x]
        g = (policy[x] * rho) @ scores
        outer = torch.outer(g, g)
        first = (scores.T * (policy[x] * rho.square())) @ scores - outer
        fisher = (scores.T * policy[x]) @ scores
        second = (policy[x] @ rho.square()) * fisher + outer
        total += (outer + first / G + second / (G * (G - 1))) / M
        mean += g / M
    return (total - torch.outer(mean, mean)) / n


def predicted_weights(table: Table, n: int, G: int, eta: float) -> Tensor:
    """l_1, ..., l_rank of the law above."""
    point = table.optimum()
    hessian = torch.autograd.functional.hessian(lambda flat: table.objective(flat.view(point.shape)), point.flatten())
    values, vectors = torch.linalg.eigh(-hessian)
    bent = values > 1e-9 * values.max()
    values, vectors = values[bent], vectors[:, bent]
    noise = vectors.T @ noise_covariance(table, n, G) @ vectors
    covariance = eta * noise / (values.unsqueeze(0) + values.unsqueeze(1))
    root = values.sqrt()
    weights: Tensor = torch.linalg.eigvalsh(root.unsqueeze(1) * covariance * root)
    return weights


def stationary_gap(
    table: Table, *, n: int, G: int, eta: float, chains: int = 4000, burn_in: int = 600, snapshots: int = 10,
    apart: int = 60, seed: int = 0,
) -> GapLaw:  # fmt: skip
    """The law of J* - J under updates theta += eta (estimate - beta grad KL), n prompts x G responses each.

    Simulated with `chains` independent runs from the optimum, read `snapshots` times, `apart` updates from each other,
    after `burn_in` updates.
    """
    name = "stationary_gap"
    n, G, chains, snapshots = (
        check_whole(name, argument, value, least, "Raise it.")
        for argument, value, least in (("n", n, 1), ("G", G, 2), ("chains", chains, 2), ("snapshots", snapshots, 1))
    )
    if not check_number(name, "eta", eta, "Give a step size.") > 0:
        raise ValueError(complain(name, "eta", "must be > 0", eta, "Give a step size."))
    weights = predicted_weights(table, n, G, eta)
    generator = seeded(name, seed)
    normal = torch.randn(1 << 19, len(weights), generator=generator, dtype=torch.float64)
    levels = torch.tensor(QUANTILES, dtype=torch.float64)
    law = 0.5 * normal.square() @ weights
    gaps = _gaps(table, n, G, eta, chains, burn_in, snapshots, apart, generator)
    return GapLaw(
        mean=0.5 * weights.sum().item(), quantiles=tuple(law.quantile(levels).tolist()), rank=len(weights),
        simulated_mean=gaps.mean().item(), simulated_quantiles=tuple(gaps.quantile(levels).tolist()),
    )  # fmt: skip


def _gaps(
    table: Table, n: int, G: int, eta: float, chains: int, burn_in: int, snapshots: int, apart: int,
    generator: torch.Generator,
) -> Tensor:  # fmt: skip
    M, K = table.reward.shape
    best = table.objective(table.optimum())
    logits = table.optimum().repeat(chains, 1, 1)
    reference = table.reference.log()
    found = []
    rows = torch.arange(chains).unsqueeze(1)
    for step in range(burn_in + (snapshots - 1) * apart + 1):
        if step >= burn_in and (step - burn_in) % apart == 0:
            found.append(best - table.objective(logits))
        logp = logits.log_softmax(-1)
        policy = logp.exp()
        distance = logp - reference
        of_kl = policy * (distance - (policy * distance).sum(-1, keepdim=True)) / M  # gradient of mean KL
        prompts = torch.randint(M, (chains, n), generator=generator)
        table_rows = (rows * M + prompts).flatten()
        actions = draw(policy.view(-1, K), table_rows, G, generator).view(chains, n, G)
        reward = table.reward[prompts].gather(2, actions)
        advantages = (reward - reward.mean(2, keepdim=True)) / (G - 1)
        # sum_i A_i s_i, s = onehot - pi; the advantages of a group sum to 0
        flat = prompts.unsqueeze(2) * K + actions
        estimate = torch.zeros(chains, M * K, dtype=torch.float64)
        estimate.scatter_add_(1, flat.flatten(1), advantages.flatten(1) / n)
        logits = logits + eta * (estimate.view(chains, M, K) - table.beta * of_kl)
    return torch.cat(found)
