"""Bytes, memory and times of the exchanges of an MoE layer, for a model and a number of ranks beyond what
this machine has. Nothing is run: the numbers follow from uniform routing (every set of top-k experts equally
likely), from the row sizes of the library, and from the rates that you give. A floor is bytes over rate; an
expected time is what figures of `nvte-ep bench ep` make of it.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nvte_ep.commands._expect import Cluster
from nvte_ep.commands._figures import Figures, Step, default_figures, load
from nvte_ep.commands._report import UsageError, pairs, print_json, size, table
from nvte_ep.commands.bench_ep_data import sum_bytes
from nvte_ep.commands.bench_ep_rank import TRANSPORTS
from nvte_ep.commands.bench_machine import cuda_reason
from nvte_ep.communicator import Communicator, unique_id
from nvte_ep.errors import NvteEpError
from nvte_ep.formats import format_info, row_bytes
from nvte_ep.group import Group
from nvte_ep.operand import operand_layout


@dataclass(frozen=True)
class Model:
    """The MoE layers of a published configuration."""

    hidden: int
    experts: int
    top_k: int
    moe_layers: int


MODELS = {
    "deepseek-v3": Model(hidden=7168, experts=256, top_k=8, moe_layers=58),
    "kimi-k2": Model(hidden=7168, experts=384, top_k=8, moe_layers=60),
    "qwen3-235b-a22b": Model(hidden=4096, experts=128, top_k=8, moe_layers=94),
    "gpt-oss-120b": Model(hidden=2880, experts=128, top_k=4, moe_layers=36),
    "mixtral-8x7b": Model(hidden=4096, experts=8, top_k=2, moe_layers=32),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("the layer")
    shape.add_argument("--model", choices=sorted(MODELS), help="a published configuration; see --list-models")
    shape.add_argument("--list-models", action="store_true", help="print the configurations and exit")
    shape.add_argument("--hidden", type=int, metavar="H", help="elements of a token (7168)")
    shape.add_argument("--experts", type=int, metavar="E", help="of all ranks (256)")
    shape.add_argument("--top-k", type=int, metavar="K", help="experts of a token (8)")
    shape.add_argument("--layers", type=int, metavar="L", help="MoE layers of the model (1)")
    shape.add_argument("--tokens", type=int, default=4096, metavar="T", help="of a rank, per layer (4096)")
    cluster = parser.add_argument_group("the cluster")
    cluster.add_argument("--ranks", type=int, default=8, metavar="R", help="expert-parallel ranks (8)")
    cluster.add_argument(
        "--domain",
        type=int,
        metavar="D",
        help="ranks that share the fast link, such as an NVLink domain (all)",
    )
    cluster.add_argument(
        "--link-gbps",
        type=float,
        default=380.0,
        metavar="G",
        help="GB/s of that link, one direction of a rank (380)",
    )
    cluster.add_argument(
        "--network-gbps", type=float, default=50.0, metavar="G", help="GB/s of a rank beyond its domain (50)"
    )
    cluster.add_argument(
        "--memory-gbps",
        type=float,
        default=4200.0,
        metavar="G",
        help="GB/s of a rank's memory, read + write (4200)",
    )
    figures = parser.add_argument_group("expected times")
    figures.add_argument(
        "--figures",
        type=Path,
        metavar="FILE",
        help="JSON of nvte-ep bench ep to go by (those of one and of two H200 that come with the package)",
    )
    figures.add_argument("--no-figures", action="store_true", help="floors only")
    figures.add_argument(
        "--transport",
        default="peer",
        metavar="NAME",
        help="whose figures: peer, nccl_ep, nccl, threads (peer, the only one in the package's figures)",
    )
    how = parser.add_argument_group("how it runs")
    how.add_argument(
        "--formats",
        "--format",
        dest="formats",
        metavar="LIST",
        help="wire formats of dispatch and combine backward (all)",
    )
    how.add_argument(
        "--combine", default="bf16", metavar="FORMAT", help="of combine and dispatch backward (bf16)"
    )
    how.add_argument(
        "--alignment", type=int, default=128, metavar="A", help="slots of an expert are a multiple (128)"
    )
    how.add_argument(
        "--headroom",
        type=float,
        default=1.25,
        metavar="F",
        help="receive capacity over the expected slots (1.25)",
    )
    how.add_argument("--json", action="store_true", help="print JSON and nothing else")


# ---- what is planned -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Everything that the answer depends on."""

    model: str | None
    hidden: int
    layers: int
    cluster: Cluster
    link_gbps: float
    network_gbps: float
    memory_gbps: float
    formats: list[str]
    combine: str
    headroom: float
    figures: Figures | None
    why_no_figures: str


