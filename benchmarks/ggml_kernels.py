"""ggml's own kernels on our buffers, called through its shared libraries.

Owns the little of ggml's C interface that needs: an encoding's row dot, and a matrix product of one thread. Must not know ours.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


class _Traits(ctypes.Structure):
    _fields_ = (("from_float", ctypes.c_void_p), ("vec_dot", ctypes.c_void_p), ("vec_dot_type", ctypes.c_int), ("nrows", ctypes.c_int64))


class _Plan(ctypes.Structure):
    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("room", ctypes.c_uint8 * 64),  # newer versions have more fields; zero means their default
    )


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@intrinsic
def _call_vec_dot(_context, _function, _k, _out, _w, _act):  # type: ignore[no-untyped-def]
    """vec_dot(int n, float *s, size_t bs, const void *x, size_t bx, const void *y, size_t by, int nrc) by its address."""

    def codegen(context, builder, _signature, args):  # type: ignore[no-untyped-def]
        i64, i32 = ir.IntType(64), ir.IntType(32)
        function, k, out, w, act = args
        kind = ir.FunctionType(ir.VoidType(), [i32, i64, i64, i64, i64, i64, i64, i32])
        builder.call(builder.inttoptr(function, kind.as_pointer()), [builder.trunc(k, i32), out, i64(0), w, i64(0), act, i64(0), i32(1)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@njit(nogil=True)
def _dot_rows(function, w, stride, n_rows, k, act, out):  # type: ignore[no-untyped-def]
    for r in range(n_rows):
        _call_vec_dot(function, k, out + 4 * r, w + r * stride, act)


class Ggml:
    """ggml, out of the folder that holds libggml-base.so and libggml-cpu.so."""

    def __init__(self, folder: Path):
        self._base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self._cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
        self._cpu.ggml_cpu_init()
        self._cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_Traits)
        self._base.ggml_init.restype = ctypes.c_void_p
        self._base.ggml_init.argtypes = [_InitParams]
        self._base.ggml_free.argtypes = [ctypes.c_void_p]
        for name, arguments in (
            ("ggml_new_tensor_2d", [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]),
            ("ggml_get_data", [ctypes.c_void_p]),
            ("ggml_mul_mat", [ctypes.c_void_p] * 3),
            ("ggml_new_graph", [ctypes.c_void_p]),
            ("ggml_build_forward_expand", [ctypes.c_void_p] * 2),
        ):
            getattr(self._base, name).restype = ctypes.c_void_p
            getattr(self._base, name).argtypes = arguments
        self._cpu.ggml_graph_plan.restype = _Plan
        self._cpu.ggml_graph_plan.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        self._cpu.ggml_graph_compute.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Plan)]

    def rows(self, ggml_id: int, w: int, stride: int, n_rows: int, k: int, x: np.ndarray, out: int) -> Callable[[], None]:
        """A call that multiplies all rows with x, quantized once as ggml wants it."""
        traits = self._cpu.ggml_get_type_traits_cpu(ggml_id).contents
        act = np.zeros(4 * k + 64, np.uint8)
        quantize = self._cpu.ggml_get_type_traits_cpu(traits.vec_dot_type).contents.from_float
        if quantize:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(quantize)(x.ctypes.data, act.ctypes.data, k)
        else:
            act[: 4 * k] = x.view(np.uint8)
        function, address = traits.vec_dot, act.ctypes.data
        return lambda _keep=act: _dot_rows(function, w, stride, n_rows, k, address, out)

    def product(self, ggml_id: int, w: np.ndarray, k: int, x: np.ndarray) -> Callable[[], None]:
        """A call that multiplies the weight rows w [n_rows, bytes] with the rows of x, on one thread. Its memory is never freed."""
        context = self._base.ggml_init(_InitParams(w.nbytes + x.nbytes + 4 * len(w) * len(x) + (1 << 20), None, False))
        weights = self._base.ggml_new_tensor_2d(context, ggml_id, k, len(w))
        inputs = self._base.ggml_new_tensor_2d(context, 0, k, len(x))
        ctypes.memmove(self._base.ggml_get_data(weights), w.ctypes.data, w.nbytes)
        ctypes.memmove(self._base.ggml_get_data(inputs), x.ctypes.data, x.nbytes)
        graph = self._base.ggml_new_graph(context)
        self._base.ggml_build_forward_expand(graph, self._base.ggml_mul_mat(context, weights, inputs))
        plan = self._cpu.ggml_graph_plan(graph, 1, None)
        work = np.zeros(plan.work_size + 64, np.uint8)
        plan.work_data = work.ctypes.data
        return lambda _keep=work: self._cpu.ggml_graph_compute(graph, plan)
