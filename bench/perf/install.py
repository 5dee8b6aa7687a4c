"""Where perf_analyzer is taken from: PATH, or the wheel, with a C library beside it where the system's is too old."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from bench.perf.debian import DebianError, unpack_packages

VERSION = "2.60.0"
WHEEL = "sha256:23ef56b107ae9233e5cf09fbdf508dd9b936a52f1bae2f63f53c8117087b3f25"
PLATFORM = "manylinux_2_38_x86_64"
NEEDED_LIBC = (2, 38)

LIBRARIES = ("libc6", "libstdc++6", "libgcc-s1", "libssl3t64", "zlib1g", "libzstd1")
"""Debian packages of everything that the program is linked with."""

LOADER = "ld-linux-x86-64.so.2"

_SAYS = re.compile(r"Perf Analyzer Version \S+ \(commit (\w+)\)")


class InstallError(RuntimeError):
    """A load generator cannot be had on this machine; the message says why and what mends it."""


@dataclass(frozen=True)
class Analyzer:
    """A perf_analyzer that runs here. `origin` says where it is from, `commit` is what it says of itself."""

    command: tuple[str, ...]
    origin: str
    commit: str


def perf_analyzer(folder: Path) -> Analyzer:
    """One on PATH that runs; else the one in `folder`, which is made there if it is missing. Raises InstallError."""
    on_path = shutil.which("perf_analyzer")
    if on_path and (found := _running((on_path,), "PATH")):
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "perf_analyzer.lock"):
        home = folder.absolute() / f"perf_analyzer-{VERSION}"
        if not home.exists():
            make_whole(home, _make)
        found = _found(home)
    if found is None:
        raise InstallError(f"{home}: does not run here; remove that folder, and it is made again")
    return found


def make_whole(home: Path, make: Callable[[Path], None]) -> None:
    """Has `make` fill a folder that becomes `home` once all of it is there."""
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=f".{home.name}-") as place:
        # apt reads as another user, where there is one for it.
        os.chmod(place, 0o755)  # noqa: S103
        new = Path(place) / home.name
        new.mkdir()
        make(new)
        new.rename(home)


def pip_download(requirement: str, sha256: str, folder: Path, *options: str) -> Path:
    """Downloads the one wheel of a requirement whose hash is known; the file. Raises InstallError."""
    listed = folder / "requirements.txt"
    listed.write_text(f"{requirement} --hash={sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    arguments = ["--require-hashes", "--dest", str(folder), *options, "-r", str(listed)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise InstallError(f"{requirement} cannot be downloaded: {done.stderr.strip()[-500:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _make(home: Path) -> None:
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise InstallError(f"perf_analyzer {VERSION} is built for Linux on x86-64 alone; measure from such a machine")
    wheel = pip_download(f"perf-analyzer=={VERSION}", WHEEL, home, "--python-version", "3.12", "--platform", PLATFORM)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home)
    wheel.unlink()
    (home / "perf_analyzer" / "bin" / "perf_analyzer").chmod(0o755)
    if libc() >= NEEDED_LIBC:
        return
    try:
        unpack_packages(LIBRARIES, home)
    except DebianError as error:
        wanted = ".".join(map(str, NEEDED_LIBC))
        raise InstallError(
            f"perf_analyzer {VERSION} needs glibc {wanted}, here is {'.'.join(map(str, libc()))}, and {error}; run "
            "h3trt perf --url HOST:PORT on a machine with a newer system, or put a perf_analyzer that runs here on PATH"
        ) from None


def libc() -> tuple[int, ...]:
    """The version of this system's glibc; (0,) where it has another C library."""
    name, version = platform.libc_ver()
    return tuple(map(int, version.split("."))) if name == "glibc" else (0,)


def _found(home: Path) -> Analyzer | None:
    program = home / "perf_analyzer" / "bin" / "perf_analyzer"
    libraries = home / "root" / "usr" / "lib" / "x86_64-linux-gnu"
    if not libraries.exists():
        return _running((str(program),), f"wheel {VERSION}")
    loader = (str(libraries / LOADER), "--library-path", str(libraries), str(program))
    return _running(loader, f"wheel {VERSION} with a C library of its own")


def _running(command: tuple[str, ...], origin: str) -> Analyzer | None:
    """The program, if it starts and is the real one: the wheel for older systems is an empty placeholder."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = _SAYS.search(done.stdout + done.stderr)
    return Analyzer(command, origin, said[1]) if said else None
