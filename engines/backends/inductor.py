"""torch's own compiler: a graph becomes an AOTInductor package, native code for this host with its weights as inputs.

The package is what is stored, and nothing that would have to be unpickled: its loader reads JSON and opens a shared
library, which this host's compiler made and whose SHA-256 the manifest has. `torch.export`'s own archives hold pickled
tensors, and the caches of `torch.compile` hold pickled graphs, so neither is written.
"""

from __future__ import annotations

import importlib.metadata
import operator
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from engines.backends.fp8_producers import quantise_in_producers
from engines.store import AxisRange
from export.binding import Binding
from export.graphs.graph import Graph
from export.trace import axes, trace
from plugins.exchanges import GROUP
from plugins.op import DOMAIN
from plugins.ops import quantised_rows
from plugins.registry import REGISTRY

OPTIONS: dict[str, Any] = {
    # Each build has a directory of its own, in which headers would be precompiled for one use.
    "aot_inductor.precompile_headers": False,
}
"""Options of inductor, besides its defaults."""


class CompileError(ValueError):
    """A compiled program breaks a rule that every program must keep."""


def missing_compiler() -> str | None:
    """Why this host cannot compile; None if it can."""
    if shutil.which(_compiler_command()):
        return None
    return "inductor needs a C++ compiler, and g++ is not installed; run: apt-get install g++"


def toolchain() -> dict[str, str]:
    """What a package is compiled with: torch's build, Triton, the C++ compiler's first line; "" for what is missing."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    return {"torch": str(torch.__version__), "triton": triton, "compiler": _compiler_version()}


def ranges(graph: Graph, binding: Binding, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, AxisRange]:
    """The sizes that a program is compiled for: all that `shapes` allows, tuned for the end of its first range.

    Where the product of two sizes may pass 2^31, inductor indexes with 64 bits; so the end is not larger than needed.
    """
    found = {}
    for name, axis in axes((*graph.inputs, *binding.inputs)).items():
        ends = shapes.get(name, (axis.maximum,))
        largest = max(axis.minimum, min(axis.maximum, ends[-1]) // axis.multiple * axis.multiple)
        tuned = max(axis.minimum, min(largest, ends[0]) // axis.multiple * axis.multiple)
        found[name] = AxisRange(minimum=axis.minimum, optimum=tuned, maximum=largest)
    return found


def compile_graph(
    graph: Graph,
    binding: Binding,
    within: Mapping[str, AxisRange],
    device: torch.device,
    package: Path,
    stored: Sequence[torch.Tensor] | None = None,
) -> dict[str, int]:
    """Writes the package of a graph for sizes `within` ranges; counts the registry's operators that it calls.

    With an instance's `stored` tensors, on the CPU, these are in the package, and it takes the graph's inputs alone.
    Everything that the compiler keeps meanwhile lies beside the package.

    Raises:
        CompileError: an operator is left that a serving host could not call.
    """
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    program = lower(trace(graph, binding, within, stored), device)
    with tempfile.TemporaryDirectory(dir=package.parent) as directory, temporary_cache_dir(directory), torch.no_grad():
        options = OPTIONS | {"cpp.cxx": (None, str(_compiler(Path(directory))))}
        aoti_compile_and_package(program, package_path=str(package), inductor_configs=options)
    return census(program)


def _compiler(directory: Path) -> Path:
    """The host's compiler, told to link the C++ runtime that is loaded here, and to prefer a library's own symbols.

    A compiler that links a static runtime makes a library whose locales and regular expressions mix with torch's: its
    loader ends the process with a segmentation fault, in `parse_device_str` of torch 2.11.
    """
    script = directory / "g++"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(_compiler_command())} "$@" -Wl,-Bsymbolic{_runtime()}\n')
    script.chmod(0o700)
    return script


def _compiler_command() -> str:
    """The C++ compiler that Python's own extensions are built with, or else g++."""
    configured = (sysconfig.get_config_var("CXX") or "g++").split()[0]
    return shutil.which(configured) or shutil.which("g++") or "g++"


def _compiler_version() -> str:
    if missing_compiler():
        return ""
    command = _compiler_command(), "--version"
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition("\n")[0]  # noqa: S603


def _runtime() -> str:
    """The linker's option for the C++ runtime of this process; nothing where none is found."""
    loaded = (line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines())
    found = next((path for path in loaded if "/libstdc++.so" in path), None)
    return f" {shlex.quote(f'-Wl,{found}')}" if found else ""


def lower(program: ExportedProgram, device: torch.device) -> ExportedProgram:
    """The program on a device, its operators replaced by what inductor can fuse, wherever there is such a form."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    moved = _moved(program, device) if device.type != "cpu" else program
    if capability >= quantised_rows.CAPABILITY:
        quantise_in_producers(moved.graph)
    plain = {op.overload: op.plain_implementation(device.type, capability) for op in REGISTRY}
    table: dict[Any, Callable[..., Any]] = dict(torch.export.default_decompositions())
    # Inductor takes a fused kernel for it; what it decomposes to would hold all scores.
    table.pop(torch.ops.aten.scaled_dot_product_attention.default, None)
    table |= {overload: function for overload, function in plain.items() if function is not None}
    table |= {torch.ops.onnx.RotaryEmbedding.opset23: _rotary_embedding}
    lowered = moved.run_decompositions(table)
    _check(lowered)
    return lowered


def _moved(program: ExportedProgram, device: torch.device) -> ExportedProgram:
    """The program on a device, but for the handles of groups, which are read on the host."""
    examples, form = pytree.tree_flatten(program.example_inputs)
    moved = move_to_device_pass(program, {"cpu": str(device)})
    handles = {
        node.args[op.inputs.index(GROUP)]
        for op in REGISTRY
        for node in moved.graph.nodes
        if op.exchanges and node.target is op.overload
    }
    names = set()
    for handle in handles:
        assert isinstance(handle, torch.fx.Node)
        handle.meta["val"] = handle.meta["val"].to("cpu")
        names.add(handle.name)
    # The compiler compares them with the inputs that the graph declares.
    given = zip(moved.graph_signature.user_inputs, examples, pytree.tree_leaves(moved.example_inputs), strict=True)
    moved.example_inputs = pytree.tree_unflatten([own if name in names else put for name, own, put in given], form)
    return moved


def census(program: ExportedProgram) -> dict[str, int]:
    """The registry's operators that a program calls as they are, counted as "h3::name"."""
    known = {op.overload: op for op in REGISTRY}
    called = [known[node.target] for node in program.graph.nodes if node.target in known]
    return dict(sorted(Counter(f"{DOMAIN}::{op.name}" for op in called).items()))


def _check(program: ExportedProgram) -> None:
    allowed = {"aten", "prims", DOMAIN}
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        namespace = getattr(node.target, "namespace", None)
        if isinstance(node.target, torch._ops.OpOverload) and namespace not in allowed:
            raise CompileError(f"{node.target} is left in the program; it must be of {', '.join(sorted(allowed))}")


def _rotary_embedding(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> torch.Tensor:
    """The operator of ONNX 23 as this project's graphs use it: x [B, H, S, d], angles [B, S, r / 2], by halves."""
    if position_ids is not None or interleaved or num_heads or x.ndim != 4:
        raise CompileError("RotaryEmbedding: must have four axes, angles by row, and turn by halves")
    rotated = rotary_embedding_dim or x.shape[-1]
    first, second = x[..., :rotated].chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat([*turned, x[..., rotated:]], dim=-1)
