"""One hop between two pipeline stages: ours, torch.distributed.batch_isend_irecv by hand, Megatron-LM's communicator.

Ours is the method of ``P2PCommunicator``, and in the rows of ``stages`` ColossalAI's function of that name.

Host time is taken with small CPU tensors over a no-op process group, so that what is compared is Python
and the calls into the backend; what arrives in a receive of int64, the shapes of variable lengths, is filled in for
all providers. Counted besides: messages sent, passes over memory (bytes read and written by local ops, as multiples
of once over what is sent), and calls that synchronise a device. Only ours sends a strided tensor: the others call
``contiguous()`` first. ``python bench/bench_p2p.py`` prints the table; ``--json PATH`` writes it with versions.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from bench.cost import Cost
from bench.guard import MORE_WORK, ROW, row_target
from bench.harness import Clock, Row
from bench.hosts import cpu_device, megatron_part, no_op_group, peer
from tritoncomm import groups, p2p, record
from tritoncomm.groups import Group, ParallelMode
from tritoncomm.p2p import header

WORLD, RANK = 4, 1
SHAPE = (8, 2, 16)
INNER = 30
PASSES = {"one": 0, "strided": 1, "eight": 1}
# To whom a method sends, and from whom it receives.
SIDES = {
    "send_forward": (("next",), ()),
    "recv_forward": ((), ("prev",)),
    "send_forward_recv_forward": (("next",), ("prev",)),
    "send_forward_backward_recv_forward_backward": (("next", "prev"), ("prev", "next")),
    "send_forward_recv_backward": (("next",), ("next",)),
}


@dataclass(frozen=True)
class Case:
    """A method of the communicator with what it sends.

    Attributes:
        method: the name in both communicators, and of the stage function.
        tensors: one, strided or eight.
        batched: ``batch_p2p_comm``.
        varies: ``variable_seq_lengths``, a header or the shapes ahead of every message.
        stages: ours is ColossalAI's stage function.
    """

    method: str
    tensors: str = "one"
    batched: bool = True
    varies: bool = False
    stages: bool = False

    @property
    def label(self) -> str:
        words = ("batched" if self.batched else "single", *["variable lengths"] * self.varies)
        return f"{'stages.' * self.stages}{self.method} {self.tensors}, {', '.join(words)}"

    @property
    def sends(self) -> tuple[str, ...]:
        return SIDES[self.method][0]

    @property
    def receives(self) -> tuple[str, ...]:
        return SIDES[self.method][1]

    @property
    def count(self) -> int:
        return 8 if self.tensors == "eight" else 1


def cases() -> Iterator[Case]:
    for batched, stages in ((True, False), (False, False), (True, True)):
        for tensors in ("one", "strided", "eight"):
            yield Case("send_forward_recv_backward", tensors, batched, stages=stages)
        for method in list(SIDES)[:4]:
            yield Case(method, "one", batched, stages=stages)
    for tensors in ("one", "strided", "eight"):
        yield Case("send_forward_recv_backward", tensors, varies=True)


CASES = list(cases())


class Host:
    """The fake group, and the CPU as the device that Megatron allocates on; counts what goes through."""

    def __init__(self) -> None:
        self.messages = self.synchronisations = 0

    def __enter__(self) -> "Host":
        self._stack = ExitStack()
        self.group: ProcessGroup = self._stack.enter_context(no_op_group(WORLD, RANK))
        self._stack.enter_context(cpu_device())
        pipeline = Group(self.group, ParallelMode.PIPELINE)
        groups.register({ParallelMode.GLOBAL: pipeline, ParallelMode.PIPELINE: pipeline})
        self._stack.callback(groups.register, {})
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count messages and synchronisations inside."""
        send = ProcessGroup.send
        self.messages = self.synchronisations = 0

        def counted(group: ProcessGroup, tensors: list[Tensor], *args: Any) -> Any:
            self.messages += len(tensors)
            return send(group, tensors, *args)

        def synchronize(device: Any = None) -> None:
            self.synchronisations += 1

        with (
            mock.patch.object(ProcessGroup, "send", counted),
            mock.patch.object(torch.cuda, "synchronize", synchronize),
        ):
            yield

    @contextmanager
    def filling(self, case: Case) -> Iterator[None]:
        """Let the shapes arrive that the senders of variable lengths announce."""
        if not case.varies:
            yield
            return
        words = header.encode(((SHAPE, torch.float32),) * case.count)
        arrives = {len(part): part for part in (words[: header.WORDS], words[header.WORDS :], torch.tensor(SHAPE))}
        recv = ProcessGroup.recv

        def filled(group: ProcessGroup, tensors: list[Tensor], *args: Any) -> Any:
            (x,) = tensors
            if x.dtype is torch.int64:
                x.copy_(arrives[x.numel()])
            return recv(group, tensors, *args)

        with mock.patch.object(ProcessGroup, "recv", filled):
            yield


