"""Says what works on this machine, what does not, and the remedy: the library, its formats, backends and
transports, the Python packages around it, driver, GPUs, toolkit and NCCL; then a short self test. Exits with
0 when the self test passes: a machine without a GPU is no failure.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import nvte_ep
from nvte_ep.commands import _probe, _warm
from nvte_ep.commands._checks import Checks, Sending, pack, unpack
from nvte_ep.commands._numerics import Error
from nvte_ep.commands._ranks import on_ranks
from nvte_ep.commands._report import UsageError, pairs, print_json, size
from nvte_ep.commands.bench_machine import cuda_reason
from nvte_ep.errors import NvteEpError

OK, ABSENT, PROBLEM = "ok", "absent", "problem"
MARKS = {OK: "ok", ABSENT: "--", PROBLEM: "!!"}

MIN_DRIVER_CUDA = (13, 0)  # what the GPU side of a wheel is built with
MIN_NCCL_WINDOWS = (2, 30, 7)  # symmetric windows, and NCCL EP
MIN_NCCL_EP = MIN_NCCL_WINDOWS

# Distributions by what they are good for here, and the remedy where one is missing.
PACKAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "numpy": (("numpy",), "pip install numpy"),
    "ml_dtypes": (("ml_dtypes",), "BF16 comes to NumPy as uint16 without it: pip install ml_dtypes"),
    "torch": (("torch",), ""),
    "jax": (("jax",), ""),
    "cupy": (("cupy", "cupy-cuda12x", "cupy-cuda13x"), ""),
    "cuda-bindings": (
        ("cuda-bindings",),
        "device arrays that this package makes itself need it: pip install 'cuda-python~=13.0' (or ~=12.0)",
    ),
    "cuda-pathfinder": (
        ("cuda-pathfinder",),
        "finds the NCCL of the wheels that frameworks use: pip install cuda-pathfinder",
    ),
    "transformer-engine": (("transformer-engine", "transformer_engine"), ""),
}
NCCL_WHEELS = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
NCCL_EP_PACKAGES = ("nccl-extensions",)


@dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy` is empty where there is nothing to do."""

    name: str
    state: str
    detail: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument(
        "--warm",
        metavar="T,H,K,E",
        action="append",
        default=[],
        help="let NCCL EP compile its kernels for T tokens a rank, hidden H, top_k K and E experts now; "
        "a fifth number is the alignment (128); may be given several times",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="of --warm: 1 or as many as you run (1)")
    parser.add_argument("--formats", metavar="LIST", help="of --warm: what travels, e.g. bf16,nvfp4 (nvfp4)")


# ---- the library ---------------------------------------------------------------------------------

REBUILD = (
    "only for GPUs: build where nvcc is on PATH (or CUDACXX names it; the scripts of ci/ want a GPU as "
    "well), or with -DNVTE_EP_CUDA=ON, which says what is missing; "
    "pip: SKBUILD_CMAKE_DEFINE=NVTE_EP_CUDA=ON pip install ."
)


def examine_library() -> list[Finding]:
    remedy = "pip install . in the source tree, or build the library and set NVTE_EP_LIBRARY to libnvte_ep.so"
    try:
        path = nvte_ep.library_path()
        version, abi = nvte_ep.version(), nvte_ep.abi_version()
        info = nvte_ep.build_info()
    except NvteEpError as error:
        return [Finding("library", PROBLEM, str(error), remedy)]
    found = [Finding("library", OK, f"{path}, version {version}, ABI {abi}")]
    for kind, one in (("formats", "format"), ("backends", "backend"), ("transports", "transport")):
        for entry in info.get(kind, []):
            name = f"{one} {entry['name']}"
            if entry.get("available"):
                found.append(Finding(name, OK, "available"))
            else:
                reason = entry.get("reason", "no reason given")
                built_without = name == "backend cuda" and reason.startswith("this build")
                found.append(Finding(name, ABSENT, reason, REBUILD if built_without else ""))
    return found


# ---- Python packages -----------------------------------------------------------------------------


def installed(*names: str) -> tuple[str, str] | None:
    """Name and version of the first of these distributions that is installed. Imports nothing."""
    for name in names:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def examine_packages() -> list[Finding]:
    found = [Finding("python", OK, f"{platform.python_version()}, {sys.executable}")]
    for label, (names, remedy) in PACKAGES.items():
        here = installed(*names)
        if here is None:
            found.append(Finding(label, ABSENT, "not installed", remedy))
        else:
            found.append(Finding(label, OK, here[1] if here[0] == label else f"{here[1]} ({here[0]})"))
    return found


# ---- driver, GPUs, toolkit -----------------------------------------------------------------------


