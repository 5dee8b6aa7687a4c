"""The configuration files of `processor/`: what Qwen3-VL's image and video preprocessing reads."""

from __future__ import annotations

from typing import Any

from export.miniature.tokenizer import dumps

_PIXELS: dict[str, Any] = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""H3 never applies a chat template; the file is there because the processor class expects one."""


def files() -> dict[str, str]:
    """File name -> contents, beside the tokenizer's own files."""
    image = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, **_PIXELS}
    image["image_processor_type"] = "Qwen2VLImageProcessorFast"
    video = {"size": {"longest_edge": 25165824, "shortest_edge": 4096}, **_PIXELS}
    video["video_processor_type"] = "Qwen3VLVideoProcessor"
    return {
        "preprocessor_config.json": dumps(image),
        "video_preprocessor_config.json": dumps(video),
        "chat_template.json": dumps({"chat_template": _TEMPLATE}),
    }
