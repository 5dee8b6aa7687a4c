"""Patches that transformers' own processors make with torchvision; run as a program, as transformers looks for
torchvision once, when it is first imported.

Arguments: torchvision's wheel, a file of pictures and videos by name (.npz, uint8), the file to write patches to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch


def main(wheel: str, pictures: str, patches: str, limits: str) -> None:
    """`limits`: what both processors are made with, as JSON."""
    # A wheel is a zip, from which Python loads no binaries: torchvision does without its own, but still describes two
    # operators of theirs to torch.
    sys.path.append(wheel)
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    options = json.loads(limits)
    images, videos = Qwen2VLImageProcessor(**options["images"]), Qwen3VLVideoProcessor(**options["videos"])
    found = {}
    for name, pixels in np.load(pictures).items():
        if pixels.ndim == 3:
            made = images(images=[pixels], return_tensors="pt")
            found[name], found[f"{name} grid"] = made["pixel_values"], made["image_grid_thw"][0]
        else:
            made = videos(videos=[pixels], do_sample_frames=False, return_tensors="pt")
            found[name], found[f"{name} grid"] = made["pixel_values_videos"], made["video_grid_thw"][0]
    np.savez(Path(patches), **{name: values.numpy() for name, values in found.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
