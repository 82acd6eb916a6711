"""Grouped ncclSend and ncclRecv of as many rows as transport `nccl` sends with a fixed capacity: what that
transport is held against in `nvte-ep bench ep`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from nvte_ep.array import Array
from nvte_ep.commands import _nccl_ep_abi as abi
from nvte_ep.commands._checks import Checks, Sending, pack
from nvte_ep.commands._nccl_api import NcclApi, new_comm
from nvte_ep.commands.bench_ep_data import Data, Operation
from nvte_ep.commands.bench_ep_library import Sampling, Side, Work
from nvte_ep.commands.bench_ep_ranks import Ranks
from nvte_ep.commands.bench_machine import Call, CudaMachine
from nvte_ep.formats import row_bytes

NAME = "ncclSend"


class SendReceive(Side):
    """Every rank's rows to every other rank."""

    name = NAME
    machine: CudaMachine

    def __init__(self, ranks: Ranks, machine: CudaMachine, data: Data, sampling: Sampling) -> None:
        super().__init__(ranks, machine, data, sampling)
        self.api = NcclApi()
        self.comm = new_comm(self.api, ranks, machine)

    def work(self, operation: Operation, sets: int) -> Iterator[Work]:
        """For rows that come in packed and go out packed; BF16 tokens are that, too."""
        as_they_are = operation.given == "packed" and operation.receive == "rows"
        if operation.verb == "dispatch" and (operation.wire == "bf16" or as_they_are):
            yield self._exchange(operation, sets)

    def _exchange(self, operation: Operation, sets: int) -> Work:
        tokens, width = self.data.shape.tokens, row_bytes(operation.wire, self.data.shape.hidden)
        calls: list[Call] = []
        received = []
        for index in range(sets):
            given = self.given(operation, index)
            out = self.new((self.ranks.size, tokens, width), "uint8")
            calls.append(partial(self._send_and_receive, given, out, tokens * width))
            received.append(out)

        def check(checks: Checks) -> None:
            for index in self.checked_sets(sets):
                for source in range(self.ranks.size):
                    if source != self.ranks.rank:
                        self._check_rows(checks, received[index][source], source, index, operation.wire)

        return Work(calls, check)

    def _check_rows(self, checks: Checks, rows: Array, source: int, index: int, wire: str) -> None:
        tokens = self.sampling.of_tokens(self.data.shape.tokens)
        wanted = pack(Sending(wire), self.data.tokens(source, index, tokens))
        got = np.stack([self.machine.read(rows[int(token)]) for token in tokens])
        checks.equal(f"buffers {index}, rows of rank {source}", got, wanted)

    def _send_and_receive(self, given: Array, out: Array, nbytes: int) -> None:
        kind, stream = abi.DATA_TYPES["uint8"], self.machine.stream
        self.api.call("ncclGroupStart")
        for peer in range(self.ranks.size):
            if peer != self.ranks.rank:
                self.api.call("ncclSend", given.pointer, nbytes, kind, peer, self.comm, stream)
                self.api.call("ncclRecv", out[peer].pointer, nbytes, kind, peer, self.comm, stream)
        self.api.call("ncclGroupEnd")

    def close(self) -> None:
        self.machine.synchronize()
        self.api.call("ncclCommDestroy", self.comm)
