"""Where the parts of Triton lie that the nvidia-pytriton wheel brings, and what the Python stub needs beside them."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime import allocation
from triton_repo.errors import ServerError

PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
LIBPYTHON = f"libpython{PYTHON_VERSION}.so.1.0"


@dataclass(frozen=True)
class Installation:
    """The files that a server process is assembled from.

    `backend` holds `libtriton_python.so`; `stub` is the program that hosts one Python model and is linked against
    `libpython`, the shared library of the running interpreter's version.
    """

    binary: Path
    backend: Path
    stub: Path
    libpython: Path

    @staticmethod
    def find() -> Installation:
        """The installation of the running interpreter. Raises ServerError naming what is missing and how to get it."""
        root = triton_root()
        stub = root / "python_backend_stubs" / PYTHON_VERSION / "triton_python_backend_stub"
        if not stub.is_file():
            versions = ", ".join(sorted(path.name for path in stub.parents[1].iterdir()))
            raise ServerError(
                f"nvidia-pytriton has no Python stub for Python {PYTHON_VERSION}, only for {versions}",
                "make the environment with one of those: make clean && make setup PYTHON=python3.11",
            )
        return Installation(root / "bin" / "tritonserver", root / "backends" / "python", stub, find_libpython())

    def environment(self) -> dict[str, str]:
        """The server's environment: this interpreter's environment first on PATH, libpython's folder for the stub.

        And, unless the operator has set them, memory that is given back when a request is done with it.

        The stub takes its packages from the first `python3` on PATH and ignores PYTHONPATH and VIRTUAL_ENV.
        """
        environment = allocation.ENVIRONMENT | dict(os.environ)
        libraries = [str(self.libpython.parent), environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
        # Not resolved: a virtual environment's python3 is a link, and the folder that holds it is the environment.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
        return environment

    def assemble(self, directory: Path) -> None:
        """Make the folder for `--backend-directory` out of links.

        Links and not copies: the stub finds its other libraries relative to its real path.
        """
        python = directory / "python"
        python.mkdir(parents=True)
        for file in (
            self.backend / "libtriton_python.so",
            self.backend / "triton_python_backend_utils.py",
            self.stub,
        ):
            (python / file.name).symlink_to(file)


def triton_root() -> Path:
    """The folder `tritonserver` inside the wheel. Raises ServerError where the wheel is not installed."""
    # Found without importing pytriton, whose import starts more than it finds.
    spec = importlib.util.find_spec("pytriton")
    locations = spec.submodule_search_locations if spec is not None else None
    root = Path(next(iter(locations))) / "tritonserver" if locations else None
    if root is None or not (root / "bin" / "tritonserver").is_file():
        remedy = "run: make setup (or, in the project's folder, pip install -e '.[serve]')"
        raise ServerError("the tritonserver binary of nvidia-pytriton is not installed", remedy)
    return root


def find_libpython() -> Path:
    """The shared library of the running Python version, which the stub is linked against. Raises ServerError."""
    for folder in _library_folders():
        if (folder / LIBPYTHON).is_file():
            return folder / LIBPYTHON
    raise ServerError(
        f"{LIBPYTHON}, the shared library of Python {PYTHON_VERSION}, is in none of {_listed(_library_folders())}",
        f"install it: apt-get install libpython{PYTHON_VERSION}, or build the interpreter with --enable-shared",
    )


def _library_folders() -> Iterator[Path]:
    """Folders to look in: the interpreter's own first, then the system's."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    configured = sysconfig.get_config_var("LIBDIR")
    candidates = [Path(sys.base_prefix, "lib"), *([Path(configured)] if configured else [])]
    candidates += [Path("/usr/lib") / multiarch, Path("/usr/lib64"), Path("/usr/local/lib"), Path("/usr/lib")]
    yield from dict.fromkeys(candidates)


def _listed(folders: Iterator[Path]) -> str:
    return ", ".join(map(str, folders))