def _setting(arguments: argparse.Namespace) -> Setting:
    base = MODELS[arguments.model] if arguments.model else Model(7168, 256, 8, 1)

    def pick(name: str, otherwise: int) -> int:
        given = getattr(arguments, name)
        return otherwise if given is None else int(given)

    hidden, experts = pick("hidden", base.hidden), pick("experts", base.experts)
    top_k, layers = pick("top_k", base.top_k), pick("layers", base.moe_layers)
    ranks, domain = arguments.ranks, pick("domain", arguments.ranks)
    for name, value in {
        "hidden": hidden, "experts": experts, "top-k": top_k, "layers": layers, "tokens": arguments.tokens,
        "ranks": ranks, "domain": domain, "alignment": arguments.alignment,
        "link-gbps": arguments.link_gbps, "network-gbps": arguments.network_gbps,
        "memory-gbps": arguments.memory_gbps, "headroom": arguments.headroom,
    }.items():  # fmt: skip
        if not value > 0:
            raise UsageError(f"--{name}: expected more than 0, got {value}")
    if experts % ranks:
        raise UsageError(f"--experts: must divide evenly over {ranks} ranks, got {experts}")
    if ranks % min(domain, ranks):
        raise UsageError(f"--domain: must divide the {ranks} ranks, got {domain}")
    if top_k > experts:
        raise UsageError(f"--top-k: at most {experts}, the number of experts, got {top_k}")
    if arguments.alignment & (arguments.alignment - 1):
        raise UsageError(f"--alignment: a power of two, got {arguments.alignment}")
    transports = (*TRANSPORTS, "threads")
    if arguments.transport not in transports:
        raise UsageError(f"--transport: expected {', '.join(transports)}, got {arguments.transport}")
    known = format_info()
    formats = list(known) if arguments.formats is None else [f.strip() for f in arguments.formats.split(",")]
    sums = [name for name, info in known.items() if info.token_scale_bytes == 0]  # what can carry them
    for option, names, legal in (("formats", formats, list(known)), ("combine", [arguments.combine], sums)):
        for name in names:
            if name not in legal:
                raise UsageError(f"--{option}: expected {', '.join(legal)}, got {name}")
            multiple = max(known[name].hidden_multiple, known[name].operand_multiple)
            if hidden % multiple:
                raise UsageError(f"--hidden: {name} needs a multiple of {multiple}, got {hidden}")
    if arguments.transport in NO_MXFP8_SUMS and arguments.combine == "mxfp8":
        raise UsageError(f"--combine: transport {arguments.transport} carries no sums in mxfp8, only in bf16")
    cluster = Cluster(arguments.tokens, top_k, experts, ranks, min(domain, ranks), arguments.alignment)
    return Setting(
        arguments.model,
        hidden,
        layers,
        cluster,
        arguments.link_gbps,
        arguments.network_gbps,
        arguments.memory_gbps,
        formats,
        arguments.combine,
        arguments.headroom,
        *_figures(arguments, cluster),
    )


# The most ranks, and tokens of a rank, as creation of a group has them (peer_kernels.h, nccl_ep_api.h).
LIMITS = {"peer": (511, None), "nccl_ep": (64, 8192)}
NO_MXFP8_SUMS = ("nccl_ep", "nccl")


