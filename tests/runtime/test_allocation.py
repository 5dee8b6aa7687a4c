"""Memory that was freed in the middle of the heap goes back to the system when it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys

from runtime import allocation

BLOCK, COUNT = 100_000, 400
"""Bytes of blocks that are too small to be mapped by themselves, and how many: 40 MB."""

PROGRAM = f"""
import ctypes
import psutil
from runtime import allocation

def resident():
    return psutil.Process().memory_info().rss

c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [c.malloc({BLOCK}) for _ in range({COUNT})]
for block in blocks:
    ctypes.memset(ctypes.c_void_p(block), 1, {BLOCK})
full = resident()
# Not the last one: it keeps the heap's end where it is.
for block in blocks[:-1]:
    c.free(block)
freed = resident()
allocation.give_back()
print(full - freed, full - resident())
"""


def test_freed_memory_is_given_back_from_the_middle_of_the_heap() -> None:
    environment = {**os.environ, **allocation.ENVIRONMENT}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    by_itself, asked = map(int, result.stdout.split())
    assert by_itself < 0.1 * BLOCK * COUNT
    assert asked > 0.9 * BLOCK * COUNT
