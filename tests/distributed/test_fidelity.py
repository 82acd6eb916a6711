# SPDX-License-Identifier: Apache-2.0
"""How much of a real transformer's hidden states is left after the wire and in the operands.

The floors are what was measured over both layers, less half a decibel: a regression shows, another CPU does
not.
"""

from __future__ import annotations

import numpy as np
import pytest

from distributed import fidelity
from distributed.here import TRANSPORTS
from distributed.transports import Transport

# dB, by format and by what is measured. Columnwise NVFP4 is quantised twice, which costs three decibels.
FLOORS = {
    "mxfp8": {"token": 31.0, "layer": 31.0, "rowwise": 31.0, "columnwise": 31.0, "gradient": 31.0},
    "nvfp4": {
        "token": 20.2,
        "layer": 20.2,
        "rowwise": 20.2,
        "columnwise": 17.0,
        "gradient": 20.2,
        "stochastic gradient": 16.9,
    },
}


@pytest.mark.parametrize("transport", TRANSPORTS, ids=str)
@pytest.mark.parametrize("layer", fidelity.LAYERS)
@pytest.mark.parametrize("format", FLOORS)
def test_signal_to_noise_of_real_tokens(transport: Transport, format: str, layer: str) -> None:
    case = fidelity.case_of(layer, format)
    assert case.layouts
    by_rank = transport.run(case.ranks, fidelity.through_the_ranks, transport, case, layer)
    measured = {}
    for name in by_rank[0]:
        reference, got = (np.concatenate([rank[name][part] for rank in by_rank]) for part in (0, 1))
        measured[name] = fidelity.sqnr(reference, got)
    print(f"{layer}: " + ", ".join(f"{name} {value:.2f} dB" for name, value in measured.items()))
    assert measured.keys() == FLOORS[format].keys()
    for name, value in measured.items():
        assert value > FLOORS[format][name], name
