"""Makes NCCL EP compile its kernels before they are needed: every step once, for the shapes that are
wanted.

NCCL EP keeps what it compiles on disk, so that it is there for later processes. doctor starts this as the
ranks of a job, since kernels are made for a number of ranks:

    python -m nvte_ep.commands._warm '{"tokens": 4096, "hidden": 7168, "top_k": 8, "experts": 64, ...}'
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nvte_ep import _cuda, job
from nvte_ep.commands._report import UsageError
from nvte_ep.group import Group

TIMEOUT_NS = 600 * 10**9  # ranks compile at the same time, and some wait for others
DEFAULT_CACHE = Path("/tmp/nccl_ep/jit")


@dataclass(frozen=True)
class Wanted:
    """A layer as one rank sees it, and what travels in it."""

    tokens: int
    hidden: int
    top_k: int
    experts: int
    alignment: int = 128
    formats: tuple[str, ...] = ("nvfp4",)

    @classmethod
    def parse(cls, text: str, formats: tuple[str, ...]) -> Wanted:
        """ "4096,7168,8,64" or "4096,7168,8,64,16": tokens, hidden, top_k, experts, alignment."""
        try:
            numbers = [int(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (4, 5) or min(numbers) < 1:
            raise UsageError(f"--warm: expected T,H,K,E or T,H,K,E,ALIGNMENT, got {text!r}")
        tokens, hidden, top_k, experts, alignment = [*numbers, 128][:5]
        return cls(tokens, hidden, top_k, experts, alignment, formats)

    def json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def cache_folder() -> Path:
    """Where NCCL EP keeps its kernels."""
    return Path(os.environ.get("NCCL_EP_JIT_CACHE_DIR") or DEFAULT_CACHE)


def count_kernels(folder: Path) -> int:
    try:
        return sum(1 for _ in folder.rglob("*.cubin"))
    except OSError:
        return 0


def warm(wanted: Wanted, ranks: int) -> tuple[int, float]:
    """Exit code and seconds of a job that runs every step."""
    start = time.monotonic()
    code = job.launch(
        [sys.executable, "-m", "nvte_ep.commands._warm", wanted.json()],
        ranks,
        # Ranks may share a GPU for this.
        environment={"NCCL_MULTI_RANK_GPU_ENABLE": "1"},
    )
    return code, time.monotonic() - start


def run(wanted: Wanted) -> None:
    """Every step of one rank, in each of the formats."""
    from nvte_ep.commands.bench_machine import CudaMachine  # needs a GPU

    here = job.Job.from_environment()
    code, gpus = _cuda.runtime().cudaGetDeviceCount()
    _cuda._check("cudaGetDeviceCount", (code,))
    machine = CudaMachine(here.local_rank % int(gpus))
    machine.use()
    rng = np.random.default_rng(here.rank)
    choices = np.argsort(rng.random((wanted.tokens, wanted.experts)), axis=1)[:, : wanted.top_k]
    topk = machine.filled((wanted.tokens, wanted.top_k), "int64", choices.astype(np.int64))
    tokens = machine.filled(
        (wanted.tokens, wanted.hidden), "bfloat16", np.zeros((wanted.tokens, wanted.hidden), np.uint16)
    )
    weights = machine.filled(
        (wanted.tokens, wanted.top_k), "float32", np.ones((wanted.tokens, wanted.top_k), np.float32)
    )
    local = wanted.experts // here.size
    most = here.size * wanted.tokens * min(wanted.top_k, local) + local * wanted.alignment
    with (
        here.communicator(device_id=machine.device[1]) as comm,
        Group(
            comm,
            num_experts=wanted.experts,
            hidden=wanted.hidden,
            max_tokens_per_rank=wanted.tokens,
            max_top_k=wanted.top_k,
            recv_capacity=-(-most // wanted.alignment) * wanted.alignment,
            transport="nccl_ep",
            timeout_ns=TIMEOUT_NS,
            device=machine.device,
        ) as group,
    ):
        for format in wanted.formats:
            use: dict[str, Any] = {"top_k": wanted.top_k, "alignment": wanted.alignment}
            with group.handle(dispatch=format, combine_backward=format, **use) as handle:
                stream = machine.stream
                as_bf16: dict[str, Any] = {"receive": "decoded", "dtype": "bfloat16", "stream": stream}
                handle.prepare(topk, stream=stream)
                received = handle.dispatch(tokens, weights, **as_bf16)
                handle.combine(received.data, stream=stream)
                handle.combine_backward(tokens, **as_bf16)
                handle.dispatch_backward(received.data, stream=stream)
                machine.synchronize()


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    run(Wanted(**values | {"formats": tuple(values["formats"])}))
