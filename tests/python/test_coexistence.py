# SPDX-License-Identifier: Apache-2.0
"""Beside a library that exports TransformerEngine's names under the same prefix, loaded first and for
everybody."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

TRANSFORMER_ENGINE = (
    "nvte_ep_initialize",
    "nvte_ep_shutdown",
    "nvte_ep_handle_mem_size",
    "nvte_ep_prepare",
    "nvte_ep_dispatch",
    "nvte_ep_combine",
    "nvte_ep_dispatch_bwd",
    "nvte_ep_combine_bwd",
)


def test_transformer_engine_first(run_clean: Callable[..., str], tmp_path: Path) -> None:
    source = tmp_path / "engine.c"
    functions = "".join(f"void {name}(void) {{ abort(); }}\n" for name in TRANSFORMER_ENGINE)
    source.write_text("#include <stdlib.h>\n" + functions)
    engine = tmp_path / "libengine.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(engine)], check=True)
    code = f"""
        import ctypes
        engine = ctypes.CDLL({str(engine)!r}, mode=ctypes.RTLD_GLOBAL)
        names = {TRANSFORMER_ENGINE!r}
        everybody = ctypes.CDLL(None)
        addresses = {{name: ctypes.cast(getattr(everybody, name), ctypes.c_void_p).value for name in names}}

        import threading
        import numpy as np
        import nvte_ep

        comms = nvte_ep.Communicator.threads(2)
        results = [None, None]

        def rank(number):
            with nvte_ep.Group(
                comms[number], num_experts=2, hidden=32, max_tokens_per_rank=4, recv_capacity=8
            ) as group:
                handle = group.handle(
                    top_k=1, alignment=1, dispatch="nvfp4", combine_backward="mxfp8", combine="mxfp8"
                )
                handle.prepare([[0], [1]])
                received = handle.dispatch(np.full((2, 32), 6, np.float32), receive="decoded")
                results[number] = handle.combine(received.data).numpy().astype(np.float32)
                handle.dispatch_backward(received.data)
                handle.combine_backward(results[number], receive="rows")

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert all((result == 6).all() for result in results)
        # Theirs is still what everybody finds, and ours has none of those names.
        for name in names:
            assert ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value == addresses[name]
            try:
                found = ctypes.cast(getattr(nvte_ep._lib.library(), name), ctypes.c_void_p).value
            except AttributeError:
                continue
            raise AssertionError(f"{{name}} at {{found:#x}}")
        print("done")
    """
    assert run_clean(code) == "done\n"
