"""Runs the Gluon kernels as plain Python on torch tensors, one program after the other, without a GPU or Triton.

Layouts are ignored: what is checked is every index, mask, stride and formula. A load or store outside its tensor, or
of an element that the mask should have kept away, raises. What only a GPU can show is the business of `-m gpu` tests.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor


class Ptr:
    """A base tensor and element offsets into the storage behind it."""

    def __init__(self, base: Tensor, offset: Tensor | int = 0):
        self.base, self.offset = base, offset
        self.dtype = SimpleNamespace(element_ty=Dtype(base.dtype))

    def __add__(self, other):
        return Ptr(self.base, self.offset + (other.long() if isinstance(other, Tensor) else other))

    def where(self) -> tuple[Tensor, Tensor]:
        flat = torch.as_strided(self.base, (self.base.untyped_storage().nbytes() // self.base.element_size(),), (1,), 0)
        return flat, torch.as_tensor(self.offset, dtype=torch.long) + self.base.storage_offset()


class Dtype:
    def __init__(self, dtype):
        self.dtype, self.primitive_bitwidth = dtype, 8 * dtype.itemsize

    def __eq__(self, other):
        return self.dtype == getattr(other, "dtype", other)

    def __hash__(self):
        return hash(self.dtype)


class Value(torch.Tensor):
    """A tensor whose `.to` takes a kernel's dtypes and whose scalars behave like the kernel's int32."""

    def to(self, dtype, bitcast=False):
        dtype = getattr(dtype, "dtype", dtype)
        return self.view(dtype) if bitcast else super().to(dtype)

    def __iadd__(self, other):
        return self + other  # kernel values never change; only names do


def value(x: Tensor) -> Tensor:
    return x.as_subclass(Value)


def check(index: Tensor, live: Tensor, flat: Tensor) -> None:
    used = index[live]
    assert not used.numel() or (int(used.min()) >= 0 and int(used.max()) < flat.numel()), "access outside the tensor"


def load(ptr, mask=None, other=None, eviction_policy=""):
    flat, index = ptr.where()
    live = torch.ones_like(index, dtype=torch.bool) if mask is None else torch.as_tensor(mask).expand(index.shape)
    check(index, live, flat)
    got = flat[torch.where(live, index, 0)]
    if mask is not None and other is not None:
        got = torch.where(live, got, torch.tensor(other, dtype=got.dtype))
    return value(got.clone())


def store(ptr, x, mask=None):
    flat, index = ptr.where()
    live = torch.ones_like(index, dtype=torch.bool) if mask is None else torch.as_tensor(mask).expand(index.shape)
    check(index, live, flat)
    x = torch.as_tensor(x).expand(index.shape)
    assert x.dtype == flat.dtype or x.dtype == torch.float32 or not x.is_floating_point()
    flat[index[live]] = x[live].to(flat.dtype)


class Shared:
    """Shared memory; starts as NaN."""

    def __init__(self, data: Tensor):
        self.data, self.shape = data, list(data.shape)

    def store(self, x):
        assert list(x.shape) == self.shape
        self.data.copy_(x)

    def load(self, layout=None):
        return value(self.data.clone())

    def index(self, i):
        return Shared(self.data[int(i)])

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, start, length))

    def _reinterpret(self, dtype, shape, layout):
        return Shared(self.data.view(shape))


def f32(x):
    return x if isinstance(x, Tensor) else value(torch.tensor(x))


def reduce(xs, axis, combine):
    return tuple(x.sum(axis) for x in torch.broadcast_tensors(*xs))


def copy_to_shared(smem, ptr, mask=None, cache_modifier="", eviction_policy=""):
    smem.store(load(ptr))


def high(x):
    return value((x.contiguous().view(torch.int32) & -8192).view(torch.float32))


def layout(*args, **kwargs):
    return SimpleNamespace(args=args, **kwargs)


def namespace() -> ModuleType:
    gl = ModuleType("gl")
    dtypes = {n: Dtype(getattr(torch, n)) for n in ("float32", "bfloat16", "float16", "float64")}
    gl.__dict__.update(
        dtypes, int64=torch.int64, int32=torch.int32, constexpr=lambda x: x, load=load, store=store,
        BlockedLayout=layout, SliceLayout=layout, DotOperandLayout=layout, NVMMADistributedLayout=layout,
        SwizzledSharedLayout=layout,
        arange=lambda a, b, layout=None: value(torch.arange(a, b, dtype=torch.int32)),
        full=lambda shape, x, dtype, layout: value(torch.full(shape, x, dtype=getattr(dtype, "dtype", dtype))),
        exp=lambda x: torch.exp(f32(x)), rsqrt=lambda x: torch.rsqrt(f32(x)), sum=lambda x, axis: x.sum(axis),
        where=lambda c, x, y: torch.where(
            c if isinstance(c, Tensor) else torch.tensor(c), f32(x), torch.as_tensor(y, dtype=f32(x).dtype)
        ),
        reduce=reduce, convert_layout=lambda x, layout: x, expand_dims=lambda x, axis: x.unsqueeze(axis),
        associative_scan=lambda x, axis, fn, reverse=False: x.flip(axis).cumsum(axis).flip(axis),
        static_range=range, thread_barrier=lambda: None, shared_memory_descriptor=Shared,
        allocate_shared_memory=lambda dtype, shape, layout: Shared(
            torch.full(shape, float("nan"), dtype=getattr(dtype, "dtype", dtype))
        ),
    )  # fmt: skip
    return gl


class Kernel:
    """Stands for a jitted function: a call from a kernel runs it, `kernel[grid](...)` runs all programs."""

    def __init__(self, fn, gl):
        self.fn, self.gl = fn, gl

    def __call__(self, *args, **kwargs):
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid):
        def run(*args, num_warps=4, maxnreg=None, launch_pdl=False, **constants):
            args = [Ptr(x) if isinstance(x, Tensor) else x for x in args]
            for pid in range(grid[0]):
                self.gl.program_id = lambda axis, pid=pid: value(torch.tensor(pid, dtype=torch.int32))
                self.fn(*args, **constants)

        return run


@contextmanager
def emulated():
    """The backend module with emulated kernels; modules of the real one are put back afterwards."""
    gl = namespace()
    ours = "replayssm.kernels.gluon"

    def jit(fn):
        kernel = Kernel(fn, gl)
        return kernel

    def module(name, **names):
        m = ModuleType(name)
        m.__dict__.update(names)
        return m

    gluon = module("triton.experimental.gluon", jit=jit, constexpr_function=lambda fn: fn, language=gl)
    copies = SimpleNamespace(
        async_copy_global_to_shared=copy_to_shared, commit_group=lambda: None, wait_group=lambda n: None
    )
    mma = lambda a, b, acc, input_precision: acc + high(a) @ high(b)  # noqa: E731
    base = "triton.experimental.gluon.language"
    fake = {
        "triton": module("triton"),
        "triton.experimental": module("triton.experimental", gluon=gluon),
        "triton.experimental.gluon": gluon,
        base: gl,
        f"{base}.nvidia": module("nvidia"),
        f"{base}.nvidia.ampere": module("ampere", async_copy=copies, mma_v2=mma),
        "triton.language": module("language"),
        "triton.language.extra": module("extra"),
        "triton.language.extra.cuda": module("cuda", gdc_wait=lambda: None, gdc_launch_dependents=lambda: None),
    }
    kept = {n: m for n, m in sys.modules.items() if n in fake or n.startswith((ours, "triton"))}
    for name in kept:
        del sys.modules[name]
    sys.modules.update(fake)
    cuda = (torch.cuda.device, torch.cuda.current_stream)
    try:
        backend = importlib.import_module(f"{ours}.backend")
        torch.cuda.device = lambda d: memory()  # type: ignore[misc, assignment]
        torch.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=0)  # type: ignore[assignment]
        yield backend
    finally:
        torch.cuda.device, torch.cuda.current_stream = cuda  # type: ignore[misc]
        for name in [n for n in sys.modules if n in fake or n.startswith((ours, "triton"))]:
            del sys.modules[name]
        sys.modules.update(kept)


@contextmanager
def memory():
    yield
