"""How glibc's malloc is kept from holding, in a server's processes, what their requests have given back."""

from __future__ import annotations

import ctypes

ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "4194304", "MALLOC_TRIM_THRESHOLD_": "4194304"}
"""Its settings. By itself it raises the size from which memory is mapped to that of the largest block it has seen
freed, and keeps an arena for each thread: a server then holds what its last requests took."""

_C = ctypes.CDLL(None)


def give_back() -> None:
    """Returns freed memory to the system, wherever in the heap it lies.

    By itself malloc returns only what is free at the heap's end: how much that is depends on the order in which the
    threads of a request, its encoder's among them, have freed what they worked with.
    """
    _C.malloc_trim(0)
