"""One wrong line each: `old` stands exactly once in the file, `new` takes its place, `check` notices."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A change that must not survive."""

    check: str
    old: str
    new: str


FORMULAS = [
    # arithmetic that selects
    Mutant(
        "infinities",
        "nothing = ((weight == 0) & (value == value)) | ((value == 0) & (weight == weight))",
        "nothing = weight != weight",
    ),
    Mutant("ties", "above = value > limit", "above = value >= limit"),
    Mutant("ties", "below = value < -limit", "below = value <= -limit"),
    Mutant(
        "log_ratio_clamp",
        "return tl.where(above, limit, tl.where(below, -limit, value)), above | below",
        "return tl.where(above, limit, tl.where(below, -limit, value)), above",
    ),
    Mutant(
        "kl_clamp",
        "return tl.where(above, limit, tl.where(below, -limit, value)), above | below",
        "return tl.where(above, limit, value), above",
    ),
    # the clip
    Mutant(
        "clip",
        "clipped = advantage * tl.where(ratio < lower, lower, tl.where(ratio > upper, upper, ratio))",
        "clipped = advantage * tl.where(ratio > upper, upper, ratio)",
    ),
    Mutant(
        "clip",
        "clipped = advantage * tl.where(ratio < lower, lower, tl.where(ratio > upper, upper, ratio))",
        "clipped = advantage * tl.where(ratio < lower, lower, ratio)",
    ),
    Mutant("clip", "use_clipped = clipped < unclipped", "use_clipped = clipped > unclipped"),
    Mutant(
        "clip", "loss = -tl.where(use_clipped, clipped, unclipped)", "loss = tl.where(use_clipped, clipped, unclipped)"
    ),
    Mutant("clip", "outside = (ratio < lower) | (ratio > upper)", "outside = ratio > upper"),
    Mutant("clip", "outside = (ratio < lower) | (ratio > upper)", "outside = ratio < lower"),
    Mutant("ties", "outside = (ratio < lower) | (ratio > upper)", "outside = (ratio <= lower) | (ratio >= upper)"),
    Mutant(
        "clip",
        "flat = silent | capped | (use_clipped & outside) | ((ratio > delta) & (use_clipped == 0))",
        "flat = silent | capped | ((ratio > delta) & (use_clipped == 0))",
    ),
    Mutant(
        "delta",
        "flat = silent | capped | (use_clipped & outside) | ((ratio > delta) & (use_clipped == 0))",
        "flat = silent | capped | (use_clipped & outside)",
    ),
    Mutant(
        "delta",
        "flat = silent | capped | (use_clipped & outside) | ((ratio > delta) & (use_clipped == 0))",
        "flat = silent | capped | (use_clipped & outside) | (ratio > delta)",
    ),
    Mutant(
        "dual_clip",
        "flat = silent | capped | (use_clipped & outside) | ((ratio > delta) & (use_clipped == 0))",
        "flat = silent | (use_clipped & outside) | ((ratio > delta) & (use_clipped == 0))",
    ),
    Mutant("delta", "unclipped = advantage * tl.where(ratio > delta, delta, ratio)", "unclipped = advantage * ratio"),
    Mutant("ties", "((ratio > delta) & (use_clipped == 0))", "((ratio >= delta) & (use_clipped == 0))"),
    Mutant("dual_clip", "ceiling = -dual_clip * advantage", "ceiling = dual_clip * advantage"),
    Mutant("dual_clip", "capped = (advantage < 0) & (loss > ceiling)", "capped = loss > ceiling"),
    Mutant("ties", "capped = (advantage < 0) & (loss > ceiling)", "capped = (advantage < 0) & (loss >= ceiling)"),
    Mutant("infinities", "silent = (advantage == 0) & (ratio == ratio)", "silent = ratio != ratio"),
    Mutant("clip", "tl.where(flat, 0.0, -advantage * ratio)", "tl.where(flat, 0.0, -advantage)"),
    # the other losses
    Mutant(
        "gpg", "return zero_safe_product(weight, logp), weight", "return zero_safe_product(weight, logp), weight * logp"
    ),
    Mutant(
        "cispo",
        "clipped = tl.where(ratio < lower, lower, tl.where(ratio > cap, cap, ratio))",
        "clipped = tl.where(ratio > cap, cap, ratio)",
    ),
    Mutant(
        "cispo",
        "clipped = tl.where(ratio < lower, lower, tl.where(ratio > cap, cap, ratio))",
        "clipped = tl.where(ratio < lower, lower, ratio)",
    ),
    Mutant("kl_cov", "loss = -zero_safe_product(advantage, ratio)", "loss = zero_safe_product(advantage, ratio)"),
    Mutant("sapo", "tau = tl.where(advantage > 0, ", "tau = tl.where(advantage < 0, "),
    Mutant("sapo", "x = tau * (ratio - 1.0)", "x = tau * ratio"),
    Mutant("sapo", "-advantage * (4.0 / tau * gate)", "-advantage * (4.0 * gate)"),
    Mutant("sapo", "-advantage * (4.0 * slope)", "-advantage * (4.0 / tau * slope)"),
    Mutant("sapo", "slope = zero_safe_product(ratio, decay) * (share * share)", "slope = decay * (share * share)"),
    Mutant("sapo", "gate = tl.where(x < 0, decay * share, share)", "gate = share"),
    Mutant("sapo", "decay = tl.exp(tl.where(x < 0, x, -x))", "decay = tl.exp(-x)"),
    Mutant(
        "dro",
        "return loss + 0.5 * beta * log_ratio * log_ratio, beta * log_ratio, own",
        "return loss + beta * log_ratio * log_ratio, beta * log_ratio, own",
    ),
    Mutant(
        "dro",
        "return loss + 0.5 * beta * log_ratio * log_ratio, beta * log_ratio, own",
        "return loss + 0.5 * beta * log_ratio * log_ratio, -beta * log_ratio, own",
    ),
    Mutant("dppo", "change = tl.exp(logp) - tl.exp(logp - gap)", "change = tl.exp(logp - gap) - tl.exp(logp)"),
    Mutant("ties", "return ((advantage > 0) & (change > high))", "return ((advantage > 0) & (change >= high))"),
    Mutant("dppo", "(change > high)) | ((advantage <= 0) & (change < -low))", "(change > high))"),
    Mutant("dppo", "((advantage > 0) & (kl > high) & (p > old))", "((advantage > 0) & (kl > high))"),
    Mutant("dppo", "((advantage <= 0) & (kl > low) & (p < old))", "((advantage < 0) & (kl > high) & (p < old))"),
    Mutant("dppo", "- zero_safe_product(old, gap)", "+ zero_safe_product(old, gap)"),
    Mutant("gmpo", "above = (advantage > 0) & (log_ratio > upper)", "above = log_ratio > upper"),
    Mutant("gmpo", "below = (advantage <= 0) & (log_ratio < lower)", "below = log_ratio < lower"),
    Mutant("ties", "above = (advantage > 0) & (log_ratio > upper)", "above = (advantage > 0) & (log_ratio >= upper)"),
    Mutant(
        "vespo",
        "phi = tl.exp(lam + k * log_weight - lam * tl.exp(log_weight))",
        "phi = tl.exp(lam + k * log_weight - lam * log_weight)",
    ),
    Mutant(
        "vespo",
        "phi = tl.exp(lam + k * log_weight - lam * tl.exp(log_weight))",
        "phi = tl.exp(k * log_weight - lam * tl.exp(log_weight))",
    ),
    Mutant("vespo", "good = advantage >= 0", "good = advantage <= 0"),
    # KL
    Mutant("kl", "return -d, tl.where(d == d, 1.0, d)", "return -d, tl.where(d == d, -1.0, d)"),
    Mutant(
        "kl",
        "return tl.where(d < 0, -d, d), tl.where(d > 0, -1.0, tl.where(d < 0, 1.0, d))",
        "return tl.where(d < 0, -d, d), tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, d))",
    ),
    Mutant("kl", "return d * d * 0.5, -d", "return d * d, -d"),
    Mutant("kl", "return d * d * 0.5, -d", "return d * d * 0.5, d"),
    Mutant("kl_near_zero", "near = (d > -0.25) & (d < 0.25)", "near = d != d"),
    Mutant("kl_near_zero", "near = (d > -0.25) & (d < 0.25)", "near = d < 0.25"),
    Mutant("kl_near_zero", "series = d * d * (0.5 + d * (1.0 / 6 +", "series = d * d * (0.5 + d * (1.0 / 8 +"),
    Mutant(
        "kl",
        "return tl.where(near, series, growth - d - 1.0), tl.where(near, -(d + series), 1.0 - growth)",
        "return tl.where(near, series, growth - d - 1.0), tl.where(near, -(d + series), growth - 1.0)",
    ),
    Mutant("kl_near_zero", "tl.where(near, -(d + series), 1.0 - growth)", "tl.where(near, -d, 1.0 - growth)"),
    Mutant("kl", "return tl.where(near, series, growth - d - 1.0)", "return tl.where(near, series, growth + d - 1.0)"),
    Mutant("kl", "d = ref - logp\n", "d = logp - ref\n"),
    Mutant("kl", "            kl_slope = -d\n", "            kl_slope = d\n"),
    Mutant("kl_clamp", "kl_slope = tl.where(cut, 0.0, kl_slope)", "kl_slope = tl.where(over, 0.0, kl_slope)"),
    Mutant("kl_clamp", "cut = cut | over", "cut = over & cut"),
    Mutant("kl_corrected", "both = kl_slope + value", "both = kl_slope"),
    Mutant("kl_corrected", "slope = slope + beta * through_ratio", "slope = slope + through_ratio"),
    Mutant("kl_corrected", "value = zero_safe_product(ratio, value)\n            kl_slope", "kl_slope"),
    Mutant("kl", "loss = loss + beta * value", "loss = loss + value"),
    Mutant("kl", "own = own + beta * kl_slope", "own = own - beta * kl_slope"),
    Mutant("given_weight", "        slope = zero_safe_product(weight, slope)\n", ""),
    Mutant("given_weight", "        loss = zero_safe_product(weight, loss)\n", ""),
    Mutant("log_ratio_clamp", "        slope = tl.where(moving, slope, 0.0)\n", "        slope = slope * 1.0\n"),
    # which tokens a clip holds back
    Mutant(
        "metrics",
        "low, high = (used < lower) & (advantage < 0), (used > upper) & good",
        "low, high = (used < lower) & good, (used > upper) & (advantage < 0)",
    ),
    Mutant("metrics", "used = tl.where(used > delta, delta, used)", "used = ratio"),
    Mutant("sequence_metrics", "(advantage < 0), (used > upper) & good", "(advantage < 0), used > upper"),
    Mutant(
        "dppo_metrics",
        "low, high = out & (advantage <= 0), out & good",
        "low, high = out & (advantage < 0), out & good",
    ),
]