def probe(what: str) -> dict[str, Any]:
    """What _probe finds, in a process of its own."""
    import json

    code = "import sys; from nvte_ep.commands import _probe; _probe.main()"
    root = str(Path(nvte_ep.__file__).resolve().parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, what], env=environment, capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        return {"error": "it did not answer within 60 s"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        why = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"error": f"the probe ended without an answer: {why[0]}"}
    return answer


def examine_driver(answer: dict[str, Any]) -> list[Finding]:
    kernel = _kernel_driver()
    name = "driver"
    if "cuda_version" not in answer:
        detail = answer.get("error", "no version")
        if kernel is not None:
            remedy = (
                f"the kernel has driver {kernel}, but libcuda.so.1 is not found: in a container use "
                "the NVIDIA runtime"
            )
            return [Finding(name, PROBLEM, detail, remedy)]
        return [Finding(name, ABSENT, detail, "only for GPUs: install the NVIDIA driver, 580 or newer")]
    cuda = answer["cuda_version"]
    text = f"CUDA {cuda}" + (f", driver {kernel}" if kernel else "") + f", {answer['path']}"
    old = _numbers(cuda) < MIN_DRIVER_CUDA
    remedy = "GPU code of this project needs CUDA 13.0: install driver 580 or newer" if old else ""
    found = [Finding(name, PROBLEM if old else OK, text, remedy)]
    if "error" in answer:
        found.append(Finding("GPUs", PROBLEM, answer["error"], "see nvidia-smi and CUDA_VISIBLE_DEVICES"))
    elif not answer["devices"]:
        found.append(Finding("GPUs", ABSENT, "none", "see nvidia-smi and CUDA_VISIBLE_DEVICES"))
    for index, device in enumerate(answer.get("devices", [])):
        found.append(_describe_gpu(index, device))
    return found


def _describe_gpu(index: int, device: dict[str, Any]) -> Finding:
    capability = device["compute_capability"]
    text = f"{device['name']}, sm_{capability.replace('.', '')}, {size(device['memory_bytes'])}"
    if _numbers(capability) < (9, 0):
        return Finding(f"GPU {index}", ABSENT, text, "the kernels are made for sm_90 (Hopper) and newer")
    return Finding(f"GPU {index}", OK, text)


def _kernel_driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", text)
    return match[1] if match else None


def examine_toolkit() -> list[Finding]:
    for where, path in _compilers():
        if path.is_file() and os.access(path, os.X_OK):
            try:
                done = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=30)
            except (OSError, subprocess.TimeoutExpired) as error:
                return [Finding("nvcc", PROBLEM, f"{path} ({where}): {error}")]
            match = re.search(r"release (\d+\.\d+)", done.stdout)
            if match is None:
                return [Finding("nvcc", PROBLEM, f"{path} ({where}) does not tell its release")]
            return [Finding("nvcc", OK, f"{match[1]}, {path} ({where})")]
    remedy = (
        "only to build the GPU side and for NCCL EP at run time: install the CUDA toolkit 13.0, or its "
        "wheels with pip install 'nvidia-cuda-nvcc==13.0.*'"
    )
    return [
        Finding(
            "nvcc", ABSENT, "not in CUDACXX, CUDA_HOME, CUDA_PATH, PATH, the wheels, /usr/local/cuda", remedy
        )
    ]


def _compilers() -> Iterable[tuple[str, Path]]:
    if os.environ.get("CUDACXX"):
        yield "CUDACXX", Path(os.environ["CUDACXX"])
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield variable, Path(os.environ[variable]) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    if on_path is not None:
        yield "PATH", Path(on_path)
    for path in wheel_files("nvidia-cuda-nvcc", "nvcc"):
        yield "wheel nvidia-cuda-nvcc", path
    yield "/usr/local/cuda", Path("/usr/local/cuda/bin/nvcc")


# ---- NCCL ----------------------------------------------------------------------------------------