def _settings(case: Case) -> SimpleNamespace:
    return SimpleNamespace(
        pipeline_dtype=torch.float32,
        batch_p2p_comm=case.batched,
        batch_p2p_sync=True,
        variable_seq_lengths=case.varies,
        mtp_standalone=False,
        use_ring_exchange_p2p=False,
        virtual_pipeline_model_parallel_size=None,
        timers=None,
    )


def inputs(case: Case) -> list[Tensor]:
    """Tensors for one neighbour, as they leave a layer."""
    if case.tensors == "strided":
        return [torch.randn(*SHAPE[:-1], 2 * SHAPE[-1], requires_grad=True)[..., : SHAPE[-1]]]
    return [torch.randn(SHAPE, requires_grad=True) * 1.0 for _ in range(case.count)]


def through(communicator: Any, case: Case, tensors: list[Tensor], contiguous: bool) -> Callable[[], Any]:
    """A hop of a communicator, of ours or of Megatron's."""
    method, many = getattr(communicator, case.method), len(tensors) > 1
    (first, *_), shapes = tensors, [SHAPE] * len(tensors)

    def given() -> Any:
        if many:
            return [x.contiguous() for x in tensors] if contiguous else tensors
        return first.contiguous() if contiguous else first

    return {
        "send_forward_recv_backward": lambda: method(given(), shapes, False),
        "send_forward": lambda: method(given(), False),
        "recv_forward": lambda: method(shapes if many else SHAPE, False),
        "send_forward_recv_forward": lambda: method(given(), recv_prev=True, tensor_shape=SHAPE),
        "send_forward_backward_recv_forward_backward": lambda: method(
            given(), given(), recv_prev=True, recv_next=True, tensor_shape=SHAPE
        ),
    }[case.method]


def through_stages(case: Case, tensors: list[Tensor]) -> Callable[[], Any]:
    """A hop of a stage function: what it sends, and the shapes of what it receives."""
    function = getattr(p2p, case.method)
    x, shape = (tensors, [SHAPE] * len(tensors)) if len(tensors) > 1 else (tensors[0], SHAPE)
    arguments = (x,) * len(case.sends) + (shape,) * len(case.receives)
    return lambda: function(*arguments)


def by_hand(group: ProcessGroup, case: Case, tensors: list[Tensor]) -> Callable[[], Any]:
    """A hop by hand: a list of operations, one batch, a wait for every request."""
    peers = {"next": RANK + 1, "prev": RANK - 1}

    def exchanged(sent: dict[str, list[Tensor]], received: dict[str, list[Tensor]]) -> None:
        ops = [dist.P2POp(dist.isend, x, peers[side], group) for side, xs in sent.items() for x in xs]
        ops += [dist.P2POp(dist.irecv, x, peers[side], group) for side, xs in received.items() for x in xs]
        for request in dist.batch_isend_irecv(ops):
            request.wait()

    def empty(shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, requires_grad=True)

    def call() -> Any:
        sent = {side: [x.contiguous() for x in tensors] for side in case.sends}
        if case.varies:
            said = {side: [torch.tensor(x.shape) for x in xs] for side, xs in sent.items()}
            heard = {side: [torch.empty(3, dtype=torch.int64) for _ in tensors] for side in case.receives}
            exchanged(said, heard)
            received = {side: [empty(x.tolist()) for x in xs] for side, xs in heard.items()}
        else:
            received = {side: [empty(SHAPE) for _ in tensors] for side in case.receives}
        exchanged(sent, received)
        return [received[side] if len(tensors) > 1 else received[side][0] for side in case.receives]

    return call


