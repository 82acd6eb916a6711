"""What `nvte-ep bench ep` holds the figures against: budgets in microseconds on NVIDIA H200, and how far a
transport may be above what it stands on."""

from __future__ import annotations

from dataclasses import dataclass

from nvte_ep.commands.bench_ep_data import Data, Operation, Shape

DEVICE = "H200"
LARGE_BATCH = 1024  # tokens; overheads are bounded from here on
NCCL_EP_OVERHEAD = 1.03  # of transport nccl_ep over NCCL EP called directly
NCCL_OVERHEAD = 1.10  # of transport nccl over ncclSend and ncclRecv of the same bytes
BOUND_SMS, BOUND_SPEEDUP = 24, 2.0  # of peer over NCCL EP where both may use so many multiprocessors
HOST_CALL, HOST_LAUNCH, PYTHON_CALL = 3.0, 2.5, 20.0  # of a call in C, of each launch in it, of Python on top

_LAYER = Shape(4096, 7168, 8, 64, 128)
_MANY_EXPERTS = Shape(4096, 7168, 8, 256, 128)
_DECODE = Shape(128, 7168, 8, 64, 16)

# (shape, operation) -> microseconds by the number of ranks, each with a GPU of its own.
PEER: dict[tuple[Shape, str], dict[int, float]] = {
    (_LAYER, "prepare"): {1: 25, 2: 35},
    (_MANY_EXPERTS, "prepare"): {1: 35, 2: 45},
    (_LAYER, "dispatch bf16 -> decoded"): {1: 160, 2: 185},
    (_LAYER, "dispatch mxfp8 packed -> rows"): {1: 84, 2: 100},
    (_LAYER, "dispatch nvfp4 packed -> rows"): {1: 47, 2: 62},
    (_LAYER, "dispatch nvfp4 -> operand"): {1: 75, 2: 100},
    (_LAYER, "dispatch nvfp4 -> operand + columns"): {1: 190, 2: 210},
    (_LAYER, "dispatch mxfp8 -> operand"): {1: 110, 2: 140},
    (_LAYER, "combine bf16"): {1: 150, 2: 200},
    (_DECODE, "step nvfp4 dispatch"): {1: 16, 2: 25},
    (_DECODE, "step nvfp4 dispatch + combine"): {1: 28, 2: 45},
    (_MANY_EXPERTS, "dispatch bf16 -> decoded"): {8: 800},
    (_MANY_EXPERTS, "dispatch mxfp8 packed -> rows"): {8: 420},
    (_MANY_EXPERTS, "dispatch nvfp4 packed -> rows"): {8: 250},
    (_MANY_EXPERTS, "combine bf16"): {8: 800},
}


@dataclass(frozen=True)
class Goal:
    microseconds: float
    why: str


def goal(
    side: str,
    shape: Shape,
    operation: Operation,
    ranks: int,
    device_name: str,
    num_sms: int,
    direct: float | None,
    plain: float | None = None,
) -> Goal | None:
    """direct: the time of NCCL EP itself, the best of its settings; plain: of ncclSend and ncclRecv."""
    if side == "nccl" and plain is not None:
        return Goal(NCCL_OVERHEAD * plain, f"{NCCL_OVERHEAD:g}x ncclSend and ncclRecv")
    if side == "nccl_ep" and direct is not None and shape.tokens >= LARGE_BATCH:
        if operation.verb in ("dispatch", "combine") and operation.receive != "operand":
            return Goal(NCCL_EP_OVERHEAD * direct, f"{NCCL_EP_OVERHEAD:g}x NCCL EP")
        return None
    if side != "peer" or DEVICE not in device_name:
        return None
    if num_sms:
        if num_sms != BOUND_SMS or direct is None or operation.verb not in ("dispatch", "combine"):
            return None
        return Goal(direct / BOUND_SPEEDUP, f"{BOUND_SPEEDUP:g}x faster than NCCL EP on {num_sms} SMs")
    budget = PEER.get((shape, operation.key), {}).get(ranks)
    return None if budget is None else Goal(budget, "budget")


def memory_goal(data: Data) -> int:
    """Bytes that a group of peer and a handle may hold beside what dispatch hands out: a fifth of that, and
    twice the rows of all ranks; in BF16."""
    row = 2 * data.shape.hidden
    return data.capacity * row // 5 + 2 * data.ranks * data.shape.tokens * row


def host_goal(launches: int) -> float:
    """Microseconds of a call in C."""
    return HOST_CALL + HOST_LAUNCH * launches
