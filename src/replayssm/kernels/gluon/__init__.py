"""Decode kernels with explicit register layouts (Gluon), tuned for Hopper; they need `triton`.

`backend` has the entry points, `launch` the table of launch parameters. `supports` there says which calls these
kernels take; the others belong to the portable kernels.
"""
