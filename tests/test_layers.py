"""Dependencies point one way, and a serving host needs no exporter: read from the source and from a real import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("plugins", "export", "engines", "runtime", "triton_repo", "gateway", "h3trt")

OPENING = (
    "engines.adapters",
    "engines.backend",
    "engines.layers",
    "engines.machine",
    "engines.profile",
    "engines.quality",
    "engines.sessions",
    "engines.store",
    "engines.tensorrt",
)
"""The half of `engines` that a serving host imports."""

MAY_IMPORT = {
    "plugins": (),
    "export": ("plugins",),
    "engines": ("plugins", "export"),
    "runtime": ("plugins", *OPENING),
    "triton_repo": ("plugins", "runtime", *OPENING),
    "gateway": ("runtime", "triton_repo"),
}
"""What each layer may import besides itself; `h3trt`, the command line, may import all."""

BUILD_TIME = ("accelerate", "diffusers", "export", "onnx", "onnx_ir", "onnxscript", "transformers")
"""What a serving host does not have."""


def modules(package: str) -> list[str]:
    files = sorted((ROOT / package).rglob("*.py"))
    return [".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for f in files]


def source(module: str) -> Path:
    path = ROOT / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(module: str) -> Iterator[str]:
    """Everything a module imports, anywhere in it; `from a import b` counts as a.b and as a."""
    for node in ast.walk(ast.parse(source(module).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def is_serving(module: str) -> bool:
    return within(module, ("runtime", "triton_repo", "gateway", *OPENING))


SERVING = [module for package in PACKAGES for module in modules(package) if is_serving(module)]


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_a_layer_imports_only_what_lies_below_it(layer: str) -> None:
    found = modules(layer)
    assert found, f"no modules in {layer}"
    wrong = [
        (module, name)
        for module in found
        for name in imports(module)
        if within(name, PACKAGES) and not within(name, (layer, *MAY_IMPORT[layer]))
    ]
    assert wrong == []


def test_the_opening_half_of_engines_imports_nothing_of_the_building_half() -> None:
    opening = [module for module in modules("engines") if within(module, OPENING)]
    assert {"engines.store", "engines.sessions.engine_set"} <= set(opening)
    wrong = [
        (module, name)
        for module in opening
        for name in imports(module)
        if within(name, PACKAGES) and not within(name, ("plugins", *OPENING))
    ]
    assert wrong == []


@pytest.mark.parametrize("module", SERVING)
def test_serving_modules_name_nothing_of_a_build_host(module: str) -> None:
    assert [name for name in imports(module) if within(name, BUILD_TIME)] == []


def test_importing_everything_a_server_runs_loads_nothing_of_a_build_host() -> None:
    """Indirect imports count too. `triton_python_backend_utils` exists only inside Triton's own processes."""
    importable = [m for m in SERVING if "triton_python_backend_utils" not in set(imports(m))]
    assert {"runtime.pipeline", "engines.sessions.engine_set"} <= set(importable)
    program = f"import importlib, sys\nfor m in {importable}: importlib.import_module(m)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} & set(BUILD_TIME) == set()


@pytest.mark.parametrize(
    "module", ["gateway.app", "triton_repo.adapter", "triton_repo.client", "triton_repo.models.prepare"]
)
def test_what_runs_no_engine_imports_no_torch(module: str) -> None:
    """It would take seconds of each start and a quarter of a gigabyte of each process."""
    script = "import sys, types; sys.modules['triton_python_backend_utils'] = types.ModuleType('stub'); "
    script += f"import {module}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr
