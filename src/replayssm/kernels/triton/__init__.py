"""The portable Triton backend: one source for NVIDIA and AMD GPUs, and for the Triton interpreter on a CPU.

`backend` is the module that `kernels.choose` may name; importing this package alone imports no Triton. The ring
holds what the torch backend's ring holds: d fp32, k raw in the activation dtype, g the log decay of its own step.
"""
