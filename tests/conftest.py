"""One thread per test process: the tensors are tiny, and the processes share the cores."""

import torch

torch.set_num_threads(1)
