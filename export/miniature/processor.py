"""The configuration files of `processor/`: what Qwen3-VL's image and video preprocessing reads."""

from __future__ import annotations

from export.miniature.sizes import PICTURES
from export.miniature.tokenizer import dumps

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""H3 never applies a chat template; the file is there because the processor class expects one."""


def files() -> dict[str, str]:
    """File name -> contents, beside the tokenizer's own files."""
    keys = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    patches = {key: getattr(PICTURES.images, key) for key in keys} | {"processor_class": "Qwen3VLProcessor"}
    image = {"size": PICTURES.images.size.model_dump(), **patches}
    image["image_processor_type"] = "Qwen2VLImageProcessorFast"
    video = {"size": PICTURES.videos.model_dump(), **patches}
    video["video_processor_type"] = "Qwen3VLVideoProcessor"
    return {
        "preprocessor_config.json": dumps(image),
        "video_preprocessor_config.json": dumps(video),
        "chat_template.json": dumps({"chat_template": _TEMPLATE}),
    }