OBJECTIVE = [
    Mutant(
        "entropy",
        "loss = loss + tokens.entropy.sum() * entropy_scale",
        "loss = loss - tokens.entropy.sum() * entropy_scale",
    ),
    Mutant("off_policy", "drift = -rollout.logp_difference(", "drift = rollout.logp_difference("),
    Mutant("off_policy", "return near if kept is None else near & kept", "return near"),
    Mutant(
        "levels",
        'by_sequence = config.importance_sampling_level != "token"',
        'by_sequence = config.importance_sampling_level == "sequence"',
    ),
    Mutant(
        "levels",
        'spread_over = ~stuck if config.importance_sampling_level == "sequence" else None',
        "spread_over = None",
    ),
    Mutant(
        "levels",
        "return layout.spread(layout.sum(values) / lengths.clamp(min=1))",
        "return layout.spread(layout.sum(values))",
    ),
    Mutant("vespo", "total = layout.sum(log_ratio.clamp(-20.0, 20.0))", "total = layout.sum(log_ratio)"),
    Mutant("vespo", "_LEAST_LOG_WEIGHT = math.log(1e-8)", "_LEAST_LOG_WEIGHT = math.log(1e-3)"),
    Mutant("gmpo", "~(stuck | cut)", "~stuck"),
    Mutant(
        "clip_cov",
        "loss, slope = (torch.where(own, 0.0, values) for values in (loss, slope))",
        "loss, slope = (torch.where(own, values, 0.0) for values in (loss, slope))",
    ),
    Mutant(
        "kl_cov",
        "slope = slope + torch.where(own, config.cov_coef * direction, 0.0)",
        "slope = slope - torch.where(own, config.cov_coef * direction, 0.0)",
    ),
    Mutant(
        "normalizer",
        "scale = aggregation.denominator(config, layout, lengths, normalizer).reciprocal()",
        "scale = aggregation.denominator(config, layout, lengths, None).reciprocal()",
    ),
    Mutant("levels", "if getattr(config, field) != usual:", "if getattr(config, field) == 'nothing':"),
    Mutant(
        "entropy",
        "if entropy_normalizer is None else entropy_normalizer\n    return weights",
        "if True else entropy_normalizer\n    return weights",
    ),
]

