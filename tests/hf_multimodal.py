"""Small random multimodal models, and a batch with images."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from hf_support import SIZES, batch
from torch import Tensor

IMAGE = 36
"""The token in whose place an image's features go."""
TEXT = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


def multimodal(kind: str, vision: str, text: str, **options: Any) -> Any:
    """In float64; options of the text config are given as `text_<name>`."""
    own = {name.removeprefix("text_"): options.pop(name) for name in list(options) if name.startswith("text_")}
    config = getattr(transformers, f"{kind}Config")(
        vision_config=getattr(transformers, f"{vision}VisionConfig")(**VISION),
        text_config=getattr(transformers, f"{text}Config")(**TEXT | own), image_token_id=IMAGE, **options,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.4)
    return model


def llava(**options: Any) -> Any:
    return multimodal(
        "Llava", "CLIP", "Llama", vision_feature_select_strategy="default", vision_feature_layer=-1, **options
    )


def gemma3(**options: Any) -> Any:
    options |= {"mm_tokens_per_image": 4, "boi_token_index": 34, "eoi_token_index": 35}
    layers = ["sliding_attention", "full_attention"]
    return multimodal("Gemma3", "Siglip", "Gemma3Text", text_layer_types=layers, **options)


def with_images() -> tuple[dict[str, Any], Tensor]:
    """A batch of which every prompt begins with an image of four tokens, and the images."""
    given = batch("Gemma2")
    given["input_ids"] = given["input_ids"].clamp(max=33)
    given["input_ids"][:, :4] = IMAGE
    return given, torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
