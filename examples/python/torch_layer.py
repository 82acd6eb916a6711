#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A Mixture-of-Experts layer of PyTorch over the ranks of a job, with gradients, compared with the same layer
computed in one place.

    torchrun --nproc-per-node 2 torch_layer.py    # a process for each GPU: transport peer, nccl_ep or nccl
    python torch_layer.py                         # one rank, on the host where there is no GPU

Tokens travel in MXFP8 forward and BF16 backward. Needs PyTorch, and on GPUs cuda-python and NCCL: see
`nvte-ep doctor`.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import nvte_ep
import torch

TOKENS, HIDDEN, TOP_K, EXPERTS = 96, 256, 2, 8


def connect(job: nvte_ep.Job) -> tuple[nvte_ep.Communicator, torch.device]:
    if torch.cuda.is_available():
        device = torch.device("cuda", (job.local_rank or 0) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return job.communicator(device_id=device.index), device
    if job.size > 1:
        sys.exit("ranks that are processes need GPUs")
    return nvte_ep.Communicator.threads(1)[0], torch.device("cpu")


def expert_matrices(device: torch.device) -> torch.Tensor:
    """[EXPERTS, HIDDEN, HIDDEN], the same on every rank."""
    made = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1))
    return (made / HIDDEN**0.5).to(device)


def layer(
    handle: nvte_ep.Handle,
    tokens: torch.Tensor,
    topk: torch.Tensor,
    weights: torch.Tensor,
    local: torch.Tensor,
) -> torch.Tensor:
    """local: the matrices of this rank's experts. Weights of the router are float32; else .float() them."""
    routing = handle.prepare(topk)
    offsets = routing.row_offsets.tolist()
    slots, slot_weights = nvte_ep.torch.dispatch(handle, tokens, weights)
    parts = [slots[begin:end] @ matrix for (begin, end), matrix in zip(pairwise(offsets), local, strict=True)]
    parts.append(slots[offsets[-1] :])  # not in use
    return nvte_ep.torch.combine(handle, torch.cat(parts), slot_weights)


def dense_layer(
    tokens: torch.Tensor, topk: torch.Tensor, weights: torch.Tensor, matrices: torch.Tensor
) -> torch.Tensor:
    return torch.einsum("th,tkhg,tk->tg", tokens, matrices[topk], weights)


def main() -> int:
    with nvte_ep.Job.from_environment() as job:
        comm, device = connect(job)
        random = torch.Generator().manual_seed(100 + job.rank)
        tokens = torch.randn(TOKENS, HIDDEN, generator=random).to(device).requires_grad_()
        chosen = torch.randn(TOKENS, EXPERTS, generator=random).to(device).topk(TOP_K)
        weights = chosen.values.softmax(dim=1).requires_grad_()
        grad = torch.randn(TOKENS, HIDDEN, generator=random).to(device)
        matrices = expert_matrices(device)

        config = {"num_experts": EXPERTS, "hidden": HIDDEN, "max_tokens_per_rank": TOKENS}
        with nvte_ep.Group(comm, **config) as group:
            handle = group.handle(top_k=TOP_K, alignment=16, dispatch="mxfp8", combine_backward="bf16")
            experts = EXPERTS // job.size
            local = matrices[job.rank * experts : (job.rank + 1) * experts]
            result = layer(handle, tokens, chosen.indices, weights, local)
            got = [result, *torch.autograd.grad(result, (tokens, weights), grad)]
            transport = group.info.transport
        expected = dense_layer(tokens, chosen.indices, weights, matrices)
        wanted = [expected, *torch.autograd.grad(expected, (tokens, weights), grad)]
        errors = [
            float((a.detach() - b.detach()).norm() / b.detach().norm())
            for a, b in zip(got, wanted, strict=True)
        ]
        # The output and the weights' gradients are of tokens in MXFP8, the tokens' gradients of BF16 alone.
        bounds = {"output": 0.04, "gradient of tokens": 0.005, "gradient of weights": 0.04}
        told = ", ".join(f"{name} {error:.4f}" for name, error in zip(bounds, errors, strict=True))
        print(f"rank {job.rank} of {job.size}, {transport} on {device}: relative errors: {told}", flush=True)
        comm.close()
        return int(any(error > bound for error, bound in zip(errors, bounds.values(), strict=True)))


if __name__ == "__main__":
    sys.exit(main())
