"""Pixels of images: decoded, upright, eight-bit RGB; and the one filter that resizes them."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from runtime.media.facts import ImageFacts
from runtime.media.formats import check_format
from runtime.media.refusals import refusing
from runtime.media.stills import Still, read_still
from runtime.refusal import RequestError

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What undoes an EXIF orientation."""


def decode_image(data: bytes, facts: ImageFacts, where: str) -> NDArray[np.uint8]:
    """The pixels of a file that `probe` found to be `facts`: uint8 [H, W, 3], upright RGB. Raises RequestError.

    As both published pipelines do it (Pillow's convert("RGB")): alpha is dropped, not composited, CMYK and palettes are
    converted, colour profiles are left alone. Of 16-bit samples the high byte is kept.
    """
    name = check_format(data, "image", where)
    with refusing(where, f"{name} file", "must be decodable"):
        still = read_still(data, name)
        if still.shown != (facts.width, facts.height):
            rule = "must be the file that the request was resolved with"
            raise RequestError(where, f"{still.shown[0]}x{still.shown[1]} px", rule, f"{facts.width}x{facts.height} px")
        return np.asarray(_upright(_opened(data, name, still), still))


def resize_image(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Pixels uint8 [H, W, 3] at another (width, height), by Pillow's LANCZOS."""
    if pixels.shape[1::-1] == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def _opened(data: bytes, name: str, still: Still) -> Image.Image:
    if name == "HEIC":
        import pi_heif

        image = pi_heif.open_heif(data).to_pillow()
    else:
        image = Image.open(io.BytesIO(data), formats=[name])
    if image.size != (still.width, still.height):
        raise ValueError(
            f"the decoder finds {image.size[0]}x{image.size[1]} px, its header {still.width}x{still.height}"
        )
    return _rgb(image)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        # Pillow would clip these at 255. Sixteen-bit RGB it reads by the high byte, so grey is read so too.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    # A copy of a large photograph for nothing is what this spares.
    return image if image.mode == "RGB" else image.convert("RGB")


def _upright(image: Image.Image, still: Still) -> Image.Image:
    return image.transpose(_UPRIGHT[still.orientation]) if still.orientation in _UPRIGHT else image