def wheel_files(distribution: str, name: str) -> list[Path]:
    """Files of an installed distribution that are called so."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())).resolve() for file in files if file.name == name]


def nccl_pins() -> list[str]:
    """Who asks for which NCCL wheel: "torch 2.13.0 requires nvidia-nccl-cu13==2.28.9"."""
    pins = set()
    for distribution in importlib.metadata.distributions():
        for requirement in distribution.requires or []:
            package, _, marker = requirement.partition(";")
            if re.match(r"nvidia[-_]nccl[-_]cu\d+", package.strip()) and "extra" not in marker:
                name = distribution.metadata["Name"]
                pins.add(f"{name} {distribution.version} requires {package.strip()}")
    return sorted(pins)


def examine_nccl(answer: dict[str, Any]) -> list[Finding]:
    found = []
    pins = nccl_pins()
    loaded = _probe.loaded_file("libnccl.so")
    if loaded is not None:
        found.append(Finding("NCCL loaded", OK, loaded))
    wheels = [here for here in (installed(name) for name in NCCL_WHEELS) if here is not None]
    if "error" in answer:
        remedy = (
            "only for several processes on GPUs: pip install nvidia-nccl-cu13 (or nvidia-nccl-cu12, as the "
            "driver is; never both)"
        )
        if wheels:
            remedy = f"{wheels[0][0]} is installed but not found from here: pip install cuda-pathfinder"
        found.append(Finding("NCCL", ABSENT, answer["error"], remedy))
    else:
        version = answer.get("version", "unknown version")
        remedy = ""
        if _numbers(version) < MIN_NCCL_WINDOWS:
            least = ".".join(map(str, MIN_NCCL_WINDOWS))
            wheel = wheels[0][0] if wheels else "nvidia-nccl-cu13"
            remedy = f"symmetric windows and NCCL EP need {least} or newer: pip install -U {wheel}"
            if pins:
                remedy += ", which breaks the pin below"
        found.append(Finding("NCCL", OK, f"{version}, {answer['path']} ({_origin(answer['path'])})", remedy))
    for name, version in wheels:
        found.append(Finding(name, OK, version))
    if len(wheels) > 1:
        found.append(
            Finding(
                "NCCL wheels",
                PROBLEM,
                "both are installed, and they share their files",
                "pip uninstall both, then install the one that fits the driver",
            )
        )
    found += [Finding("pinned by", OK, pin) for pin in pins]
    found += examine_nccl_ep()
    return found


def examine_nccl_ep() -> list[Finding]:
    """The wheel, and where its kernels are kept. Whether it can be used, and what is missing if not, is among
    the transports of the library."""
    extensions = installed(*NCCL_EP_PACKAGES)
    configured = os.environ.get("NVTE_EP_NCCL_EP_LIBRARY")
    if configured:
        found = [Finding("NCCL EP", OK, f"{configured} (NVTE_EP_NCCL_EP_LIBRARY)")]
    elif extensions is not None:
        found = [Finding("NCCL EP", OK, f"{extensions[0]} {extensions[1]}")]
    else:
        remedy = "only for the transport nccl_ep: pip install nccl-extensions"
        return [Finding("NCCL EP", ABSENT, "no nccl-extensions", remedy)]
    folder = _warm.cache_folder()
    kernels = _warm.count_kernels(folder)
    remedy = (
        "" if kernels else "it compiles at first use, about 20 s: nvte-ep doctor --warm T,H,K,E does it now"
    )
    return [*found, Finding("NCCL EP kernels", OK, f"{kernels} compiled, in {folder}", remedy)]


def check_options(arguments: argparse.Namespace) -> None:
    """Options of --warm: refused without it too, lest they be passed over."""
    if arguments.ranks is not None and arguments.ranks < 1:
        raise UsageError(f"--ranks: expected 1 or more (of --warm), got {arguments.ranks}")
    if arguments.formats is not None:
        known = nvte_ep.format_info()
        for name in arguments.formats.split(","):
            if name not in known:
                raise UsageError(f"--formats: expected some of {', '.join(known)} (of --warm), got {name!r}")
    if not arguments.warm:
        for option in ("ranks", "formats"):
            if getattr(arguments, option) is not None:
                raise UsageError(f"--{option}: only together with --warm")


def warm_up(arguments: argparse.Namespace) -> list[Finding]:
    """NCCL EP's kernels for the shapes of --warm."""
    ranks = 1 if arguments.ranks is None else arguments.ranks
    formats = tuple((arguments.formats or "nvfp4").split(","))
    shapes = {text: _warm.Wanted.parse(text, formats) for text in arguments.warm}
    reason = cuda_reason()
    if reason is not None:
        raise UsageError(f"--warm: needs a GPU: {reason}")
    found = []
    for text, wanted in shapes.items():
        code, seconds = _warm.warm(wanted, ranks)
        kernels = _warm.count_kernels(_warm.cache_folder())
        detail = f"{ranks} ranks, {seconds:.0f} s, {kernels} kernels in {_warm.cache_folder()}"
        if code == 0:
            found.append(Finding(f"warm {text}", OK, detail))
        else:
            found.append(Finding(f"warm {text}", PROBLEM, f"{detail}; a rank ended with {code}, see above"))
    return found