AGGREGATION = [
    Mutant("loss_types", "return 1.0 / lengths.clamp(min=1)\n", "return 1.0 / lengths.clamp(min=2)\n"),
    Mutant(
        "aggregations", "return 1.0 / layout.sum_of_prompt(lengths).clamp(min=1)", "return 1.0 / lengths.clamp(min=1)"
    ),
    Mutant(
        "aggregations",
        "return layout.num_prompts(lengths).clamp(min=1)",
        "return lengths.new_full((), lengths.shape[0])",
    ),
    Mutant("nothing_alive", "return lengths.sum().clamp(min=1)", "return lengths.sum()"),
    Mutant("normalizer", "        return normalizer\n", "        return normalizer.clamp(min=1)\n"),
    Mutant(
        "aggregations",
        'count = 1 if mode == "token_sum" else max(1, lengths.shape[0])',
        "count = max(1, lengths.shape[0])",
    ),
    Mutant("loss_types", "count *= config.max_completion_length", "count += config.max_completion_length"),
    Mutant(
        "loss_types",
        'count = 1 if mode == "token_sum" else max(1, lengths.shape[0])',
        'count = 1 if mode == "token_sum" else int((lengths > 0).sum())',
    ),
]

ROLLOUT = [
    Mutant(
        "rollout",
        "return torch.where(known, old - rollout, 0.0), known",
        "return torch.where(known, rollout - old, 0.0), known",
    ),
    Mutant("rollout", "known = live & (rollout == rollout)", "known = live"),
    Mutant("rollout", "total = total / layout.sum(live.to(old.dtype)).clamp(min=1)", "total = total * 1.0"),
    Mutant("rollout", "outside = outside | (weight > high)", "outside = outside & (weight > high)"),
    Mutant("rollout", "weight = torch.where(outside, 0.0, weight)", "weight = torch.where(outside, 1.0, weight)"),
    Mutant("rollout", "weight = weight.clamp(min=low, max=high)", "weight = weight.clamp(max=high)"),
    Mutant(
        "veto",
        "below = live & (log_weight < math.log(config.rollout_veto))",
        "below = log_weight < -config.rollout_veto",
    ),
    Mutant("veto", "return weight if vetoed is None else torch.where(vetoed, 0.0, weight)", "return weight"),
]

