"""A worker that sends the bytes in use on its heap after bfloat16 products, and the number of heaps."""

from __future__ import annotations

import ctypes
import re
import tempfile
import threading

import torch
from torch.nn.functional import linear

from equivcheck.worlds.workers.link import SupervisorLink

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Usage(ctypes.Structure):
    """Return value of glibc's ``mallinfo2``."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def main(fd: int) -> None:
    """Send the bytes in use after each of five rounds of `task` products, and the number of heaps."""
    link = SupervisorLink(fd)
    link.send([_bytes_in_use_after(range(start, start + link.task)) for start in range(0, 5 * link.task, link.task)])
    threads = [threading.Thread(target=_take_memory) for _ in range(4)]
    for thread in threads:
        thread.start()
        thread.join()
    link.send(_num_heaps())


def _bytes_in_use_after(numbers: range) -> int:
    for number in numbers:
        rows, columns = 24 + number // 20, 40 + number % 20
        with torch.autocast("cpu", torch.bfloat16):
            linear(torch.zeros(rows, columns), torch.zeros(30, columns))
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Usage
    return int(libc.mallinfo2().uordblks)


def _take_memory() -> None:
    """Allocate enough to use a heap."""
    bytearray(10_000)


def _num_heaps() -> int:
    libc = ctypes.CDLL(None)
    libc.fdopen.restype, libc.fdopen.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_char_p)
    libc.malloc_info.argtypes, libc.fflush.argtypes = (ctypes.c_int, ctypes.c_void_p), (ctypes.c_void_p,)
    with tempfile.TemporaryFile() as file:
        stream = libc.fdopen(file.fileno(), b"w")
        libc.malloc_info(0, stream)
        libc.fflush(stream)
        file.seek(0)
        return len(re.findall(rb"<heap nr=", file.read()))