def _origin(path: str) -> str:
    real = Path(path).resolve()
    for name in NCCL_WHEELS:
        if real in wheel_files(name, "libnccl.so.2"):
            return f"wheel {name}"
    for variable in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        for part in re.split("[: ]", os.environ.get(variable, "")):
            if part and (
                Path(part).resolve() in (real, real.parent) or str(Path(part)) == str(Path(path).parent)
            ):
                return variable
    conda = os.environ.get("CONDA_PREFIX")
    if conda and real.is_relative_to(Path(conda).resolve()):
        return "conda"
    return "system"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


# ---- self test -----------------------------------------------------------------------------------


def self_test() -> list[Finding]:
    tests: dict[str, Callable[[], str]] = {
        "codecs": _test_codecs,
        "2 ranks": _test_exchange,
    }
    found = []
    for name, test in tests.items():
        try:
            found.append(Finding(name, OK, test()))
        except Exception as error:  # whatever it is, it is what doctor is here to tell
            found.append(Finding(name, PROBLEM, f"{type(error).__name__}: {error}", "please report this"))
    return found


def _test_codecs() -> str:
    tokens = np.random.default_rng(0).standard_normal((64, 512), np.float32)
    least = {"bf16": 48.0, "mxfp8": 28.0, "nvfp4": 18.0}  # dB, for Gaussian tokens
    texts = []
    for format in nvte_ep.format_info():
        values = unpack(format, pack(Sending(format), tokens), tokens.shape[1], "float32")
        decibels = Error.between(tokens, values).sqnr_db
        if not decibels >= least.get(format, 0.0):
            raise AssertionError(f"{format}: expected at least {least[format]} dB, got {decibels:.1f}")
        texts.append(f"{format} {decibels:.1f} dB")
    return "pack, unpack: " + ", ".join(texts)


def _test_exchange() -> str:
    """Tokens to two experts of two and back: every token comes back twice."""
    checks = Checks("self test")
    tokens = np.random.default_rng(1).standard_normal((2, 32, 256), np.float32)
    topk = np.tile(np.array([0, 1], np.int64), (32, 1))

    def rank(index: int, comm: nvte_ep.Communicator) -> list[np.ndarray[Any, Any]]:
        results = []
        with nvte_ep.Group(
            comm, num_experts=2, hidden=256, max_tokens_per_rank=32, timeout_ns=30 * 10**9
        ) as group:
            for format in nvte_ep.format_info():
                with group.handle(top_k=2, alignment=16, dispatch=format) as handle:
                    handle.prepare(topk)
                    received = handle.dispatch(tokens[index], receive="decoded", dtype="float32")
                    results.append(np.asarray(handle.combine(received.data)).copy())
        return results

    per_rank = on_ranks(2, rank)
    for index, results in enumerate(per_rank):
        for format, got in zip(nvte_ep.format_info(), results, strict=True):
            exact = unpack(format, pack(Sending(format), tokens[index]), 256, "float32")
            checks.equal(f"{format}, rank {index}", got, 0 + exact + exact)  # a sum from +0 has no -0
    if checks.failed:
        raise AssertionError("; ".join(checks.failed))
    return f"dispatch, combine: {', '.join(nvte_ep.format_info())}, every byte as the codecs make it"


# ---- the report ----------------------------------------------------------------------------------


def examine() -> dict[str, list[Finding]]:
    library = examine_library()
    usable = library[0].state == OK
    return {
        "library": library,
        "python": examine_packages(),
        "gpu": [*examine_driver(probe("driver")), *examine_toolkit()],
        "nccl": examine_nccl(probe("nccl")),
        "self test": self_test()
        if usable
        else [Finding("self test", PROBLEM, "there is no library to test")],
    }


def run(arguments: argparse.Namespace) -> int:
    check_options(arguments)
    if arguments.warm:
        sections = {"warm-up": warm_up(arguments)}
        return report(sections, all(f.state == OK for f in sections["warm-up"]), arguments)
    sections = examine()
    passed = all(finding.state == OK for finding in sections["self test"])
    code = report(sections, passed, arguments)
    if not arguments.json:
        print("\n" + ("The self test passed." if passed else "The self test FAILED."))
    return code


def report(sections: dict[str, list[Finding]], passed: bool, arguments: argparse.Namespace) -> int:
    if arguments.json:
        body = {name: [asdict(finding) for finding in findings] for name, findings in sections.items()}
        print_json({"command": "doctor", "ok": passed, "sections": body})
        return 0 if passed else 1
    for name, findings in sections.items():
        print(name)
        for finding in findings:
            label = f"{MARKS[finding.state]}  {finding.name}"
            print("\n".join(pairs([(label, finding.detail)], margin=26)))
            if finding.remedy:
                print("\n".join(pairs([("", f"-> {finding.remedy}")], margin=26)))
    return 0 if passed else 1
