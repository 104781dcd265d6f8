"""Backends: the code that runs an operation on one kind of device. `choose.backend` names the one for a device.

Every backend offers the same functions with the arguments of the public operations, in the same order; none of
them validates. What the ring tensors hold is private to a backend, so one pool is served by one backend only.
"""
