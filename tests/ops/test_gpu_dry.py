"""The GPU tests on the CPU backend, so that their own code is proven before they meet a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU here")
def test_gpu_tests_pass_on_the_cpu():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "gpu"]
    names = (
        "test_gpu.py", "test_gpu_isolation.py", "test_gpu_graph.py", "test_gpu_verify.py",
        "../kernels/triton/test_triton_gpu.py",
    )  # fmt: skip
    files = [str((HERE / name).resolve()) for name in names]
    done = subprocess.run(
        [*command, *files, "-k", "not grid_axis and not beyond_32_bit and not 4096 and not launch_table"],
        cwd=HERE.parents[1], env={**os.environ, "REPLAYSSM_TEST_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