SELECTION = [
    Mutant(
        "off_policy", "return (advantages >= 0) | ~layout.spread(far)", "return (advantages > 0) | ~layout.spread(far)"
    ),
    Mutant("off_policy", "/ lengths > threshold", "> threshold"),
    Mutant("top_entropy", ".flatten(), 1 - share)", ".flatten(), share)"),
    Mutant("top_entropy", "return live & ~(entropy < quantile)", "return live & (entropy > quantile)"),
    Mutant(
        "clip_cov",
        "found = torch.nonzero(((cov > low) & (cov < high) & ~clipped)",
        "found = torch.nonzero(((cov > low) & ~clipped)",
    ),
    Mutant("clip_cov", "(cov < high) & ~clipped)", "(cov < high))"),
    Mutant(
        "clip_cov",
        "wanted = max(1, int(config.cov_ratio * int(live.sum())))",
        "wanted = 1 + int(config.cov_ratio * int(live.sum()))",
    ),
    Mutant("kl_cov", "descending=True", "descending=False"),
    Mutant(
        "kl_cov",
        "wanted = (count * config.cov_ratio).floor().clamp(min=1)",
        "wanted = (count * config.cov_ratio).floor()",
    ),
]

METRICS = [
    Mutant("sequence_metrics", "layout.spread(count / (lengths", "layout.spread(1 / (lengths"),
    Mutant("metrics", "low = rows.masked_fill(dead, torch.inf).amin(1)", "low = rows.amin(1)"),
    Mutant("metrics", "means = stacked.masked_fill(dead, 0.0).sum(1) / count", "means = stacked.mean(1)"),
    Mutant("sequence_metrics", 'return [high] if bounds == "cap" else', 'return [low] if bounds == "cap" else'),
    Mutant("vespo_metric", "(means[-1] + silent)", "means[-1]"),
    Mutant(
        "metrics",
        "return torch.stack([size.sum() / known.sum().clamp(min=1), most])",
        "return torch.stack([size.mean(), most])",
    ),
]

