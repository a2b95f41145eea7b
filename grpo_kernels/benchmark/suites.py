"""What is measured: suites of cases, at sizes for a CPU, for a GPU, and tiny ones for a try."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from .measure import PHASES, Case
from .problems import Shape

OURS, INPLACE = "ours", "ours, in place"
LOGITS: Final = (
    INPLACE, "ours, in place, entropy", OURS, "ours, torch implementation, in place", "eager", "compiled", "TRL",
    "TRL, Triton", "Liger, Triton", "copy",
)  # fmt: skip
LINEAR: Final = (
    "ours, fast", "ours, lean", "eager", "compiled", "torch linear_cross_entropy + GRPO", "TRL, chunked head",
    "Liger, 1 sequence a chunk", "Liger, one chunk", "Liger, one chunk, compiled", "cut-cross-entropy + GRPO",
    "bare products", "bare products, input dtype",
)  # fmt: skip
FEW_LINEAR: Final = (
    "ours, fast", "ours, lean", "eager", "TRL, chunked head", "Liger, one chunk", "cut-cross-entropy + GRPO",
    "bare products",
)  # fmt: skip
ABLATION: Final = (
    OURS, "ours, log-probs + eager objective", "ours, log-probs + compiled objective", INPLACE, "copy",
)  # fmt: skip
VOCABULARIES: Final = (32_000, 50_257, 128_256, 151_936, 201_088, 262_144)
SUITES: Final = ("logits", "linear", "ablation", "mix", "sweep", "calls", "memory")
Suites = dict[str, tuple[Case, ...]]


def cpu_suites() -> Suites:
    """Some five minutes on two cores."""
    half = "bfloat16"
    return {
        "logits": tuple(
            Case(Shape(2, tokens // 2, vocabulary, dtype), LOGITS, phases, warm_up=6)
            for vocabulary, tokens in ((32_000, 512), (151_936, 128))
            for dtype, phases in (("float32", ("both",)), (half, PHASES))
        ),
        "linear": (
            Case(Shape(8, 128, 32_000, hidden=512), LINEAR[:-1], rounds=5, warm_up=0),
            Case(Shape(8, 128, 32_000, hidden=512, frozen=True), FEW_LINEAR, rounds=3, warm_up=0),
            Case(Shape(4, 128, 151_936, hidden=896), FEW_LINEAR, rounds=2, warm_up=0),
            Case(Shape(4, 128, 151_936, half, hidden=896), (*FEW_LINEAR, LINEAR[-1]), rounds=2, warm_up=0),
        ),
        "ablation": tuple(
            Case(Shape(4, tokens // 4, 32_000, half), ABLATION, rounds=rounds, warm_up=2)
            for tokens, rounds in ((256, 21), (4096, 7), (16_384, 3))
        ),
        "mix": (
            Case(Shape(20, 24, 32_000, mixed=True), LOGITS[:-1]),
            Case(Shape(20, 24, 32_000, hidden=512, mixed=True), FEW_LINEAR[:-1], rounds=5, warm_up=1),
        ),
        "sweep": tuple(Case(Shape(4, 16, v, half), (INPLACE, OURS, "eager", "TRL", "copy")) for v in VOCABULARIES),
        "calls": (Case(Shape(2, 8, 1000), (OURS, "ours, log-probs + eager objective", "eager"), rounds=55, repeat=20),),
        "memory": tuple(
            Case(shape, providers, rounds=1, warm_up=0)
            for length in (256, 512)
            for shape, providers in (
                (Shape(4, length, 32_000, "float32"), (INPLACE, OURS, "eager", "TRL")),
                (Shape(4, length, 32_000, "float32", hidden=256), FEW_LINEAR[:4]),
            )
        ),
    }  # fmt: skip


def gpu_suites() -> Suites:
    """Shapes of a training step; `session` are the five that a few minutes on a GPU are enough for."""
    half, qwen = "bfloat16", 151_936
    calls = Case(Shape(2, 8, 1000, half), (OURS, INPLACE, "eager"), rounds=31, repeat=20, replay=True)
    # each compilation of a rival by torch takes seconds of them
    session = (
        Case(Shape(4, 1024, qwen, half), LOGITS, PHASES),
        Case(Shape(8, 1024, qwen, half, hidden=2048), (*FEW_LINEAR, LINEAR[-1]), rounds=5, warm_up=2),
        calls,
        Case(Shape(8, 1024, qwen, half, hidden=2048, frozen=True), FEW_LINEAR, rounds=5, warm_up=2),
        Case(Shape(4, 4096, 32_000, half), tuple(name for name in LOGITS if name != "compiled"), PHASES),
    )
    return {
        "session": session,
        "logits": tuple(
            Case(Shape(8, tokens // 8, vocabulary, dtype), LOGITS, PHASES)
            for vocabulary, tokens in ((32_000, 16_384), (128_256, 8192), (qwen, 8192))
            for dtype in ("float32", half)
        ),
        "linear": tuple(
            Case(Shape(8, tokens // 8, qwen, half, hidden=width, frozen=frozen), LINEAR, rounds=7)
            for tokens, width in ((4096, 896), (8192, 4096))
            for frozen in (False, True)
        ),
        "ablation": tuple(Case(Shape(4, tokens // 4, 32_000, half), ABLATION) for tokens in (256, 4096, 16_384)),
        "mix": (
            Case(Shape(20, 400, qwen, half, mixed=True), LOGITS[:-1]),
            Case(Shape(20, 400, qwen, half, hidden=2048, mixed=True), FEW_LINEAR[:-1], rounds=7),
        ),
        "sweep": tuple(
            Case(Shape(4, tokens // 4, v, half), (INPLACE, OURS, "eager", "TRL, Triton", "Liger, Triton", "copy"))
            for v in VOCABULARIES
            for tokens in (64, 4096)
        ),
        "calls": (calls,),
        "memory": tuple(
            Case(shape, providers, rounds=1, warm_up=0)
            for length in (512, 1024)
            for shape, providers in (
                (Shape(4, length, qwen, half), (INPLACE, OURS, "eager", "TRL", "TRL, Triton")),
                (Shape(4, length, qwen, half, hidden=2048), FEW_LINEAR[:4]),
            )
        ),
    }  # fmt: skip


def tiny(suites: Suites) -> Suites:
    """The same suites at sizes that take no time: to try the harness, and for `pytest bench/`."""

    def small(case: Case) -> Case:
        shape, long = case.shape, case.shape.length > 512
        shape = replace(
            shape, length=8 if long else 4, vocabulary=shape.vocabulary // 64, hidden=min(shape.hidden, 16)
        )  # fmt: skip
        return replace(case, shape=shape, rounds=2, warm_up=1, repeat=min(case.repeat, 2))

    return {name: tuple(dict.fromkeys(small(case) for case in cases)) for name, cases in suites.items()}