def _figures(arguments: argparse.Namespace, cluster: Cluster) -> tuple[Figures | None, str]:
    """And why there are none."""
    default = default_figures(cluster.ranks)
    if arguments.no_figures or (arguments.figures is None and not default.is_file()):
        return None, "give --figures (and --transport) for expected times"
    figures = load(arguments.figures or default, arguments.transport, cluster.ranks)
    most_ranks, most_tokens = LIMITS.get(arguments.transport, (None, None))
    if most_ranks is not None and cluster.ranks > most_ranks:
        return None, f"transport {arguments.transport} takes at most {most_ranks} ranks"
    if most_tokens is not None and cluster.tokens > most_tokens:
        return None, f"transport {arguments.transport} takes at most {most_tokens} tokens of a rank"
    if cluster.domain < cluster.ranks:
        what = "transport peer spans one domain only" if arguments.transport == "peer" else ""
        return None, what or "figures are measured in one domain and say nothing of a network"
    return figures, ""


@dataclass(frozen=True)
class Exchange:
    """One exchange of one rank: bytes in one direction (it sends as many as it receives), and the floor."""

    link_bytes: float
    network_bytes: float
    memory_bytes: float
    microseconds: float
    bound_by: str


def _exchange(setting: Setting, width: int, memory_bytes: float) -> Exchange:
    link, network = setting.cluster.link_rows * width, setting.cluster.network_rows * width
    times = {
        "link": link / setting.link_gbps,
        "network": network / setting.network_gbps,
        "memory": memory_bytes / setting.memory_gbps,
    }
    slowest = max(times, key=lambda name: times[name])
    return Exchange(link, network, memory_bytes, times[slowest] / 1000, slowest)  # bytes over GB/s are ns


@dataclass(frozen=True)
class FormatPlan:
    name: str
    row_bytes: int
    dispatch: Exchange
    combine: Exchange
    operand_bytes: int  # of the receive capacity, rowwise
    training_operand_bytes: int | None  # with the columnwise parts; None: the alignment rules them out
    layer_microseconds: float  # forward: dispatch and combine
    training_layer_microseconds: float  # and backward: the same again
    expected: dict[str, float | None]  # microseconds by the figures; None: they lack something
    step: dict[str, float | None]  # microseconds of a measured step, in place of expected ones


def _has_columns(setting: Setting, name: str) -> bool:
    """Whether operands of this format can have columnwise parts."""
    return setting.cluster.alignment >= format_info()[name].columnwise_alignment


def _plan_format(setting: Setting, name: str, capacity: int) -> FormatPlan:
    cluster, hidden = setting.cluster, setting.hidden
    width = row_bytes(name, hidden)
    combine_width = row_bytes(setting.combine, hidden)
    # The fewest bytes of memory: read the tokens, write the slots, padding too; the other way round without.
    dispatch = _exchange(setting, width, 2 * hidden * cluster.tokens + cluster.slots * width)
    combine = _exchange(setting, combine_width, sum_bytes(hidden, cluster.tokens, cluster.rows))
    rowwise = capacity * width
    training: int | None = rowwise
    if format_info()[name].operand_multiple:

        def operand_bytes(columnwise: bool) -> int:
            return operand_layout(
                name,
                hidden,
                capacity,
                cluster.local_experts,
                alignment=cluster.alignment,
                columnwise=columnwise,
            ).total_bytes

        rowwise = operand_bytes(columnwise=False)
        training = operand_bytes(columnwise=True) if _has_columns(setting, name) else None
    forward = dispatch.microseconds + combine.microseconds
    expected: dict[str, float | None] = {}
    times: dict[str, float | None] = {}
    step = _step(setting)
    if step is not None:
        times = {
            "prepare, dispatch": step.microseconds.get(f"{name} dispatch"),
            "prepare, dispatch, combine": step.microseconds.get(f"{name} dispatch + combine"),
        }
    elif setting.figures is not None:
        expected = _expected(setting, setting.figures, name, dispatch, combine)
    return FormatPlan(
        name, width, dispatch, combine, rowwise, training, forward, 2 * forward, expected, times
    )


def _step(setting: Setting) -> Step | None:
    """A measured step to show where the batch is too small for a multiple of the floor."""
    return None if setting.figures is None else setting.figures.step(setting.cluster.tokens)


