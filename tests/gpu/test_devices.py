# SPDX-License-Identifier: Apache-2.0
"""Calls work on the device of their arrays and leave the caller's current device as it was."""

from __future__ import annotations

from typing import Any

import nvte_ep
import pytest
from codec_calls import NAMES, calls
from device_arrays import RawMemory, check, own_bytes

CALLS = calls()


def current(cudart: Any) -> int:
    return int(check(cudart.cudaGetDevice()))


@pytest.mark.parametrize("name", NAMES)
def test_the_current_device_stays(name: str, cudart: Any, raw: RawMemory) -> None:
    before = current(cudart)
    placed = CALLS[name].place(raw.put)
    CALLS[name].run(placed, CALLS[name].make_out(raw.empty))
    assert current(cudart) == before
    CALLS[name].run(placed)
    assert current(cudart) == before


def test_the_current_device_stays_after_a_refusal(cudart: Any, raw: RawMemory) -> None:
    before = current(cudart)
    with pytest.raises(nvte_ep.InvalidArgumentError):
        nvte_ep.mxfp8_unpack(raw.empty((4, 48), "uint8"), 33)
    assert current(cudart) == before


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("here", [0, 1])
def test_arrays_on_the_other_device(name: str, here: int, cudart: Any, raw: RawMemory) -> None:
    """Made while their device is current, used while the other one is."""
    there = 1 - here
    call = CALLS[name]
    try:
        check(cudart.cudaSetDevice(there))
        placed = call.place(raw.put)
        out = call.make_out(raw.empty)
        check(cudart.cudaSetDevice(here))
        result = call.run(placed, out)
        assert current(cudart) == here
        own = call.run(placed)
        assert current(cudart) == here
        check(cudart.cudaSetDevice(there))
        check(cudart.cudaDeviceSynchronize())
        call.check(result, raw.host, poisoned=True)
        call.check(own, own_bytes, poisoned=False)
    finally:
        check(cudart.cudaSetDevice(0))


@pytest.mark.usefixtures("two_gpus")
def test_arrays_of_two_devices_are_refused(cudart: Any, raw: RawMemory) -> None:
    call = CALLS["nvfp4_pack"]
    try:
        check(cudart.cudaSetDevice(1))
        out = call.make_out(raw.empty)
        check(cudart.cudaSetDevice(0))
        with pytest.raises(nvte_ep.InvalidArgumentError, match="expected CUDA device 0, got CUDA device 1"):
            call.run(call.place(raw.put), out)
        assert current(cudart) == 0
    finally:
        check(cudart.cudaSetDevice(0))
