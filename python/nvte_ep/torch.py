# SPDX-License-Identifier: Apache-2.0
# The types must check with PyTorch installed and without:
# mypy: allow-subclassing-any, allow-untyped-calls, no-warn-return-any
"""Dispatch and combine as PyTorch operations with gradients.

    received, weights = nvte_ep.torch.dispatch(handle, tokens, topk_weights)
    result = nvte_ep.torch.combine(handle, experts(received), weights)

Every rank calls them in the same order, forward and backward, so the loss of every rank must depend on their
results, also where a rank has no tokens. A handle holds one routing: call its backward before its next
prepare, or use one handle for each layer and micro-batch. Tokens travel in the wire formats of the handle and
arrive decoded; slots past the routing's total are zero.
"""

from __future__ import annotations

from typing import Any

import torch

from nvte_ep.errors import BadStateError, Status
from nvte_ep.handle import Handle

__all__ = ["combine", "dispatch"]


def _slots(handle: Handle, like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    # Zeros: the library does not write slots past the total, and experts would make gradients of what lies
    # there.
    return torch.zeros((handle.slots, *shape), dtype=dtype or like.dtype, device=like.device)


def _same_routing(ctx: Any) -> None:
    if ctx.handle.prepared != ctx.prepared:
        raise BadStateError(
            Status.BAD_STATE,
            "backward: the handle was prepared again since the forward; use one for each layer",
        )


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        handle: Handle,
        tokens: torch.Tensor,
        topk_weights: torch.Tensor | None,
        packing: dict[str, Any],
    ) -> Any:
        received = _slots(handle, tokens, tokens.shape[1])
        weights = None if topk_weights is None else _slots(handle, topk_weights)
        handle.dispatch(
            tokens.detach().contiguous(),
            None if topk_weights is None else topk_weights.detach().contiguous(),
            receive="decoded",
            out=received,
            recv_weights=weights,
            dtype=tokens.dtype,
            **packing,
        )
        ctx.handle = handle
        ctx.prepared = handle.prepared
        ctx.num_tokens = tokens.shape[0]
        ctx.weighted = topk_weights is not None
        return received, weights

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _same_routing(ctx)
        grad_received, grad_weights = grads
        grad_tokens = grad_received.new_empty((ctx.num_tokens, grad_received.shape[1]))
        grad_topk_weights = None
        if ctx.weighted:
            grad_topk_weights = grad_weights.new_empty((ctx.num_tokens, ctx.handle.top_k))
        ctx.handle.dispatch_backward(
            grad_received.contiguous(),
            grad_weights.contiguous() if ctx.weighted else None,
            out=grad_tokens,
            grad_topk_weights=grad_topk_weights,
        )
        return None, grad_tokens, grad_topk_weights, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        handle: Handle,
        expert_out: torch.Tensor,
        slot_weights: torch.Tensor | None,
        num_tokens: int,
        packing: dict[str, Any],
    ) -> torch.Tensor:
        expert_out = expert_out.detach().contiguous()
        slot_weights = None if slot_weights is None else slot_weights.detach().contiguous()
        result = expert_out.new_empty((num_tokens, expert_out.shape[1]))
        handle.combine(expert_out, slot_weights=slot_weights, out=result)
        ctx.handle = handle
        ctx.prepared = handle.prepared
        ctx.packing = packing
        ctx.weighted = slot_weights is not None
        # Unweighted, the backward reads neither.
        ctx.save_for_backward(*((expert_out, slot_weights) if slot_weights is not None else ()))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _same_routing(ctx)
        (grad,) = grads
        expert_out, slot_weights = ctx.saved_tensors if ctx.weighted else (None, None)
        grad_expert_out = _slots(ctx.handle, grad, grad.shape[1])
        grad_slot_weights = None if slot_weights is None else _slots(ctx.handle, slot_weights)
        ctx.handle.combine_backward(
            grad.contiguous(),
            receive="decoded",
            out=grad_expert_out,
            slot_weights=slot_weights,
            expert_out=expert_out,
            grad_slot_weights=grad_slot_weights,
            dtype=grad.dtype,
            **ctx.packing,
        )
        return None, grad_expert_out, grad_slot_weights, None, None


def dispatch(
    handle: Handle, tokens: torch.Tensor, topk_weights: torch.Tensor | None = None, **packing: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens [T, H] to the slots of this rank's experts: [slots, H], and weights float32 [slots] or None.
    Collective.

    After handle.prepare. packing: rounding, rng_state, nonfinite, scale_rounding, ... of Handle.dispatch.
    """
    received, weights = _Dispatch.apply(handle, tokens, topk_weights, packing)
    return received, weights


def combine(
    handle: Handle,
    expert_out: torch.Tensor,
    slot_weights: torch.Tensor | None = None,
    *,
    num_tokens: int | None = None,
    **packing: Any,
) -> torch.Tensor:
    """Expert outputs [slots, H] to the weighted sums of every token [T, H]. Collective.

    num_tokens: T; None: that of the last prepare. packing is for the backward, where gradients are
    dispatched.
    """
    count = handle.num_tokens if num_tokens is None else num_tokens
    result: torch.Tensor = _Combine.apply(handle, expert_out, slot_weights, count, packing)
    return result
