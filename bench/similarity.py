"""How alike two clips are: latents, frames and sound."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import conv2d

PEAK = 255.0
"""Largest value of a frame's pixels."""

SSIM_SIGMA, SSIM_RADIUS = 1.5, 5
"""The Gaussian window of the paper: 11 x 11."""

FFT, HOP, BANDS, POWER_FLOOR = 1024, 256, 80, 1e-10
"""Of the log-mel spectrogram: samples of a window and between windows, bands, least power."""

_MEL_HZ, _LINEAR_BELOW, _LOG_STEP = 200.0 / 3.0, 1000.0, math.log(6.4) / 27.0
"""Slaney's mel scale: linear up to 1 kHz, then logarithmic."""


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    """Cosine of the angle between two tensors, as vectors."""
    a, b = one.double().flatten(), other.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Length of the difference over the length of `exact`."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def psnr(one: torch.Tensor, other: torch.Tensor) -> float | None:
    """Peak signal to noise ratio of all frames, uint8, in dB; None where they are equal."""
    error = torch.stack([(a.double() - b.double()).square().mean() for a, b in zip(one, other, strict=True)]).mean()
    return 10 * math.log10(PEAK**2 / float(error)) if error else None


def ssim(one: torch.Tensor, other: torch.Tensor) -> float:
    """Structural similarity of frames, uint8 [F, H, W, 3]: mean over frames and colours.

    Wang et al., Image quality assessment: from error visibility to structural similarity (2004), with their window;
    only where it lies within the frame.
    """
    return sum(_frame_ssim(a, b) for a, b in zip(one, other, strict=True)) / len(one)


def log_mel(waveform: torch.Tensor, rate: int) -> torch.Tensor:
    """Log10 power of a sound [channels, samples] in mel bands: [channels, bands, windows]."""
    window = torch.hann_window(FFT, dtype=torch.float64)
    spectrum = torch.stft(
        waveform.double(), FFT, HOP, window=window, center=True, pad_mode="reflect", return_complex=True
    )
    return (mel_bands(rate) @ spectrum.abs().square()).clamp_min(POWER_FLOOR).log10()


def mel_cosine(one: torch.Tensor, other: torch.Tensor, rate: int) -> float:
    """Cosine of two sounds' log-mel spectrograms, each less its mean, which any sound of that loudness shares."""
    a, b = (log_mel(each, rate) for each in (one, other))
    return cosine(a - a.mean(), b - b.mean())


def mel_bands(rate: int) -> torch.Tensor:
    """Weights of frequencies in mel bands up to half of the rate: [bands, FFT / 2 + 1], triangles of equal area."""
    frequencies = torch.linspace(0, rate / 2, FFT // 2 + 1, dtype=torch.float64)
    edges = _hertz(torch.linspace(0, _mel(rate / 2), BANDS + 2, dtype=torch.float64))
    rising = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp_min(0) * (2 / (edges[2:] - edges[:-2]))[:, None]


def _frame_ssim(one: torch.Tensor, other: torch.Tensor) -> float:
    a, b = (frame.permute(2, 0, 1).double().unsqueeze(1) for frame in (one, other))
    mean_a, mean_b = _blurred(a), _blurred(b)
    variance_a, variance_b = _blurred(a * a) - mean_a**2, _blurred(b * b) - mean_b**2
    covariance = _blurred(a * b) - mean_a * mean_b
    c1, c2 = (0.01 * PEAK) ** 2, (0.03 * PEAK) ** 2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    return float((luminance * (2 * covariance + c2) / (variance_a + variance_b + c2)).mean())


def _blurred(x: torch.Tensor) -> torch.Tensor:
    """x [C, 1, H, W] under the window, where it lies within."""
    taps = torch.exp(-0.5 * (torch.arange(-SSIM_RADIUS, SSIM_RADIUS + 1, device=x.device).double() / SSIM_SIGMA) ** 2)
    taps = taps / taps.sum()
    return conv2d(conv2d(x, taps.view(1, 1, -1, 1)), taps.view(1, 1, 1, -1))


def _mel(hertz: float) -> float:
    if hertz < _LINEAR_BELOW:
        return hertz / _MEL_HZ
    return _LINEAR_BELOW / _MEL_HZ + math.log(hertz / _LINEAR_BELOW) / _LOG_STEP


def _hertz(mel: torch.Tensor) -> torch.Tensor:
    corner = _LINEAR_BELOW / _MEL_HZ
    return torch.where(mel < corner, mel * _MEL_HZ, _LINEAR_BELOW * torch.exp(_LOG_STEP * (mel - corner)))