ADVANTAGES = [
    Mutant(
        "silence",
        "gap = torch.where(scored, rewards - groups.spread(top), 0.0)\n    mean_gap",
        "gap = torch.where(scored, rewards, 0.0)\n    mean_gap",
    ),
    Mutant(
        "silence",
        "mean_gap = groups.sum(gap) / count.clamp(min=1)",
        "mean_gap = groups.sum(gap) / groups.sum(torch.ones_like(gap))",
    ),
    Mutant(
        "group_advantages",
        "residual = torch.where(scored, gap - groups.spread(mean_gap), 0.0)",
        "residual = torch.where(scored, gap, 0.0)",
    ),
    Mutant(
        "group_advantages",
        "advantage = residual * groups.spread(count / (count - 1).clamp(min=1))",
        "advantage = residual * groups.spread((count - 1) / count)",
    ),
    Mutant(
        "group_advantages",
        "variance = groups.sum(residual.square()) / (count - ddof).clamp(min=1)\n        advantage",
        "variance = groups.sum(residual.square()) / count\n        advantage",
    ),
    Mutant(
        "group_advantages",
        "advantage = advantage / (groups.spread(variance.sqrt()) + eps)",
        "advantage = advantage / groups.spread(variance.sqrt())",
    ),
    Mutant(
        "group_advantages",
        "advantage = advantage / (groups.spread(variance.sqrt()) + eps)",
        "advantage = advantage / (groups.spread(variance) + eps)",
    ),
    Mutant(
        "group_advantages",
        "advantage = advantage / (_batch_std(rewards, scored, ddof) + eps)",
        "advantage = advantage / (_batch_std(rewards, scored, 0) + eps)",
    ),
    Mutant("silence", "silent = groups.spread((top == bottom) | (count <= 1))", "silent = groups.spread(count <= 1)"),
    Mutant(
        "silence", "return torch.where(scored & ~silent, advantage, 0.0)", "return torch.where(~silent, advantage, 1.0)"
    ),
    Mutant(
        "others_deviation",
        "own = residual.square() * groups.spread(count / (count - 1).clamp(min=1))",
        "own = residual.square()",
    ),
    Mutant(
        "others_deviation",
        "groups.spread((count - 1 - ddof).clamp(min=1))",
        "groups.spread((count - ddof).clamp(min=1))",
    ),
    Mutant(
        "others_deviation", "alike |= others >= groups.spread(count - 1)", "alike |= others > groups.spread(count - 1)"
    ),
    Mutant(
        "pass_at_k",
        "ratio = ratio * ((top - step).clamp(min=0) / (bottom - step).clamp(min=1))",
        "ratio = ratio * (top.clamp(min=0) / bottom.clamp(min=1))",
    ),
    Mutant("pass_at_k", "missed - alone)", "missed)"),
    Mutant(
        "pass_at_k",
        "deviation = groups.spread((chance * none_of_k).sqrt())",
        "deviation = groups.spread(chance.sqrt())",
    ),
    Mutant(
        "max_rl",
        "return torch.where(residual == 0, 0.0, residual / torch.where(mean > 0, mean, 1.0))",
        "return torch.where(residual == 0, 0.0, residual)",
    ),
    Mutant(
        "whitened",
        "mean = (values * weight).sum() / count.clamp(min=1)",
        "mean = (values * weight).sum() / len(values)",
    ),
    Mutant(
        "whitened",
        "variance = (residual.square() * weight).sum() / (count - ddof).clamp(min=1)",
        "variance = (residual.square() * weight).sum() / count",
    ),
    Mutant("whitened", "(variance + eps).sqrt())", "variance.sqrt() + eps)"),
    Mutant(
        "gdpo",
        "total = sum(part if weights is None else part * weights[k] for k, part in enumerate(parts))",
        "total = sum(part for k, part in enumerate(parts))",
    ),
]

MUTANTS: dict[str, list[Mutant]] = {
    "formulas": FORMULAS, "objective": OBJECTIVE, "aggregation": AGGREGATION, "rollout": ROLLOUT,
    "selection": SELECTION, "metrics": METRICS, "advantages": ADVANTAGES,
}  # fmt: skip
