"""Differentiable forms of the layers' inner loops, in plain PyTorch and fast enough to train with.

The two rules below take the arguments of the functions of transformers in whose place they are called. Both work in
fp32 and in chunks of 64 tokens. Within a chunk the rule is a triangular system; from chunk to chunk the state S [K, V]
moves by one affine map, S <- M S + N, so that only one matrix product a chunk is sequential.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

CHUNK = 64


def conv_by_shifts(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Causal depthwise convolution as a sum of shifted products, which torch.compile can fuse.

    ``hidden_states`` is [batch, channels, time] and ``weight`` [channels, width]; products are taken in fp32.
    """
    width, length = weight.shape[-1], hidden_states.shape[-1]
    padded = F.pad(hidden_states.float(), (width - 1, 0))
    out: Any = sum(padded[..., i : i + length] * weight[:, i, None] for i in range(width))
    if bias is not None:
        out = out + bias[:, None]
    if activation is not None:
        out = ACT2FN[activation](out)
    result: Tensor = out.to(hidden_states.dtype)
    return result


class UnitLowerInverse(torch.autograd.Function):
    """Inverse of I + A for strictly lower triangular A, [batch, n, n] with n a power of two.

    Diagonal blocks of doubling size are inverted together: inv([[P, 0], [C, R]]) has -inv(R) C inv(P) below.
    """

    @staticmethod
    def forward(ctx: Any, strict: Tensor) -> Tensor:
        """Return the inverse, itself unit lower triangular."""
        n = strict.shape[-1]
        inverse = torch.eye(n, dtype=strict.dtype, device=strict.device).repeat(strict.shape[0], 1, 1)
        half = 1
        while half < n:
            shape = (-1, n // (2 * half), 2 * half, n // (2 * half), 2 * half)
            given, blocks = (x.view(shape).diagonal(0, 1, 3).movedim(-1, 1) for x in (strict, inverse))
            below = blocks[..., half:, half:] @ given[..., half:, :half] @ blocks[..., :half, :half]
            blocks[..., half:, :half] = -below
            half *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Differential of an inverse: dX = -X dA X."""
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grads[0] @ inverse.mT)


class DecayedProducts(torch.autograd.Function):
    """For times i > j of one chunk, sum_c x[i, c] k[j, c] exp(total[i, c] - total[j, c]); 0 where i <= j.

    ``x`` is [batch, n, several, K], ``k`` and ``total`` are [batch, n, K] with n a power of two, and ``total``, the sum
    of all logarithms of decay so far, never grows with time. The result is [batch, n, several, n].

    Writing the exponential as exp(total[i]) exp(-total[j]) would make matrix products of these sums, but overflows. So
    the chunk is halved again and again: where i lies in the right half of a block and j in the left half, the total at
    the end of the left half is taken off both, and neither exponent is positive. Every pair is met at one block size.
    """

    @staticmethod
    def halves(size: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Left and right halves of all blocks of ``2 * size`` times: [batch, n / (2 size), size, ...] each."""
        return x.unflatten(1, (-1, 2, size)).unbind(2)

    @staticmethod
    def below(size: int, products: Tensor) -> Tensor:
        """View of the entries with i in the right and j in the left half: [batch, blocks, size, several, size]."""
        batch, n, several, _ = products.shape
        shape = (batch, n // (2 * size), 2 * size, several, n // (2 * size), 2 * size)
        return products.view(shape).diagonal(0, 1, 4).movedim(-1, 1)[:, :, size:, :, :size]

    @staticmethod
    def operands(size: int, x: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Decay of the left and right halves, and both operands times it as stacks of matrices."""
        before, after = DecayedProducts.halves(size, total)
        middle = before[:, :, -1:]
        left, right = (middle - before).exp(), (after - middle).exp()
        keys = DecayedProducts.halves(size, k)[0] * left
        rows = DecayedProducts.halves(size, x)[1] * right.unsqueeze(3)
        return left, right, keys.flatten(0, 1), rows.flatten(2, 3).flatten(0, 1)

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: Tensor, total: Tensor) -> Tensor:
        """Fill the blocks below the diagonal, one size of block after the other."""
        n = x.shape[1]
        products = x.new_zeros(*x.shape[:3], n)
        size = 1
        while size < n:
            _, _, keys, rows = DecayedProducts.operands(size, x, k, total)
            below = DecayedProducts.below(size, products)
            below.copy_((rows @ keys.mT).view(below.shape))
            size *= 2
        ctx.save_for_backward(x, k, total)
        return products

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x and k by the same products; that of the total follows, since it enters beside x and k only."""
        x, k, total = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x, grad_k = torch.zeros_like(x), torch.zeros_like(k)
        size = 1
        while size < x.shape[1]:
            left, right, keys, rows = DecayedProducts.operands(size, x, k, total)
            below = DecayedProducts.below(size, grad).flatten(2, 3).flatten(0, 1)
            to_x, to_k = DecayedProducts.halves(size, grad_x)[1], DecayedProducts.halves(size, grad_k)[0]
            to_x.addcmul_((below @ keys).view(to_x.shape), right.unsqueeze(3))
            to_k.addcmul_((below.mT @ rows).view(to_k.shape), left)
            size *= 2
        return grad_x, grad_k, (x * grad_x).sum(2) - k * grad_k


class StateScan(torch.autograd.Function):
    """States before each chunk for S[i+1] = M[i] S[i] + N[i], S[0] = 0; M is [rows, chunks, K, K], N [.., K, V]."""

    @staticmethod
    def forward(ctx: Any, move: Tensor, add: Tensor) -> Tensor:
        """Return S[0] ... S[chunks - 1] as [rows, chunks, K, V]."""
        states = torch.empty_like(add)
        states[:, 0] = 0
        for i in range(add.shape[1] - 1):
            torch.baddbmm(add[:, i], move[:, i], states[:, i], out=states[:, i + 1])
        ctx.save_for_backward(move, states)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Run the adjoint recurrence from the last chunk to the first."""
        move, states = ctx.saved_tensors
        adjoint = torch.empty_like(states)  # of the state after each chunk
        adjoint[:, -1] = 0
        for i in range(states.shape[1] - 1, 0, -1):
            torch.baddbmm(grads[0][:, i], move[:, i].mT, adjoint[:, i], out=adjoint[:, i - 1])
        return adjoint @ states.mT, adjoint


def cut(x: Tensor) -> Tensor:
    """[batch, time, heads, channels] in chunks, the last one padded with zeros: [batch * heads, chunks, 64, channels].

    A token of zeros changes nothing: key and beta are zero, and a logarithm of decay of zero keeps the state.
    """
    x = F.pad(x.float().transpose(1, 2), (0, 0, 0, -x.shape[1] % CHUNK))
    return x.reshape(x.shape[0] * x.shape[1], -1, CHUNK, x.shape[-1])


def join(x: Tensor, batch: int, length: int) -> Tensor:
    """The inverse of ``cut``: [batch, time, heads, channels]."""
    return x.reshape(batch, x.shape[0] // batch, -1, x.shape[-1])[:, :, :length].transpose(1, 2)


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1, in fp32, with the guard against zero that the models use."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def chunk_gdn(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Gated delta rule from a zero state.

    Queries and keys are [batch, time, key heads, K] and are normalised here; values are [batch, time, value heads, V];
    ``g``, the logarithm of the decay, and ``beta`` are [batch, time, value heads].
    """
    with torch.autocast(query.device.type, enabled=False):
        dtype, (batch, length, value_heads, _) = query.dtype, value.shape
        query, key = (unit(x).repeat_interleave(value_heads // x.shape[2], 2) for x in (query, key))
        query = query * query.shape[-1] ** -0.5
        query, key, value, g, beta = (cut(x) for x in (query, key, value, g[..., None], beta[..., None]))
        total = g.cumsum(2)
        later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
        decay = (total - total.mT).masked_fill(later, -torch.inf).exp()
        weighted = key * beta
        inverse = UnitLowerInverse.apply(((weighted @ key.mT) * decay).tril(-1).flatten(0, 1)).view_as(decay)
        new, read = inverse @ (value * beta), inverse @ (weighted * total.exp())
        last = total[:, :, -1:]
        to_end = (key * (last - total).exp()).mT
        identity = torch.eye(key.shape[-1], device=key.device)
        states = StateScan.apply(last.exp() * identity - to_end @ read, to_end @ new)
        out = (query * total.exp()) @ states + ((query @ key.mT) * decay) @ (new - read @ states)
        return join(out, batch, length).to(dtype), None


def chunk_kda(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Kimi delta attention from a zero state: the gated delta rule with a decay for each key channel.

    Queries and keys are [batch, time, heads, K] and are normalised here; ``g``, the logarithm of the decay, has their
    shape; values are [batch, time, heads, V] and ``beta`` is [batch, time, heads].
    """
    with torch.autocast(query.device.type, enabled=False):
        dtype, (batch, length) = query.dtype, value.shape[:2]
        query, key = unit(query) * query.shape[-1] ** -0.5, unit(key)
        query, key, value, g, beta = (cut(x) for x in (query, key, value, g, beta[..., None]))
        total = g.cumsum(2)
        weighted = key * beta
        pairs = torch.stack([weighted, query], dim=3).flatten(0, 1)
        products = DecayedProducts.apply(pairs, key.flatten(0, 1), total.flatten(0, 1))
        inverse = UnitLowerInverse.apply(products[:, :, 0]).view(*key.shape[:2], CHUNK, CHUNK)
        attend = products[:, :, 1].view_as(inverse)
        new, read = inverse @ (value * beta), inverse @ (weighted * total.exp())
        last = total[:, :, -1:]
        to_end = (key * (last - total).exp()).mT
        states = StateScan.apply(torch.diag_embed(last[:, :, 0].exp()) - to_end @ read, to_end @ new)
        new = new - read @ states
        itself = (query * key).sum(-1, keepdim=True) * new
        out = (query * total.exp()) @ states + attend @ new + itself
        return join(out, batch, length).to(dtype), None
