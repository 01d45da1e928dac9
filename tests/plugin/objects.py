"""Objects that a test and the processes it kills both know by number."""

import ctypes
import random

IN_FLIGHT = 4
"""Objects of a batch."""


def content(number: int) -> bytes:
    source = random.Random(number)
    return source.randbytes(source.randrange(1, 200_000))


def key(number: int) -> str:
    return f"model@00000000@0@{number:064x}"


def batch(numbers: list[int]) -> tuple[list[str], list[ctypes.Array[ctypes.c_ubyte]]]:
    """Keys and filled buffers."""
    datas = [content(number) for number in numbers]
    buffers = [(ctypes.c_ubyte * len(data)).from_buffer_copy(data) for data in datas]
    return [key(number) for number in numbers], buffers
