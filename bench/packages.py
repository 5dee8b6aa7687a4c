"""Compiling: the packages that the benches of a profile need, side by side, and how long each one took."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bench import block, denoiser, host
from bench.measuring import Timing
from bench.served import GRAPHS
from bench.synthetic import Wanted, compile_packages
from engines.profile import Profile


def measure(folder: Path, profile: Profile) -> dict[str, Any]:
    """Milliseconds of each package that was not there yet: of a whole request, of the block's sides,
    and of whole forwards in each of their profiles.
    """
    profiles = {name for name, _ in block.SIDES.values()}
    forwards = (Wanted(Profile.load(name), denoiser.GRAPHS) for name in sorted(profiles))
    seconds = compile_packages(folder, (Wanted(profile, GRAPHS), *block.packages(), *forwards))
    return {
        "what": "compiling packages side by side",
        "host": host.describe() | {"processors": os.cpu_count()},
        "packages": {name: Timing((1e3 * each,)).as_json() for name, each in seconds.items()},
    }