def _expected(
    setting: Setting, figures: Figures, name: str, dispatch: Exchange, combine: Exchange
) -> dict[str, float | None]:
    """Times of the calls and of a layer, prepare included, by the figures."""
    cluster = setting.cluster
    width = row_bytes(name, setting.hidden)
    if name == "bf16":
        received = with_columns = "decoded"
        more = dispatch
    else:
        received, with_columns = "operand", "operand + columns"
        memory = 2 * setting.hidden * cluster.tokens + 2 * cluster.slots * width
        more = _exchange(setting, width, memory)
    rounding = " stochastic" if name == "nvfp4" else ""
    calls = {
        "prepare": figures.prepare_microseconds(cluster.tokens),
        "dispatch": figures.microseconds(f"dispatch {name} -> {received}", dispatch.microseconds),
        "training dispatch": figures.microseconds(f"dispatch {name} -> {with_columns}", more.microseconds),
        "combine": figures.microseconds(f"combine {setting.combine}", combine.microseconds),
        "combine_backward": figures.microseconds(
            f"combine_backward {name}{rounding} -> {with_columns}", more.microseconds
        ),
        "dispatch_backward": figures.microseconds(
            f"dispatch_backward {setting.combine}", combine.microseconds
        ),
    }

    if not _has_columns(setting, name):
        calls["training dispatch"] = calls["combine_backward"] = None

    def together(*names: str) -> float | None:
        found = [calls[name] for name in names]
        return None if None in found else sum(time for time in found if time is not None)

    return calls | {
        "layer": together("prepare", "dispatch", "combine"),
        "training layer": together(
            "prepare", "training dispatch", "combine", "combine_backward", "dispatch_backward"
        ),
    }


def _group_memory(setting: Setting, capacity: int) -> dict[str, Any] | None:
    """What the library says a group of transport peer would hold; "error" where it refuses such a group.
    None: there is no GPU here, and it asks one."""
    if cuda_reason() is not None:
        return None
    cluster = setting.cluster
    comm = Communicator("threads", cluster.ranks, 0, unique_id("threads"))
    try:
        memory = Group.memory(
            comm,
            transport="peer",
            device="cuda:0",
            num_experts=cluster.experts,
            hidden=setting.hidden,
            max_tokens_per_rank=cluster.tokens,
            max_top_k=cluster.top_k,
            recv_capacity=capacity,
        )
        return {"transport": "peer"} | asdict(memory)
    except NvteEpError as error:
        return {"transport": "peer", "error": str(error)}
    finally:
        comm.close()


# ---- the report ----------------------------------------------------------------------------------


def _document(setting: Setting) -> dict[str, Any]:
    cluster = setting.cluster
    capacity = cluster.capacity(setting.headroom)
    step = _step(setting)
    return {
        "command": "plan",
        "model": setting.model,
        "layer": {
            "hidden": setting.hidden,
            "experts": cluster.experts,
            "top_k": cluster.top_k,
            "layers": setting.layers,
            "tokens": cluster.tokens,
            "alignment": cluster.alignment,
            "combine": setting.combine,
        },
        "cluster": {
            "ranks": cluster.ranks,
            "domain": cluster.domain,
            "local_experts": cluster.local_experts,
            "link_gbps": setting.link_gbps,
            "network_gbps": setting.network_gbps,
            "memory_gbps": setting.memory_gbps,
        },
        "routing": {
            "assumption": "uniform",
            "ranks_per_token": cluster.ranks_per_token,
            "remote_ranks_per_token": cluster.ranks_per_token - cluster.hit,
            "slots": cluster.slots,
            "slots_worst": cluster.worst_capacity,
            "recv_capacity": capacity,
        },
        "figures": None
        if setting.figures is None
        else {
            "source": setting.figures.source,
            "device": setting.figures.device,
            "ranks": setting.figures.ranks,
            "transport": setting.figures.transport,
            "tokens": setting.figures.tokens,
            "rules": {name: asdict(rule) for name, rule in setting.figures.rules.items()},
            "prepare_microseconds": setting.figures.prepare,
        },
        "step": None if step is None else asdict(step.shape) | {"microseconds": step.microseconds},
        "group_memory": _group_memory(setting, capacity),
        "formats": [asdict(_plan_format(setting, name, capacity)) for name in setting.formats],
    }


