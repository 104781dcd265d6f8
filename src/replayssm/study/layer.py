"""One random layer whose heads forget slowly in some rows and fast in others, its tokens and the fp64 truth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from replayssm import reference
from replayssm.spec import Kind, LayerSpec

HEADS, DIM = (1, 2), 128
SEEDS = 2
# Steps after which the decay alone leaves 1/e of a state. The delta rule forgets as well: it overwrites what it holds
# for keys near the current one, with random keys about beta/K of the state a step.
TIME_CONSTANTS = {"slow": 2000.0, "fast": 8.0}
GATE_SPREAD = 0.5  # standard deviation of the gate's input, over steps and channels


@dataclass(frozen=True)
class Layer:
    """`SEEDS` rows for each entry of `TIME_CONSTANTS`, in that order: B = 4 requests that never meet."""

    kind: Kind
    steps: int
    device: torch.device

    @property
    def spec(self) -> LayerSpec:
        """Two value heads that share a key head, or two heads of KDA."""
        return LayerSpec(self.kind, HEADS[1] if self.kind == "kda" else HEADS[0], HEADS[1], DIM, DIM)

    @property
    def rows(self) -> int:
        """B."""
        return SEEDS * len(TIME_CONSTANTS)

    def rows_of(self, decay: str) -> slice:
        """Rows of the batch that forget `decay`."""
        at = list(TIME_CONSTANTS).index(decay)
        return slice(at * SEEDS, (at + 1) * SEEDS)

    @property
    def gate_shape(self) -> tuple[int, ...]:
        """Of the gate of one token."""
        return (HEADS[1], DIM) if self.kind == "kda" else (HEADS[1],)

    @cached_property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """mixed_qkv [T, B, ·], a [T, B, HV(, K)], b [T, B, HV]: bf16 numbers in fp32, as out of a 16-bit model."""
        gen = torch.Generator().manual_seed(5)
        shape = (self.steps, self.rows)
        mixed = torch.randn(*shape, self.spec.qkv_dim, generator=gen)
        a = torch.randn(*shape, *self.gate_shape, generator=gen) * GATE_SPREAD
        b = torch.randn(*shape, HEADS[1], generator=gen)
        for decay, steps in TIME_CONSTANTS.items():
            a[:, self.rows_of(decay)] += math.log(math.expm1(1 / steps))  # softplus of it is 1/steps
        mixed, a, b = (x.bfloat16().float().to(self.device) for x in (mixed, a, b))
        return mixed, a, b

    @cached_property
    def gates(self) -> tuple[Tensor, Tensor]:
        """A_log and dt_bias, both zero: the tokens say everything."""
        return torch.zeros(HEADS[1], device=self.device), torch.zeros(self.gate_shape, device=self.device)

    def empty_state(self, slots: int, dtype: str = "float32") -> Tensor:
        """[slots, HV, V, K], zero."""
        return torch.zeros(self.spec.state_array(slots).shape, dtype=getattr(torch, dtype), device=self.device)

    @cached_property
    def marks(self) -> list[int]:
        """Steps at which errors are taken: powers of two from 64 on, and the last."""
        return sorted({*(2**n for n in range(6, 14) if 2**n < self.steps), self.steps})

    @cached_property
    def truth(self) -> tuple[Tensor, dict[int, Tensor]]:
        """Outputs [T, B, HV, V], states [B, HV, V, K] at each mark, by the serial recurrence in fp64 on the CPU."""
        return self.follow(self.empty_state(self.rows).cpu())

    def follow(self, state: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """`truth` from another start."""
        outs, states, begin = [], {}, 0
        mixed, a, b = (x.cpu().transpose(0, 1) for x in self.tokens)
        A_log, dt_bias = (x.cpu() for x in self.gates)
        for end in self.marks:
            now = slice(begin, end)
            out, state = reference.serial(
                mixed[:, now], a[:, now], b[:, now], A_log, dt_bias, None, state, is_kda=self.kind == "kda"
            )
            outs.append(out.transpose(0, 1))
            states[end], begin = state, end
        return torch.cat(outs), states

    def errors(self, outs: Tensor, states: dict[int, Tensor]) -> list[dict[str, Any]]:
        """Relative errors (Frobenius) for each decay and mark: of the state, and of the outputs since the mark before.

        outs [T, B, HV, V] and states as in `truth`.
        """
        true_outs, true_states = self.truth
        rows: list[dict[str, Any]] = []
        for decay in TIME_CONSTANTS:
            at, begin = self.rows_of(decay), 0
            for end in self.marks:
                window = slice(begin, end)
                rows.append(
                    dict(
                        kind=self.kind, decay=decay, steps=end,
                        state_error=relative(states[end][at], true_states[end][at]),
                        output_error=relative(outs[window, at], true_outs[window, at]),
                    )
                )  # fmt: skip
                begin = end
        return rows


def relative(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖."""
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm())
