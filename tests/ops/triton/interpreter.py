"""Triton 3.9's interpreter made to compute in bf16 as cards do: by itself it cuts off instead of rounding to even,
multiplies the bits of matrices, and takes integers for bits."""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def to_float(handle):
    """A handle's numbers, bf16 (which it holds as bits) in fp32."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def to_bf16(numbers):
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded)


def patch_language_once() -> None:
    """It exchanges the language's functions for its own at every call of a kernel or of a function of one, and back:
    most of the time that a small kernel takes."""
    exchange, done = interpreter._patch_lang, set()

    def exchange_once(fn):
        modules = frozenset(value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core)
        if modules not in done:
            done.add(modules)
            exchange(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = exchange_once


def patch() -> None:
    patch_language_once()
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self, src, dst_type):
        if tl.bfloat16 not in (src.dtype.scalar, dst_type.scalar) or src.dtype.scalar == dst_type.scalar:
            return cast(self, src, dst_type)
        numbers = to_float(src)
        if dst_type.scalar == tl.bfloat16:
            return TensorHandle(to_bf16(numbers), tl.bfloat16)
        return cast(self, TensorHandle(numbers, tl.float32), dst_type)

    def create_dot(self, a, b, *args):
        a, b = (TensorHandle(to_float(x), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *args)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast_impl, create_dot
