"""Packages of a newer Debian, fetched into a folder of their own; the system is left as it is.

apt verifies them: it takes no package that the signed index of the archive does not name with this SHA-256.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

SUITE = "trixie"
"""Debian 13, whose C library is 2.41."""

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

TOOLS = ("apt-get", "dpkg-deb")

SECONDS = 300.0
"""What one command may take."""


class DebianError(RuntimeError):
    """The packages cannot be had on this machine; the message says why and what mends it."""


def unpack_packages(names: Sequence[str], folder: Path) -> Path:
    """Downloads packages and unpacks them below `folder`; the folder of their libraries. Raises DebianError."""
    _check_system()
    apt, root = folder / "apt", folder / "root"
    for part in ("lists/partial", "archives/partial", "sources", "packages"):
        (apt / part).mkdir(parents=True)
    configuration = _configure(apt, archive_of_this_system())
    _run(["apt-get", "update"], configuration, apt)
    _run(["apt-get", "download", *names], configuration, apt / "packages")
    for package in sorted((apt / "packages").glob("*.deb")):
        _run(["dpkg-deb", "-x", str(package), str(root)], configuration, apt)
    shutil.rmtree(apt)
    return root / "usr" / "lib" / "x86_64-linux-gnu"


def archive_of_this_system() -> str:
    """The address of the Debian archive that this machine's own apt sources name. Raises DebianError."""
    release = _os_release().get("VERSION_CODENAME", "")
    listed = _run(["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages"], None, None)
    found = [line.split(maxsplit=1)[1] for line in listed.splitlines() if line.split(maxsplit=1)[0] == release]
    if not found:
        raise DebianError(f"no source of apt is for {release}; name Debian's archive in /etc/apt/sources.list.d")
    return found[0]


def _check_system() -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise DebianError(f"{', '.join(missing)} not found")
    if _os_release().get("ID") != "debian" or platform.machine() != "x86_64":
        raise DebianError("this system is not Debian on x86-64")
    if not KEYRING.exists():
        raise DebianError(f"{KEYRING} not found; run: apt-get install debian-archive-keyring")


def _os_release() -> dict[str, str]:
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def _configure(apt: Path, archive: str) -> Path:
    """Writes a configuration of apt that reads and writes in `apt` alone, and knows one source."""
    if not re.fullmatch(r"\S+", archive):
        raise DebianError(f"the source of apt {archive!r} is no address")
    source = f"Types: deb\nURIs: {archive}\nSuites: {SUITE}\nComponents: main\nSigned-By: {KEYRING}\n"
    (apt / "sources" / f"{SUITE}.sources").write_text(source)
    places = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": apt / "sources",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State::lists": apt / "lists",
        "Dir::Cache": apt,
        "Dir::Cache::archives": apt / "archives",
    }
    file = apt / "apt.conf"
    file.write_text("".join(f'{name} "{place}";\n' for name, place in places.items()))
    return file


def _run(command: Sequence[str], configuration: Path | None, folder: Path | None) -> str:
    environment = os.environ | {"LC_ALL": "C"} | ({"APT_CONFIG": str(configuration)} if configuration else {})
    try:
        done = subprocess.run(  # noqa: S603
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise DebianError(f"{' '.join(command)}: no end after {SECONDS:g} s") from None
    if done.returncode:
        raise DebianError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout
