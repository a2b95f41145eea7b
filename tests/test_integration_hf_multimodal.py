"""Multimodal models: the scale and cap of a text config count only if the model's own forward applies them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hf_multimodal import IMAGE, gemma3, llava, multimodal, with_images
from hf_support import batch, from_logits

import grpo_kernels as gk
from grpo_kernels.integrations.hf import causal_lm_grpo_loss, check_head


def text_alone() -> dict[str, Any]:
    given = batch("Gemma2")
    return given | {"input_ids": given["input_ids"].clamp(max=33)}


UNSCALED = {
    "AyaVision": lambda: multimodal("AyaVision", "Siglip", "Cohere2", text_logit_scale=0.25),
    "Cohere2Vision": lambda: multimodal("Cohere2Vision", "Siglip", "Cohere2", text_logit_scale=0.25),
    "LlavaNext": lambda: multimodal("LlavaNext", "CLIP", "Granite", text_logits_scaling=8.0),
    "Gemma3": lambda: gemma3(text_final_logit_softcapping=2.0),
}


@pytest.mark.parametrize("kind", UNSCALED)
def test_a_transform_that_the_forward_leaves_out_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"got {kind}ForCond\w+. .*: they are not the head's output by the config's"):
        causal_lm_grpo_loss(UNSCALED[kind](), **text_alone())


def test_a_cap_that_the_forward_applies_is_taken() -> None:
    model = multimodal(
        "PaliGemma", "Siglip", "Gemma2", text_final_logit_softcapping=1.5, projection_dim=16
    )  # fmt: skip
    given = text_alone()
    loss = causal_lm_grpo_loss(model, **given).loss
    torch.testing.assert_close(loss, from_logits(model, gk.GRPOLossConfig(), given).loss, rtol=1e-9, atol=0)


@pytest.mark.parametrize("make", [llava, gemma3])
def test_images_arrive(make: Any) -> None:
    model, (given, images) = make().train(), with_images()
    inputs = {"pixel_values": images}
    if make is gemma3:
        inputs["token_type_ids"] = (given["input_ids"] == IMAGE).long()
    logits = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"], **inputs).logits
    rest = {name: given[name] for name in ("advantages", "old_per_token_logps", "completion_mask")}
    theirs = gk.grpo_loss(logits[:, 3:-1], given["input_ids"][:, 4:], **rest).loss
    ours = causal_lm_grpo_loss(model, model_inputs=inputs, **given).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)
    inputs["pixel_values"] = -images
    assert not torch.allclose(ours, causal_lm_grpo_loss(model, model_inputs=inputs, **given).loss)


class PicturesOnly(transformers.LlavaForConditionalGeneration):  # type: ignore[misc]
    def forward(self, *args: Any, pixel_values: Any = None, **kwargs: Any) -> Any:
        if pixel_values is None:
            raise ValueError("needs a picture")
        return super().forward(*args, pixel_values=pixel_values, **kwargs)


def test_a_model_that_refuses_text_alone_is_checked_on_its_batch() -> None:
    model, (given, images) = llava(), with_images()
    model.__class__ = PicturesOnly
    with pytest.raises(ValueError, match="needs a picture"):
        check_head(model)
    check_head(model, {name: given[name] for name in ("input_ids", "attention_mask")} | {"pixel_values": images})
    assert torch.isfinite(causal_lm_grpo_loss(model, model_inputs={"pixel_values": images}, **given).loss)


def test_the_check_makes_few_logits_and_runs_once() -> None:
    model, (given, images) = llava(), with_images()
    widths: list[tuple[int, ...]] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: widths.append(tuple(output.shape)))
    for _ in range(2):
        causal_lm_grpo_loss(model, model_inputs={"pixel_values": images}, **given)
    assert widths == [(1, 4, 37)]
