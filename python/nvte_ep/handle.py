# SPDX-License-Identifier: Apache-2.0
"""Handle: prepare, dispatch, combine and their backwards."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

from nvte_ep import _abi, _lib
from nvte_ep._call import Call, boolean, float_type, integer, natural, pointer, storage_name
from nvte_ep._dlpack import View
from nvte_ep._dtypes import device_name, dtype_name
from nvte_ep.array import Array, element_type
from nvte_ep.communicator import Owned
from nvte_ep.errors import BadStateError, NvteEpError, Status, UnsupportedError, invalid
from nvte_ep.formats import format_info, lookup, row_bytes
from nvte_ep.group import Group
from nvte_ep.operand import Operand


@dataclass
class Routing:
    """The result of prepare. A field that is None was not asked for.

    For expert e of this rank with n routed tokens: its slab has n slots, rounded up to the alignment.
    """

    tokens_routed: Any = None  # [E_local]      n
    tokens_per_expert: Any = None  # [E_local]      of those, kept
    rows_per_expert: Any = None  # [E_local]      slots of the slab, padding included
    row_offsets: Any = None  # [E_local + 1]  prefix sum of rows_per_expert
    scale_row_offsets: Any = None  # [E_local + 1]  prefix sum of rows_per_expert rounded up to 128
    total_rows: Any = None  # [1]            row_offsets[E_local]
    dropped_rows: Any = None  # [1]            routed minus kept
    slot_source: Any = None  # [capacity]     int64: source rank << 32 | token, -1 for padding
    slot_expert: Any = None  # [capacity]     int32: local expert of the slot
    total: int | None = None  # total_rows on the host, as an int; eager groups only


@dataclass
class Received:
    """What dispatch or combine_backward handed out: data (rows or decoded) or an operand.

    weights: after dispatch the weight of each slot, after combine_backward the gradient of slot_weights.
    """

    data: Any = None
    operand: Operand | None = None
    weights: Any = None


_COUNTS = ("tokens_routed", "tokens_per_expert", "rows_per_expert")
_OFFSETS = ("row_offsets", "scale_row_offsets")
_TOTALS = ("total_rows", "dropped_rows")
_SLOTS = ("slot_source", "slot_expert")
_ROUTING = _COUNTS + _OFFSETS + _TOTALS + _SLOTS


_PACKING = ("rounding", "nonfinite", "scale_rounding", "column_bound")
_USUAL_PACKING = ("nearest", "propagate", "nearest", "l1")


class Handle:
    """The routing state of one layer or micro-batch: see Group.handle.

    Arrays lie on the group's device. `stream` is as everywhere. uint16 arrays of tokens hold bfloat16.
    Outputs are the caller's `out` or new Arrays; slots past the total rows of the routing are not written.
    """

    def __init__(
        self,
        group: Group,
        *,
        top_k: int,
        alignment: int = 128,
        dispatch: str = "bf16",
        combine: str = "bf16",
        dispatch_backward: str = "bf16",
        combine_backward: str = "bf16",
    ) -> None:
        function = "nvte_ep_handle_create"
        config = _abi.HandleConfig(
            top_k=integer(function, "top_k", top_k, 32),
            alignment=integer(function, "alignment", alignment, 32),
            dispatch=lookup(function, "dispatch", dispatch).format,
            combine=lookup(function, "combine", combine).format,
            dispatch_backward=lookup(function, "dispatch_backward", dispatch_backward).format,
            combine_backward=lookup(function, "combine_backward", combine_backward).format,
        )
        created = ctypes.c_void_p()
        group.call(function, group.pointer, ctypes.byref(config), ctypes.byref(created))
        assert created.value is not None
        self.group = group
        self.top_k = config.top_k
        self.alignment = config.alignment or 128
        self.formats = {
            "dispatch": dispatch,
            "combine": combine,
            "dispatch_backward": dispatch_backward,
            "combine_backward": combine_backward,
        }
        self._has_operand = {name: info.operand_multiple > 0 for name, info in format_info().items()}
        self._owned = Owned(created.value, group._state.handle_died)
        self._finalizer = weakref.finalize(self, self._owned.release)
        group._handles[created.value] = self
        self.prepared = 0  # how many times: tells whether a routing is still the one that a caller saw
        self._num_tokens: int | None = None
        self._total: int | None = None

    @property
    def pointer(self) -> int:
        """The nvte_ep_handle_t."""
        if self._owned.pointer is None:
            raise BadStateError(Status.BAD_STATE, "Handle: it is closed")
        return self._owned.pointer

    def close(self) -> None:
        """No work of the handle may be in flight. Closing twice is fine."""
        self._finalizer()
        self.group._state.bury_handles()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def slots(self) -> int:
        """Slots of a receive buffer: recv_capacity, or in an eager group the total of the last prepare."""
        capacity = self.group.info.recv_capacity
        if capacity:
            return capacity
        if self._total is None:
            raise BadStateError(
                Status.BAD_STATE, "Handle: an eager group knows its slots after prepare: call it first"
            )
        return self._total

    @property
    def num_tokens(self) -> int:
        """T of the last prepare."""
        if self._num_tokens is None:
            raise BadStateError(
                Status.BAD_STATE, "Handle: the number of tokens is known after prepare: call it first"
            )
        return self._num_tokens

    def _count(self, call: Call, num_tokens: int | None, output: str) -> int:
        """T of an output that is made, by its name in the C interface: one that does not fit is the caller's
        num_tokens."""
        if num_tokens is None:
            if self._num_tokens is None:
                raise _not_prepared(call.function)
            return self._num_tokens
        call.names = {**call.names, output: "num_tokens"}
        number = natural(call.function, "num_tokens", num_tokens)
        if self._num_tokens is not None and number != self._num_tokens:
            raise invalid(call.function, "num_tokens", f"{self._num_tokens}, as in prepare", str(number))
        return number

    def _begin(self, verb: str, arrays: dict[str, Any], stream: Any) -> Call:
        function = "nvte_ep_handle_" + verb
        if self._owned.pointer is None:
            raise BadStateError(Status.BAD_STATE, f"{function}: handle: it is closed")
        if verb != "prepare" and self._total is None and not self.group.info.recv_capacity:
            raise _not_prepared(function)
        call = self._new_call(function, arrays, stream)
        call.names = _NAMES
        return call

    def _new_call(self, function: str, arrays: dict[str, Any], stream: Any) -> Call:
        return Call(function, arrays, stream, self.group.device)

    def _run(self, call: Call, arguments: _abi.SizedStruct) -> None:
        state = self.group._state
        state.bury_handles()
        call.run(self.pointer, ctypes.byref(arguments), check=state.check_callbacks)

    def empty_routing(self, index_dtype: Any = "int64") -> Routing:
        """New arrays for everything that prepare can tell, in one allocation; fixed-capacity groups only."""
        return self._new_routing(self.slots, dtype_name(index_dtype))

    def _new_routing(self, slots: int, index_dtype: str) -> Routing:
        experts = self.group.info.num_local_experts
        sizes = (
            dict.fromkeys(_COUNTS, experts) | dict.fromkeys(_OFFSETS, experts + 1) | dict.fromkeys(_TOTALS, 1)
        )
        types = dict.fromkeys(sizes, index_dtype)
        sizes["slot_source"] = sizes["slot_expert"] = slots
        types |= {"slot_source": "int64", "slot_expert": "int32"}
        memory = Array.empty((8 * sum(sizes.values()),), "uint8", self.group.device)
        routing = Routing()
        offset = 0
        for name, size in sizes.items():
            kind = element_type("nvte_ep_handle_prepare", types[name])
            setattr(routing, name, memory.part(offset, size * kind.bits // 8, kind))
            offset += size * 8  # keeps every array aligned
        return routing

    def _most_slots(self, num_tokens: int) -> int:
        """More slots than any routing of an eager group can need."""
        info = self.group.info
        per_token: int = min(self.top_k, info.num_local_experts)
        tokens = num_tokens if info.num_ranks == 1 else info.num_ranks * self.group.max_tokens_per_rank
        return tokens * per_token + info.num_local_experts * (self.alignment - 1)

    def prepare(
        self,
        topk_idx: Any,
        *,
        out: Routing | None = None,
        index_dtype: Any = "int64",
        stream: Any = None,
    ) -> Routing:
        """Exchanges the routing. Collective. topk_idx [T, top_k] int32 or int64: global expert ids, -1 =
        unrouted.

        out: a Routing whose arrays are written; its fields that are None are left out. Without it everything
        is told, in new arrays of index_dtype.

        In an eager group slot_source and slot_expert of `out` must hold the total. Where they do not, the
        call raises InvalidArgumentError when the routing is set already: Handle.slots and Routing.total have
        the total.
        """
        call = self._begin("prepare", {"topk_idx": topk_idx}, stream)
        if out is not None and not isinstance(out, Routing):
            raise invalid(call.function, "out", "a Routing", type(out).__name__)
        indices = call.read_indices("topk_idx", topk_idx)
        if indices is None:
            raise invalid(call.function, "topk_idx", "[T, K]", "None")
        num_tokens, _ = call.matrix("topk_idx", indices)
        eager = self.group.info.recv_capacity == 0
        routing = out
        if routing is None:
            if dtype_name(index_dtype) not in ("int32", "int64"):
                raise invalid(call.function, "index_dtype", "int32 or int64", dtype_name(index_dtype))
            call.may_make("out")
            slots = self._most_slots(num_tokens) if eager else self.slots
            routing = self._new_routing(slots, dtype_name(index_dtype))
        arguments = _abi.PrepareArgs()
        arguments.topk_idx = indices.pointer
        for name in _ROUTING:
            array = getattr(routing, name)
            if array is not None:
                setattr(arguments, name, pointer(call.write(name, array)))
        total = ctypes.c_int64(-1)
        if eager:
            arguments.total_rows_host = ctypes.pointer(total)
        try:
            self._run(call, arguments)
        except NvteEpError:
            # Too small a slot_source or slot_expert is found when the routing is set already.
            if total.value >= 0:
                self._routing_is_set(routing, num_tokens, total.value)
            raise
        self._routing_is_set(routing, num_tokens, total.value if eager else None)
        if eager and out is None:
            routing.slot_source = routing.slot_source[: total.value]
            routing.slot_expert = routing.slot_expert[: total.value]
        return routing

    def _routing_is_set(self, routing: Routing, num_tokens: int, total: int | None) -> None:
        self.prepared += 1
        self._num_tokens = num_tokens
        self._total = routing.total = total

    def dispatch(
        self,
        tokens: Any,
        topk_weights: Any = None,
        *,
        receive: str | None = None,
        out: Any = None,
        recv_weights: Any = None,
        dtype: Any = None,
        columnwise: bool = False,
        scale_layout: str = "swizzled",
        rounding: str = "nearest",
        rng_state: Any = None,
        nonfinite: str = "propagate",
        scale_rounding: str = "nearest",
        column_bound: str = "l1",
        tensor_scale: Any = None,
        fixed_expert_scale: Any = None,
        findings: Any = None,
        stream: Any = None,
    ) -> Received:
        """Sends every token to its experts, in the handle's dispatch format. Collective.

        tokens: [T, H] of a floating type, packed rows uint8 [T, row_bytes], or the tuple that a *_quantize
        gave.
        topk_weights: float32 [T, K]; then each slot's weight comes with it.
        receive: "operand" (out: an Operand), "rows" (uint8 [slots, row_bytes]) or "decoded" ([slots, H] of
        `dtype`, or of the type of `out`; None: bfloat16). None: "operand" where the wire format has one, else
        "decoded": bf16 has none. columnwise and scale_layout describe a new Operand.
        """
        call = self._begin("dispatch", {"tokens": _first(tokens)}, stream)
        packing = (rounding, nonfinite, scale_rounding, column_bound)
        arguments = self._send_args(
            call, tokens, packing, rng_state, tensor_scale, fixed_expert_scale, findings
        )
        if topk_weights is not None:
            arguments.topk_weights = pointer(call.read("topk_weights", topk_weights))
        received = self._receive(call, arguments, "dispatch", receive, out, dtype, columnwise, scale_layout)
        if recv_weights is None and topk_weights is not None:
            recv_weights = call.new("recv_weights", (self.slots,), "float32")
        if recv_weights is not None:
            arguments.recv_weights = pointer(call.write("recv_weights", recv_weights))
        self._run(call, arguments)
        received.weights = recv_weights
        return received

    def combine(
        self,
        expert_out: Any,
        *,
        slot_weights: Any = None,
        out: Any = None,
        accumulate: bool = False,
        num_tokens: int | None = None,
        stream: Any = None,
    ) -> Any:
        """Sums every token's slots: expert_out [slots, H] to [T, H] of the same type. Collective.

        slot_weights float32 [slots]; None: unweighted. accumulate adds to what `out` holds. num_tokens: T of
        a new result; None: that of the last prepare.
        """
        call = self._begin("combine", {"expert_out": expert_out, "out": out}, stream)
        source = call.need("expert_out", expert_out, "[slots, H]", uint16_is="bfloat16")
        if out is None:
            if accumulate:
                raise invalid(call.function, "out", "an array to add to", "None with accumulate")
            count = self._count(call, num_tokens, "result")
            out = call.new("out", (count, self.group.hidden), source.dtype.name)
        arguments = _abi.CombineArgs()
        arguments.expert_out = source.pointer
        if slot_weights is not None:
            arguments.slot_weights = pointer(call.read("slot_weights", slot_weights))
        arguments.result = pointer(call.write("out", out, uint16_is="bfloat16"))
        arguments.accumulate = boolean(call.function, "accumulate", accumulate)
        self._run(call, arguments)
        return out

    def dispatch_backward(
        self,
        grad_received: Any,
        grad_recv_weights: Any = None,
        *,
        out: Any = None,
        grad_topk_weights: Any = None,
        accumulate: bool = False,
        num_tokens: int | None = None,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Gradients of dispatch: [slots, H] (and float32 [slots]) to (grad_tokens [T, H], grad_topk_weights
        [T, K]).

        The second is None without grad_recv_weights. Collective.
        """
        call = self._begin("dispatch_backward", {"grad_received": grad_received, "out": out}, stream)
        source = call.need("grad_received", grad_received, "[slots, H]", uint16_is="bfloat16")
        if out is None:
            if accumulate:
                raise invalid(call.function, "out", "an array to add to", "None with accumulate")
            count = self._count(call, num_tokens, "grad_tokens")
            out = call.new("out", (count, self.group.hidden), source.dtype.name)
        grads = call.read("grad_recv_weights", grad_recv_weights)
        if grads is not None and grad_topk_weights is None:
            count = self._count(call, num_tokens, "grad_topk_weights")
            grad_topk_weights = call.new("grad_topk_weights", (count, self.top_k), "float32")
        arguments = _abi.DispatchBackwardArgs()
        arguments.grad_received = source.pointer
        arguments.grad_recv_weights = pointer(grads)
        arguments.grad_tokens = pointer(call.write("out", out, uint16_is="bfloat16"))
        arguments.grad_topk_weights = pointer(call.write("grad_topk_weights", grad_topk_weights))
        arguments.accumulate = boolean(call.function, "accumulate", accumulate)
        self._run(call, arguments)
        return out, grad_topk_weights

    def combine_backward(
        self,
        grad: Any,
        *,
        receive: str | None = None,
        out: Any = None,
        slot_weights: Any = None,
        expert_out: Any = None,
        grad_slot_weights: Any = None,
        dtype: Any = None,
        columnwise: bool = False,
        scale_layout: str = "swizzled",
        rounding: str = "nearest",
        rng_state: Any = None,
        nonfinite: str = "propagate",
        scale_rounding: str = "nearest",
        column_bound: str = "l1",
        tensor_scale: Any = None,
        fixed_expert_scale: Any = None,
        findings: Any = None,
        stream: Any = None,
    ) -> Received:
        """Gradient of combine: every kept slot of token t receives grad[t]. Collective. Arguments as
        dispatch.

        slot_weights: the received gradient is multiplied by them ("decoded" only). expert_out [slots, H]:
        then the gradient of slot_weights comes as Received.weights ("decoded" only).
        """
        call = self._begin("combine_backward", {"grad": _first(grad)}, stream)
        packing = (rounding, nonfinite, scale_rounding, column_bound)
        send = self._send_args(call, grad, packing, rng_state, tensor_scale, fixed_expert_scale, findings)
        received = self._receive(
            call, send, "combine_backward", receive, out, dtype, columnwise, scale_layout
        )
        if grad_slot_weights is None and expert_out is not None:
            grad_slot_weights = call.new("grad_slot_weights", (self.slots,), "float32")
        arguments = _abi.CombineBackwardArgs()
        arguments.send = ctypes.pointer(send)
        if slot_weights is not None:
            arguments.slot_weights = pointer(call.read("slot_weights", slot_weights))
        if expert_out is not None:
            arguments.expert_out = pointer(call.read("expert_out", expert_out, uint16_is="bfloat16"))
        if grad_slot_weights is not None:
            arguments.grad_slot_weights = pointer(call.write("grad_slot_weights", grad_slot_weights))
        self._run(call, arguments)
        received.weights = grad_slot_weights
        return received

    def _send_args(
        self,
        call: Call,
        tokens: Any,
        packing: tuple[str, ...],
        rng_state: Any,
        tensor_scale: Any,
        fixed_expert_scale: Any,
        findings: Any,
    ) -> _abi.DispatchArgs:
        """The sending half of dispatch and combine_backward."""
        function = call.function
        arguments = _abi.DispatchArgs()  # what is not given stays as it is: null
        if tensor_scale is not None:
            arguments.tensor_scale = pointer(call.read_scale("tensor_scale", tensor_scale, findings))
        if rng_state is not None:
            arguments.rng_state = pointer(call.read_rng_state(rng_state))
        if fixed_expert_scale is not None:
            arguments.fixed_expert_scale = pointer(call.read("fixed_expert_scale", fixed_expert_scale))
        if findings is not None:
            arguments.findings = pointer(call.write_findings(findings))
        if packing != _USUAL_PACKING:  # zero
            for option, name in zip(_PACKING, packing, strict=True):
                setattr(arguments, option, _lib.enum(function, option, f"NVTE_EP_{option.upper()}_", name))
        if isinstance(tokens, (tuple, list)):
            if not 2 <= len(tokens) <= 3:
                raise invalid(
                    function,
                    "tokens",
                    "(payload, scales[, token_scales])",
                    f"a {type(tokens).__name__} of {len(tokens)}",
                )
            payload, scales, *rest = tokens
            arguments.payload = pointer(call.read("payload", payload, as_bytes=True))
            arguments.scales = pointer(call.read("scales", scales, as_bytes=True))
            arguments.token_scales = pointer(call.read("token_scales", rest[0] if rest else None))
        else:
            arguments.tokens = pointer(call.read("tokens", tokens, uint16_is="bfloat16"))
        return arguments

    def _receive(
        self,
        call: Call,
        arguments: _abi.DispatchArgs,
        direction: str,
        receive: str | None,
        out: Any,
        dtype: Any,
        columnwise: bool,
        scale_layout: str,
    ) -> Received:
        """The receiving half: fills in where the data goes."""
        function = call.function
        format = self.formats[direction]
        has_operand = self._has_operand[format]
        if receive is None:
            receive = "operand" if has_operand else "decoded"
        if receive == "operand" and not has_operand:
            text = f'{function}: receive="operand": {format} has no operand; expected "decoded" or "rows"'
            raise UnsupportedError(Status.UNSUPPORTED, text)
        arguments.receive = _lib.enum(function, "receive", "NVTE_EP_RECEIVE_", receive)
        if dtype is not None and receive != "decoded":
            raise invalid(function, "dtype", f'None with receive="{receive}"', repr(dtype))
        if boolean(function, "columnwise", columnwise) and receive != "operand":
            raise invalid(function, "columnwise", f'False with receive="{receive}"', "True")
        if receive == "operand":
            operand = out
            if operand is None:
                call.may_make("out")
                operand = self.empty_operand(direction, columnwise=columnwise, scale_layout=scale_layout)
            elif not isinstance(operand, Operand):
                raise invalid(function, "out", "an Operand", type(out).__name__)
            call.will_write(operand.bytes)
            arguments.operand = ctypes.pointer(operand.struct)
            return Received(operand=operand)
        if receive == "rows":
            if out is None:
                width = row_bytes(format, self.group.hidden)
                out = call.new("out", (self.slots, width), "uint8")
            found: View | None = call.write("out", out, as_bytes=True)
        else:
            wanted = float_type(function, "dtype", "bfloat16" if dtype is None else dtype)
            if out is None:
                out = call.new("out", (self.slots, self.group.hidden), wanted)
            found = call.fill("out", out, uint16_is=storage_name(wanted))
            if dtype is not None and found.dtype.name != wanted:
                raise invalid(function, "out", f"{wanted}, as dtype says", found.dtype.name)
        arguments.received = pointer(found)
        return Received(data=out)

    def empty_operand(
        self, direction: str = "dispatch", *, columnwise: bool = False, scale_layout: str = "swizzled"
    ) -> Operand:
        """A new Operand that "dispatch" or "combine_backward" of this handle can be received in."""
        return Operand(
            self.formats[direction],
            self.group.hidden,
            self.slots,
            self.group.info.num_local_experts,
            alignment=self.alignment,
            columnwise=columnwise,
            scale_layout=scale_layout,
            device=self.group.device,
        )

    def __repr__(self) -> str:
        formats = ", ".join(f"{name}={value}" for name, value in self.formats.items())
        where = device_name(self.group.device)
        return f"Handle(top_k={self.top_k}, alignment={self.alignment}, {formats}, device={where})"


# What the C interface calls the argument `out`.
_NAMES = {"result": "out", "grad_tokens": "out", "received": "out"}


def _not_prepared(function: str) -> BadStateError:
    text = f"{function}: handle: expected a successful prepare before this call"
    return BadStateError(Status.BAD_STATE, text)


def _first(tokens: Any) -> Any:
    return tokens[0] if isinstance(tokens, (tuple, list)) and tokens else tokens