def _microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _duration(microseconds: float) -> str:
    if microseconds < 999.5e3:
        return f"{microseconds / 1e3:.3g} ms"
    return f"{microseconds / 1e6:.2f} s"


def _print_report(setting: Setting, document: dict[str, Any]) -> None:
    cluster, routing, memory = setting.cluster, document["routing"], document["group_memory"]
    beyond = "" if cluster.domain == cluster.ranks else f", {cluster.domain} to a domain"
    print(f"An MoE layer{f' of {setting.model}' if setting.model else ''} over {cluster.ranks} ranks{beyond}")
    facts = [
        (
            "layer",
            f"{cluster.tokens} tokens a rank, H = {setting.hidden}, top {cluster.top_k} of {cluster.experts} "
            f"experts, {cluster.local_experts} on each rank",
        ),
        (
            "routing",
            f"uniform: a token has experts on {routing['ranks_per_token']:.2f} ranks, "
            f"{routing['remote_ranks_per_token']:.2f} of them remote",
        ),
        (
            "slots",
            f"{routing['slots']:.0f} a rank with padding to {cluster.alignment}; capacity "
            f"{routing['recv_capacity']} ({setting.headroom:g} times that, at most the worst case "
            f"{routing['slots_worst']})",
        ),
        (
            "rates",
            f"inputs, not measurements: link {setting.link_gbps:g} GB/s "
            + (
                f"in a domain, network {setting.network_gbps:g} GB/s"
                if beyond
                else "between all ranks (see --domain)"
            )
            + f", memory {setting.memory_gbps:g} GB/s",
        ),
    ]
    print("\n".join(pairs(facts)))

    plans: list[dict[str, Any]] = document["formats"]

    def row(name: str, value: Any) -> tuple[str, ...]:
        return (name, *(value(plan) for plan in plans))

    rows: list[tuple[str, ...]] = [row("", lambda plan: plan["name"]), ("bytes of a rank, one direction",)]
    rows.append(row("a token on the wire", lambda plan: str(plan["row_bytes"])))
    rows.append(row("dispatch over the link", lambda plan: size(plan["dispatch"]["link_bytes"])))
    if beyond:
        rows.append(row("dispatch over the network", lambda plan: size(plan["dispatch"]["network_bytes"])))
    rows.append(
        row(f"combine ({setting.combine}) over the link", lambda plan: size(plan["combine"]["link_bytes"]))
    )
    if beyond:
        rows.append(row("combine over the network", lambda plan: size(plan["combine"]["network_bytes"])))
    rows.append(("memory of a rank",))
    rows.append(row("what dispatch delivers", lambda plan: size(plan["operand_bytes"])))
    rows.append(row("  with columnwise parts", lambda plan: _size_or_none(plan["training_operand_bytes"])))
    rows.append(("floor, microseconds",))
    rows.append(row("dispatch", lambda plan: _microseconds(plan["dispatch"]["microseconds"])))
    rows.append(row("  bound by", lambda plan: plan["dispatch"]["bound_by"]))
    rows.append(row("combine", lambda plan: _microseconds(plan["combine"]["microseconds"])))
    rows.append(row("  bound by", lambda plan: plan["combine"]["bound_by"]))
    rows.append(row("layer, forward", lambda plan: _microseconds(plan["layer_microseconds"])))
    rows.append(
        row("layer, forward + backward", lambda plan: _microseconds(plan["training_layer_microseconds"]))
    )
    if setting.layers > 1:
        rows.append((f"floor, {setting.layers} layers",))
        rows.append(row("forward", lambda plan: _duration(setting.layers * plan["layer_microseconds"])))
        rows.append(
            row(
                "forward + backward",
                lambda plan: _duration(setting.layers * plan["training_layer_microseconds"]),
            )
        )
    if document["step"] is not None:
        rows.append(("time measured of a small step (its shape: see figures)",))
        rows += [
            row(name, lambda plan, name=name: _expected_text(plan["step"][name])) for name in plans[0]["step"]
        ]
    elif setting.figures is not None:
        rows.append(("time expected by the figures",))
        rows += [
            row(name, lambda plan, name=name: _expected_text(plan["expected"][name]))
            for name in plans[0]["expected"]
        ]
        if setting.layers > 1:
            for name in ("layer", "training layer"):
                rows.append(
                    row(
                        f"{setting.layers} x {name}",
                        lambda plan, name=name: _expected_text(plan["expected"][name], setting.layers),
                    )
                )
    print("\n" + "\n".join(table(rows)) + "\n")
    if memory is None:
        held = "memory of a group: unknown here: needs a GPU"
    elif "error" in memory:
        held = f"memory of a group cannot be told here: {memory['error']}"
    else:
        held = (
            f"group {size(memory['group_bytes'])}, each handle {size(memory['handle_bytes'])} "
            "(nvte_ep_group_memory of transport peer)"
        )
    notes = [
        ("library", held),
        (
            "floors",
            "the slowest of link, network and memory at the rates above, all at once; no latency, no skew "
            "between ranks. Real routing is uneven: the fullest rank decides. Bytes are the fewest: "
            "transport nccl with a fixed capacity sends every token to every rank",
        ),
    ]
    if setting.figures is None:
        notes.append(("no figures", setting.why_no_figures))
    else:
        notes.append(("figures", _figures_note(setting.figures, cluster)))
    print("\n".join(pairs(notes)))


