"""Sample rate conversion by a windowed sinc, with the defaults of torchaudio.transforms.Resample.

Hann window over 6 zero crossings to each side, cut off at 0.99 of the lower Nyquist frequency (J. O. Smith, "Digital
Audio Resampling"). torchaudio's wheel cannot be loaded beside a CPU build of torch, and its convolution holds a kernel
as wide as the reduced source rate for every phase, 5 GB at 44,101 Hz; here only the taps inside the window exist.
"""

from __future__ import annotations

import math

import torch

ZERO_CROSSINGS = 6
ROLLOFF = 0.99

_CHUNK = 1 << 16
"""Output samples at once; with the widest window (192 kHz) their taps take 20 MB."""


def resample(waveform: torch.Tensor, rate: int, target: int) -> torch.Tensor:
    """float32 [channels, n] at `rate` Hz -> float32 [channels, ceil(n * target / rate)] at `target` Hz."""
    if rate == target:
        return waveform
    common = math.gcd(rate, target)
    source, goal = rate // common, target // common
    weights, first = _taps(source, goal)
    taps = weights.shape[1]
    length = -(-waveform.shape[1] * goal // source)
    # Samples before the beginning and after the end are silence.
    reach = -int(first.min())
    windows = torch.nn.functional.pad(waveform, (reach, taps + source)).unfold(1, taps, 1)
    out = waveform.new_empty(waveform.shape[0], length)
    for begin in range(0, length, _CHUNK):
        steps = torch.arange(begin, min(begin + _CHUNK, length))
        phase = steps % goal
        at = steps // goal * source + first[phase] + reach
        out[:, begin : begin + len(steps)] = (windows[:, at] * weights[phase]).sum(-1)
    return out


def _taps(source: int, goal: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 [goal, taps] of each phase, and int64 [goal], the source sample of each phase's first tap."""
    cutoff = min(source, goal) * ROLLOFF
    width = math.ceil(ZERO_CROSSINGS * source / cutoff)
    phase = torch.arange(goal)
    first = phase * source // goal - width
    sample = first[:, None] + torch.arange(2 * width + 2)
    # torchaudio divides the phase in float32 and goes on in float64; so do we, to have its weights.
    time = (-phase[:, None] / goal + sample.to(torch.float64) / source) * cutoff
    time = time.clamp(-ZERO_CROSSINGS, ZERO_CROSSINGS)
    window = torch.cos(time * math.pi / ZERO_CROSSINGS / 2) ** 2
    return (torch.sinc(time) * window * cutoff / source).to(torch.float32), first
