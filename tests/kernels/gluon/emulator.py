"""Runs the Gluon kernels as plain Python on torch tensors, without a GPU or Triton.

Layouts are ignored: what is checked is every index, mask, stride, formula and barrier. A load or store outside its
tensor, or of an element that the mask should have kept away, raises. Programs and their warps take turns as `tasks`
draws it. What only a GPU can show is the business of `-m gpu` tests.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from replayssm import kernels
from tests.kernels.gluon import tasks

TOGETHER = 4  # programs of a launch that run at the same time


class Ptr:
    """A base tensor and element offsets into the storage behind it."""

    def __init__(self, base: Tensor, offset: Tensor | int = 0):
        self.base, self.offset = base, offset
        self.dtype = SimpleNamespace(element_ty=Dtype(base.dtype))

    def __add__(self, other):
        return Ptr(self.base, self.offset + (plain(other).long() if isinstance(other, Tensor) else other))

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


class Value(Tensor):
    """A tensor whose `.to` takes a kernel's dtypes and whose scalars behave like the kernel's int32."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if type(result) is Tensor else result  # much faster than the general way

    def to(self, dtype):
        return super().to(getattr(dtype, "dtype", dtype))

    def __iadd__(self, other):
        return self + other  # kernel values never change; only names do


def value(x: Tensor) -> Tensor:
    return x.as_subclass(Value)


def plain(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor)


def element(ptr: Ptr, mask) -> tuple[Tensor, Tensor, Tensor]:
    """Storage, index and which of the indices are used."""
    assert tasks.current().program.may_touch, "global memory before the kernel before has ended"
    flat, index = ptr.where()
    live = plain(torch.as_tensor(True if mask is None else mask)).expand(index.shape)
    used = index[live]
    assert not used.numel() or (int(used.min()) >= 0 and int(used.max()) < flat.numel()), "access outside the tensor"
    return flat, index, live


def fetch(flat: Tensor, index: Tensor, live: Tensor, other: float) -> Tensor:
    return torch.where(live, flat[torch.where(live, index, 0)], torch.tensor(other).to(flat.dtype))


def load(ptr, mask=None, other=0.0):
    tasks.wait()
    return value(fetch(*element(ptr, mask), other))


def store(ptr, x, mask=None):
    tasks.wait()
    flat, index, live = element(ptr, mask)
    x = plain(torch.as_tensor(x)).expand(index.shape)
    assert x.dtype == flat.dtype or x.dtype == torch.float32 or not x.is_floating_point()
    flat[index[live]] = x[live].to(flat.dtype)


class Shared:
    """Shared memory; starts as NaN."""

    def __init__(self, data: Tensor):
        self.data, self.shape = data, list(data.shape)
        self.dtype = data.dtype

    def store(self, x):
        tasks.wait()
        assert list(x.shape) == self.shape
        self.data.copy_(plain(x))

    def load(self, layout=None):
        tasks.wait()
        return value(self.data.clone())

    def index(self, i):
        return Shared(self.data[int(i)])

    def permute(self, order):
        return Shared(self.data.permute(order))

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, start, length))

    def _reinterpret(self, dtype, shape, layout):
        return Shared(self.data.view(shape))


class Barrier:
    """A barrier in shared memory: a phase ends when all have arrived and all announced bytes are there."""

    def init(self, count):
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def update(self, arrivals, data):
        self.pending -= arrivals
        self.bytes += data
        assert self.pending >= 0, "too many arrivals at a barrier"
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count

    def arrive(self, arrivals, data=0):
        tasks.wait()
        self.update(arrivals, data)

    def wait(self, parity):
        tasks.wait(lambda: self.phase != int(parity))


class Barriers:
    def __init__(self, n):
        self.each = [Barrier() for _ in range(n)]

    def index(self, i):
        return self.each[int(i)]


class Descriptor:
    """A matrix that the copy engine reads in boxes; zeros outside."""

    def __init__(self, base, shape, strides, block_shape, layout):
        self.data = torch.as_strided(base, shape, strides)
        self.box = block_shape


