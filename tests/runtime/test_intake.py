"""Requests are taken in without torch, by a process that may start and refuse before any engine is there."""

from __future__ import annotations

import ast
import subprocess
import sys


def test_intake_needs_no_torch() -> None:
    script = "import sys, runtime.intake, triton_repo.names; print(sorted({'torch', 'onnxruntime'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert ast.literal_eval(found) == []
