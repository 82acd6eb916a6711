"""Microseconds per operation by CUDA events over graph replays; kernels by the profiler."""
import sys, os, json, threading
import numpy as np, torch, nvte_ep

def topk(T, K, E, seed):
    g = torch.Generator(device="cpu").manual_seed(seed)
    return torch.rand((T, E), generator=g).argsort(dim=1)[:, :K].contiguous()

def measure(run, stream, reps=8, replays=12):
    """run enqueues once on stream."""
    with torch.cuda.stream(stream):
        for _ in range(3): run()
        stream.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=stream):
            for _ in range(reps): run()
        times = []
        for _ in range(replays):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(stream); g.replay(); b.record(stream); stream.synchronize()
            times.append(a.elapsed_time(b) * 1e3 / reps)
    times.sort()
    return times[len(times) // 2], times[0]

def kernels(run, stream, n=5):
    from torch.profiler import profile, ProfilerActivity
    with torch.cuda.stream(stream):
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(n): run()
            stream.synchronize()
    out = {}
    for e in p.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            name = e.name.replace("nvte_ep::", "").replace("(anonymous namespace)::", "").split("(")[0][:60]
            out.setdefault(name, []).append(e.device_time if hasattr(e, "device_time") else e.cuda_time)
    return {k: round(sorted(v)[len(v) // 2], 1) for k, v in out.items()}

def main(T, E, alignment, names, profile=True, H=7168, K=8):
    dev = "cuda:0"; torch.cuda.set_device(0)
    comm = nvte_ep.Communicator("threads", 1, 0, nvte_ep.unique_id("threads"))
    idx = topk(T, K, E, 1)
    counts = torch.bincount(idx.flatten(), minlength=E)
    cap = int(((counts + alignment - 1) // alignment * alignment).sum())
    stream = torch.cuda.Stream()
    group = nvte_ep.Group(comm, transport="peer", num_experts=E, hidden=H, max_tokens_per_rank=T, recv_capacity=cap, timeout_ns=5_000_000_000, device=dev)
    handles = {f: group.handle(top_k=K, alignment=alignment, dispatch=f, combine_backward=f) for f in ("bf16", "mxfp8", "nvfp4")}
    x = torch.randn((T, H), device=dev, dtype=torch.bfloat16)
    w = torch.rand((T, K), device=dev)
    idx = idx.to(dev)
    counts_out = {n: torch.zeros(E, dtype=torch.int64, device=dev) for n in ("tokens_routed", "tokens_per_expert", "rows_per_expert")}
    counts_out |= {n: torch.zeros(E + 1, dtype=torch.int64, device=dev) for n in ("row_offsets", "scale_row_offsets")}
    counts_out |= {n: torch.zeros(1, dtype=torch.int64, device=dev) for n in ("total_rows", "dropped_rows")}
    routing = nvte_ep.Routing(**counts_out)
    torch.cuda.synchronize()
    use = dict(stream=stream)
    for h in handles.values(): h.prepare(idx, out=routing, **use)
    slots = torch.randn((cap, H), device=dev, dtype=torch.bfloat16)
    result = torch.zeros((T, H), device=dev, dtype=torch.bfloat16)
    recv_w = torch.zeros(cap, device=dev)
    def case(name, run):
        if names and not any(n in name for n in names): return
        try:
            med, best = measure(run, stream)
            print(f"T={T} E={E} al={alignment} {name:34s} {med:8.1f} us (best {best:.1f})", flush=True)
            if profile: print("      ", kernels(run, stream), flush=True)
        except Exception as e:
            print(f"T={T} E={E} {name}: {type(e).__name__}: {str(e)[:300]}", flush=True)
    case("prepare", lambda: handles["nvfp4"].prepare(idx, out=routing, **use))
    packed, rows, ops, opc = {}, {}, {}, {}
    for f, h in handles.items():
        rb = nvte_ep.row_bytes(f, H)
        packed[f] = x if f == "bf16" else getattr(nvte_ep.codecs, f + "_pack")(x)
        rows[f] = torch.zeros((cap, rb), device=dev, dtype=torch.uint8)
        torch.cuda.synchronize()
        if f == "bf16":
            out = torch.zeros((cap, H), device=dev, dtype=torch.bfloat16)
            case(f"{f} rows->rows", lambda: h.dispatch(x, receive="decoded", dtype="bfloat16", out=out, **use))
            case(f"{f} rows+weights", lambda: h.dispatch(x, w, receive="decoded", dtype="bfloat16", out=out, recv_weights=recv_w, **use))
        else:
            case(f"{f} rows->rows", lambda: h.dispatch(packed[f], receive="rows", out=rows[f], **use))
            case(f"{f} pack->rows", lambda: h.dispatch(x, receive="rows", out=rows[f], **use))
            op = nvte_ep.Operand(f, H, cap, E, alignment=alignment, buffer=torch.zeros(nvte_ep.operand_layout(f, H, cap, E, alignment=alignment).total_bytes, device=dev, dtype=torch.uint8))
            case(f"{f} WHOLE bf16->operand rowwise", lambda: h.dispatch(x, receive="operand", out=op, **use))
            case(f"{f} packed->operand rowwise", lambda: h.dispatch(packed[f], receive="operand", out=op, **use))
            if alignment >= 32:
                opc = nvte_ep.Operand(f, H, cap, E, alignment=alignment, columnwise=True, buffer=torch.zeros(nvte_ep.operand_layout(f, H, cap, E, alignment=alignment, columnwise=True).total_bytes, device=dev, dtype=torch.uint8))
                case(f"{f} WHOLE bf16->operand columns", lambda: h.dispatch(x, receive="operand", out=opc, **use))
            case(f"{f} WHOLE bf16->decoded", lambda: h.dispatch(x, receive="decoded", dtype="bfloat16", out=slots, **use))
    h = handles["nvfp4"]
    case("combine bf16", lambda: h.combine(slots, out=result, **use))
    if T <= 512:
        op = nvte_ep.Operand("nvfp4", H, cap, E, alignment=alignment, buffer=torch.zeros(nvte_ep.operand_layout("nvfp4", H, cap, E, alignment=alignment).total_bytes, device=dev, dtype=torch.uint8))
        def all_of(): h.prepare(idx, out=routing, **use); h.dispatch(x, receive="operand", out=op, **use)
        case("STEP prepare+dispatch operand", all_of)
        def rows_of(): h.prepare(idx, out=routing, **use); h.dispatch(x, receive="rows", out=rows["nvfp4"], **use)
        case("STEP prepare+dispatch rows", rows_of)
        def with_combine(): all_of(); h.combine(slots, out=result, **use)
        case("STEP prepare+dispatch+combine", with_combine)
    if group.poll_error(): print("finding!", group.poll_error())
    torch.cuda.synchronize()
    group.close()

if __name__ == "__main__":
    T, E, al = (int(v) for v in sys.argv[1:4])
    names = [a for a in sys.argv[4:] if not a.startswith("--")]
    main(T, E, al, names, profile="--no-kernels" not in sys.argv)