def load_tile(desc, at, barrier, smem):
    assert tasks.current().program.may_touch, "global memory before the kernel before has ended"
    rows, cols = desc.box
    r, c = (int(x) for x in at)
    assert 0 <= r <= desc.data.shape[0] - rows, "tile outside the pool"
    assert c == 0

    def land():
        smem.data.copy_(desc.data[r : r + rows, :cols])
        barrier.update(0, -rows * cols * desc.data.element_size())

    tasks.fly(land)


def copy_to_shared(smem, ptr, mask=None):
    tasks.wait()
    source = element(ptr, mask)
    tasks.current().copies.append(lambda: smem.data.copy_(fetch(*source, 0.0)))


def wait_group(left):
    copies = tasks.current().copies
    tasks.wait()
    while sum(copy is None for copy in copies) > left:
        copies.land()


def arrive_after_copies(barrier, increment_count):
    task = tasks.current()
    assert not increment_count, "the count of the barrier has these arrivals"
    task.copies.append(lambda: barrier.update(32 * task.warps, 0))


def specialize(parts, warps, registers):
    """The first part runs here, the others as tasks of this program."""
    assert len(parts) - 1 == len(warps) == len(registers)
    me = tasks.current()
    workers = [
        tasks.Task(me.tasks, lambda fn=fn, args=args: fn(*args), me.program, count)
        for (fn, args), count in zip(parts[1:], warps, strict=True)
    ]
    fn, args = parts[0]
    fn(*args)
    tasks.wait(lambda: not any(worker in me.tasks.alive for worker in workers))


def allocate(dtype, shape, layout):
    """Garbage: NaN, or -1 for integers. Barriers are the only int64."""
    if dtype == torch.int64:
        return Barriers(shape[0])
    dtype = getattr(dtype, "dtype", dtype)
    return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype))


def inline_asm(text, constraints, args, dtype, is_pure, pack):
    if text.startswith("cvt.rna.tf32.f32"):
        return value(tf32(plain(args[0]) + 0.0, half=True))
    assert text.startswith("ex2.approx.ftz.f32"), "an instruction that is not known here"
    return torch.exp2(f32(args[0]))


def tf32(x: Tensor, half: bool = False) -> Tensor:
    """fp32 cut off after 10 bits of mantissa, half: rounded, ties away from zero."""
    bits = x.contiguous().view(torch.int32) + (0x1000 if half else 0)
    return torch.where(x.isfinite(), (bits & ~0x1FFF).view(torch.float32), x)


def mma_v2(x, y, total, input_precision=None):
    """Tensor cores: operands of 16 bits as they are, fp32 ones cut off, sums in fp32."""
    x, y = (plain(t) for t in (x, y))
    assert x.dtype == y.dtype
    if x.dtype == torch.float32:
        assert input_precision == "tf32"
        x, y = tf32(x), tf32(y)
    return value(plain(total) + x.float() @ y.float())


def f32(x):
    return x if isinstance(x, Tensor) else value(torch.tensor(x))


def where(condition, x, y):
    condition = condition if isinstance(condition, Tensor) else torch.tensor(condition)
    return torch.where(condition, f32(x), torch.as_tensor(y, dtype=f32(x).dtype))


def layout(*args, **kwargs):
    return SimpleNamespace(args=args, **kwargs)


def int32(x: int) -> Tensor:
    return value(torch.tensor(x, dtype=torch.int32))


def namespace() -> ModuleType:
    gl = ModuleType("gl")
    dtypes = {n: Dtype(getattr(torch, n)) for n in ("float32", "bfloat16", "float16")}
    gl.__dict__.update(
        dtypes, int64=torch.int64, int32=torch.int32, constexpr=lambda x: x, load=load, store=store,
        BlockedLayout=layout, SliceLayout=layout, SwizzledSharedLayout=layout,
        NVMMASharedLayout=SimpleNamespace(get_default_for=layout),
        program_id=lambda axis: int32(tasks.current().program.id),
        num_programs=lambda axis: tasks.current().program.of,
        arange=lambda a, b, layout=None: value(torch.arange(a, b, dtype=torch.int32)),
        full=lambda shape, x, dtype, layout: value(torch.full(shape, x, dtype=getattr(dtype, "dtype", dtype))),
        inline_asm_elementwise=inline_asm, rsqrt=lambda x: torch.rsqrt(f32(x)), sum=lambda x, axis: x.sum(axis),
        where=where, reduce=lambda xs, axis, combine: tuple(x.sum(axis) for x in torch.broadcast_tensors(*xs)),
        reshape=lambda x, shape: x.reshape(shape), convert_layout=lambda x, layout, assert_trivial=False: x,
        associative_scan=lambda x, axis, combine: x.cumsum(axis), static_range=range, shared_memory_descriptor=Shared,
        warp_specialize=specialize, allocate_shared_memory=allocate, NVMMADistributedLayout=layout,
        DotOperandLayout=layout, thread_barrier=lambda: None, join=lambda x, y: torch.stack((x, y), -1),
        permute=lambda x, order: x.permute(order),
    )  # fmt: skip
    return gl


