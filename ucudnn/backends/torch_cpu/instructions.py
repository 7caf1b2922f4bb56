"""Dtypes for which this processor has instructions that oneDNN may use.

Without such instructions oneDNN and aten fall back to general matrix products, which take scratch
memory from malloc that torch's allocator does not see.
"""

from __future__ import annotations

import os
import platform

import torch

from ucudnn.backends.tensors import torch_dtype
from ucudnn.problem import Problem

# Names of the same architecture on Linux and on Windows.
_X86 = ("x86_64", "AMD64")
# Values of ONEDNN_MAX_CPU_ISA, oldest first.
_BELOW_AVX2 = ("SSE41", "AVX")
_BELOW_BFLOAT16 = (*_BELOW_AVX2, "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")


def onednn_isa_limit() -> str:
    """The newest instruction set that the environment allows oneDNN to use; "" for no limit.

    oneDNN reads the variable itself, and torch has no function that returns the result.
    """
    # The second name is that of releases when oneDNN was called DNNL.
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")
    return "" if limit.upper() in ("ALL", "DEFAULT") else limit.upper()


def has_instructions(dtype: str) -> bool:
    """True if convolutions and matrix products in a dtype need no such fallback here.

    Args:
        dtype: of a problem. Half precision counts only with AVX-512, where it was checked.
    """
    if dtype == "float16":
        return _avx512() and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    if dtype == "bfloat16":
        return _avx512_bf16() and onednn_isa_limit() not in _BELOW_BFLOAT16
    # Without AVX2 the fallback is taken in float32 and float64, too.
    return platform.machine() not in _X86 or (_avx2() and onednn_isa_limit() not in _BELOW_AVX2)


def product_dtype(problem: Problem) -> torch.dtype:
    """The dtype in which matrices are multiplied for a problem.

    It is float32 instead of a half precision for which the processor has no instructions. torch
    would multiply element by element, or convert in memory that its allocator does not see.
    """
    is_half = problem.bytes_per_element == 2
    return (
        torch.float32 if is_half and not has_instructions(problem.dtype) else torch_dtype(problem)
    )


def _avx2() -> bool:
    return bool(torch.cpu._is_avx2_supported())


def _avx512() -> bool:
    return bool(torch.cpu._is_avx512_supported())


def _avx512_bf16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported())