def _figures_note(figures: Figures, cluster: Cluster) -> str:
    """Where times come from, and how far they go."""
    source = "the package" if figures.source == str(default_figures(cluster.ranks)) else figures.source
    ranks = f"{figures.ranks} rank{'s' if figures.ranks > 1 else ''}"
    note = f"of {source}: {figures.transport} with {ranks} on {figures.device}. "
    step = figures.step(cluster.tokens)
    if step is not None:
        shape = step.shape
        return note + (
            f"Measured was a step of {shape.tokens} tokens a rank, H = {shape.hidden}, top {shape.top_k} of "
            f"{shape.experts} experts, alignment {shape.alignment}, sums in BF16, as one CUDA graph. Most of "
            "the time of so few tokens goes to launches and meetings, which follow no floor: other shapes "
            "have no expected time"
        )
    if figures.tokens is not None:
        least, most = figures.tokens
        note += (
            f"Calls were measured with {least} to {most} tokens a rank"
            + ("" if least <= cluster.tokens <= most else f" ({cluster.tokens} are extrapolated)")
            + ": a fixed part and a multiple of the floor for each call (where it was measured in one size "
            "only, the fixed part of a call like it). "
        )
    if figures.prepare:
        least, most = min(figures.prepare), max(figures.prepare)
        note += (
            f"prepare lies between the nearest of {least} to {most} tokens"
            + ("" if least <= cluster.tokens <= most else ", beyond them the nearest")
            + ". "
        )
    return note + (
        "A layer: prepare, dispatch, combine; training: dispatch with columnwise parts, and both backwards. "
        "Times of mxfp8 and nvfp4 include making the operands of the expert GEMM (in training the columns "
        "too), those of bf16 no quantising for it"
    )


def _size_or_none(nbytes: int | None) -> str:
    return "-" if nbytes is None else size(nbytes)


def _expected_text(microseconds: float | None, layers: int = 1) -> str:
    if microseconds is None:
        return "-"
    return f"{_microseconds(microseconds)} us" if layers == 1 else _duration(layers * microseconds)


def run(arguments: argparse.Namespace) -> int:
    if arguments.list_models:
        if arguments.json:
            print_json({"command": "plan", "models": {name: asdict(model) for name, model in MODELS.items()}})
            return 0
        rows: list[tuple[str, ...]] = [("", "H", "experts", "top-k", "MoE layers")]
        for name, model in MODELS.items():
            rows.append(
                (name, *(str(n) for n in (model.hidden, model.experts, model.top_k, model.moe_layers)))
            )
        print("\n".join(table(rows, indent="")))
        return 0
    setting = _setting(arguments)
    document = _document(setting)
    if arguments.json:
        print_json(document)
    else:
        _print_report(setting, document)
    return 0