class Kernel:
    """Stands for a jitted function: a call from a kernel runs it, `kernel[grid](...)` runs all programs."""

    def __init__(self, fn):
        self.fn = fn

    def __call__(self, *args, **kwargs):
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid):
        def run(*args, num_warps=4, maxnreg=None, launch_pdl=False, enable_fp_fusion=True, **constants):
            args = [Ptr(x) if isinstance(x, Tensor) else x for x in args]
            order = list(range(grid[0]))
            tasks.ORDER.shuffle(order)
            for i in range(0, len(order), TOGETHER):
                launch = tasks.Tasks()
                for pid in order[i : i + TOGETHER]:
                    program = SimpleNamespace(id=pid, of=grid[0], may_touch=not launch_pdl)
                    tasks.Task(launch, lambda: self.fn(*args, **constants), program, num_warps)
                launch.run()

        return run


def end_of_the_kernel_before():
    tasks.current().program.may_touch = True


@contextmanager
def emulated():
    """The backend module with emulated kernels; modules of the real one are put back afterwards."""
    gl = namespace()
    ours = "replayssm.kernels.gluon"

    def module(name, **names):
        m = ModuleType(name)
        m.__dict__.update(names)
        return m

    gluon = module("triton.experimental.gluon", jit=Kernel, constexpr_function=lambda fn: fn, language=gl)
    copies = SimpleNamespace(
        async_copy_global_to_shared=copy_to_shared, commit_group=lambda: tasks.current().copies.append(None),
        wait_group=wait_group, mbarrier_arrive=arrive_after_copies,
    )  # fmt: skip
    barriers = SimpleNamespace(
        MBarrierLayout=layout, init=lambda b, count: b.init(count), wait=lambda b, phase: b.wait(phase),
        expect=lambda b, size: b.arrive(1, size), arrive=lambda b, count: b.arrive(count),
    )  # fmt: skip
    bulk = SimpleNamespace(async_copy_global_to_shared=load_tile)
    base = "triton.experimental.gluon.language"
    fake = {
        "triton": module("triton"),
        "triton.experimental": module("triton.experimental", gluon=gluon),
        "triton.experimental.gluon": gluon,
        base: gl,
        f"{base}.nvidia": module("nvidia"),
        f"{base}.nvidia.ampere": module("ampere", async_copy=copies, mma_v2=mma_v2),
        f"{base}.nvidia.hopper": module("hopper", mbarrier=barriers, tma=bulk),
        "triton.experimental.gluon.nvidia": module("nvidia"),
        "triton.experimental.gluon.nvidia.hopper": module("hopper", TensorDescriptor=Descriptor),
        "triton.language": module("language"),
        "triton.language.extra": module("extra"),
        "triton.language.extra.cuda": module("cuda", gdc_wait=end_of_the_kernel_before),
    }
    kept = {n: m for n, m in sys.modules.items() if n in fake or n.startswith((ours, "triton"))}
    for name in kept:
        del sys.modules[name]
    sys.modules.update(fake)
    cuda, package = torch.cuda.device, getattr(kernels, "gluon", None)
    try:
        backend = importlib.import_module(f"{ours}.backend")
        backend.multiprocessors = lambda device: 2  # few programs: each has several tiles
        torch.cuda.device = lambda d: nullcontext()  # type: ignore[misc, assignment]
        yield backend
    finally:
        torch.cuda.device = cuda  # type: ignore[misc]
        for name in [n for n in sys.modules if n in fake or n.startswith((ours, "triton"))]:
            del sys.modules[name]
        sys.modules.update(kept)
        vars(kernels).pop("gluon", None)
        if package:
            kernels.gluon = package