def calls(case: Case, host: Host) -> dict[str, Callable[[], Any]]:
    """The hop of every provider."""
    tensors, settings = inputs(case), _settings(case)
    megatron = peer("pipeline_parallel.p2p_communication")
    ours = through(p2p.P2PCommunicator(host.group, settings), case, tensors, False)
    return {
        "ours": through_stages(case, tensors) if case.stages else ours,
        "by hand": by_hand(host.group, case, tensors),
        "megatron": through(megatron.P2PCommunicator(host.group, settings), case, tensors, case.tensors == "strided"),
    }


def assert_agree(case: Case, hops: dict[str, Callable[[], Any]]) -> None:
    """Compare the form of received tensors; the fake group moves no data, so tests compare the values."""
    expected = len(case.receives) * case.count
    for provider, call in hops.items():
        received = [x for x in tree_leaves(call()) if x is not None]
        assert len(received) == expected, (case.label, provider)
        for x in received:
            assert (tuple(x.shape), x.dtype) == (SHAPE, torch.float32), (case.label, provider)
            assert (x.requires_grad, x.is_leaf) == (True, True), (case.label, provider)


def count(case: Case, provider: str, host: Host) -> dict[str, float]:
    """Messages, passes and synchronisations of one hop, the second of its communicator."""
    with host.counting():
        call = calls(case, host)[provider]
        call()
        host.messages = host.synchronisations = 0
        with record.recording() as recorded, Cost() as cost:
            call()
    payload = len(case.sends) * len(inputs(case)) * torch.Size(SHAPE).numel() * 4
    if provider == "ours":
        packed = sum(line.bytes_copied for line in recorded.values())
        assert packed == cost.moved or case.varies, (case.label, packed, cost.moved)
    passes = round(cost.moved / (2 * payload), 3) if payload else 0.0
    return {"messages": host.messages, "passes": passes, "synchronisations": host.synchronisations}


def limits(case: Case) -> dict[str, float]:
    """Limits of a row. Headers carry dtypes and any number of dims, and single messages are checked and counted."""
    return row_target(MORE_WORK if case.varies or not case.batched else ROW)


def measure(case: Case, host: Host, clock: Clock) -> Iterator[Row]:
    """All providers in one row."""
    with host.filling(case):
        hops = calls(case, host)
        assert_agree(case, hops)
        counted = {provider: count(case, provider, host) for provider in hops}
        by_count = {what: {provider: counted[provider][what] for provider in hops} for what in counted["ours"]}
        yield clock.time(case.label, hops, INNER, **limits(case), **by_count)


def missed(row: Row) -> list[str]:
    """No synchronisation, one message for every neighbour, and no more passes than a strided tensor needs."""
    (case,) = (case for case in CASES if case.label == row["row"])
    messages, passes, synchronisations = (row[what]["ours"] for what in ("messages", "passes", "synchronisations"))
    result = [f"{case.label}: {synchronisations} synchronisations, not one is needed"] if synchronisations else []
    if not case.varies and messages != len(case.sends):
        result.append(f"{case.label}: {messages} messages to {len(case.sends)} neighbours")
    if case.sends and not case.varies and passes != PASSES[case.tensors]:
        result.append(f"{case.label}: {passes:.3g} passes over memory, not {PASSES[case.tensors]}")
    return result


PART = megatron_part(
    name="p2p",
    unit="microseconds per hop",
    cases=CASES,
    measure=measure,
    host=Host,
    rounds=150,
    targets=missed,
)

test_case = PART.test()

if __name__ == "__main__":
    sys.exit(PART.main())
