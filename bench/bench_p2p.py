"""One hop between two pipeline stages: ours, torch.distributed.batch_isend_irecv by hand, Megatron-LM's communicator.

Ours is the method of ``P2PCommunicator``, and in the rows of ``stages`` ColossalAI's function of that name.

Host time is taken with small CPU tensors over a process group that moves nothing, so that what is compared is Python
and the calls into the backend; what arrives in a receive of int64, the shapes of variable lengths, is filled in for
everybody alike. Counted besides: messages sent, passes over memory (bytes read and written by local ops, as multiples
of once over what is sent), and calls that synchronise a device. Nobody but us sends a strided tensor: the others call
``contiguous()`` first. ``python bench/bench_p2p.py`` prints the table; ``--json PATH`` writes it with versions.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench import guard, part
from bench.timing import figures, geometric_mean, interleaved, quantile, quiet_host, versions
from tritoncomm import groups, p2p, record
from tritoncomm.groups import Group, ParallelMode
from tritoncomm.p2p import header

PART = "p2p"  # of the suite: the name of the results file
WORLD, RANK = 4, 1
SHAPE = (8, 2, 16)
ROUNDS, INNER = 150, 30
WORST = 1.05  # of Megatron's time
PROVIDERS = ("ours", "by hand", "megatron")
PASSES = {"one": 0, "strided": 1, "eight": 1}


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
        return {"recv_forward": (), "send_forward_backward_recv_forward_backward": ("next", "prev")}.get(
            self.method, ("next",)
        )

    @property
    def receives(self) -> tuple[str, ...]:
        return {
            "send_forward": (),
            "send_forward_recv_backward": ("next",),
            "send_forward_backward_recv_forward_backward": ("prev", "next"),
        }.get(self.method, ("prev",))


METHODS = (
    "send_forward",
    "recv_forward",
    "send_forward_recv_forward",
    "send_forward_backward_recv_forward_backward",
)


def cases() -> Iterator[Case]:
    for batched, stages in ((True, False), (False, False), (True, True)):
        for tensors in ("one", "strided", "eight"):
            yield Case("send_forward_recv_backward", tensors, batched, stages=stages)
        for method in METHODS:
            yield Case(method, "one", batched, stages=stages)
    for tensors in ("one", "strided", "eight"):
        yield Case("send_forward_recv_backward", tensors, varies=True)


CASES = list(cases())


@dataclass
class Row:
    """What one case takes, by provider."""

    case: Case
    samples: dict[str, list[float]] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)
    passes: dict[str, float] = field(default_factory=dict)
    synchronisations: dict[str, int] = field(default_factory=dict)

    def cost(self, provider: str) -> float:
        return quantile(self.samples[provider], 0.2)

    @property
    def ratio(self) -> float:
        return self.cost("ours") / self.cost("megatron")

    def figures(self) -> dict[str, Any]:
        """The row in the results file."""
        passes = {provider: round(self.passes[provider], 3) for provider in PROVIDERS}
        counts = {"messages": self.messages, "passes": passes, "synchronisations": self.synchronisations}
        return figures(self.case.label, self.samples, limit=WORST, **counts)

    @property
    def suspect(self) -> bool:
        """Above its limit, or worse than the committed figures."""
        return self.ratio > WORST or guard.is_worse(PART, self.figures())


class Traffic(TorchDispatchMode):
    """Sums the bytes that local ops read and write; views, allocations and what the backend does are free."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        aliases = [value.alias_info for value in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if namespace == "c10d" or is_view or name.startswith("empty") or name in ("detach", "set_", "_unsafe_view"):
            return result
        outputs = () if name == "copy_" else tree_leaves(result)  # in copy_ they are the first argument
        self.moved += sum(x.nbytes for x in (*tree_leaves((args, kwargs)), *outputs) if isinstance(x, Tensor))
        return result


class Host:
    """The fake group, and the CPU as the device that Megatron allocates on; counts what goes through."""

    def __init__(self) -> None:
        self.messages = self.synchronisations = 0

    def __enter__(self) -> "Host":
        dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
        assert dist.group.WORLD is not None
        self.group: ProcessGroup = dist.group.WORLD
        pipeline = Group(self.group, self.group, tuple(range(WORLD)))
        groups.register({ParallelMode.GLOBAL: pipeline, ParallelMode.PIPELINE: pipeline})
        self._before = torch.cuda.current_device, torch.cuda.synchronize
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore
        torch.cuda.synchronize = lambda device=None: None
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.current_device, torch.cuda.synchronize = self._before
        groups.register({})
        dist.destroy_process_group()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count messages and synchronisations inside."""
        send = ProcessGroup.send
        quiet = torch.cuda.synchronize
        self.messages = self.synchronisations = 0

        def counted(group: ProcessGroup, tensors: list[Tensor], *args: Any) -> Any:
            self.messages += len(tensors)
            return send(group, tensors, *args)

        def synchronize(device: Any = None) -> None:
            self.synchronisations += 1

        with _patched(ProcessGroup, "send", counted):
            torch.cuda.synchronize = synchronize
            try:
                yield
            finally:
                torch.cuda.synchronize = quiet

    @contextmanager
    def filling(self, case: Case) -> Iterator[None]:
        """Let the shapes arrive that the senders of variable lengths announce."""
        if not case.varies:
            yield
            return
        count = 8 if case.tensors == "eight" else 1
        words = header.encode(header.describe_tensors([torch.empty(SHAPE)] * count))
        arrives = {len(part): part for part in (words[: header.WORDS], words[header.WORDS :], torch.tensor(SHAPE))}
        recv = ProcessGroup.recv

        def filled(group: ProcessGroup, tensors: list[Tensor], *args: Any) -> Any:
            (x,) = tensors
            if x.dtype is torch.int64:
                x.copy_(arrives[x.numel()])
            return recv(group, tensors, *args)

        with _patched(ProcessGroup, "recv", filled):
            yield


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name]  # as it is stored: what getattr gives cannot be put back
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


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
    """What goes to one neighbour, as it leaves a layer."""
    if case.tensors == "strided":
        return [torch.randn(*SHAPE[:-1], 2 * SHAPE[-1], requires_grad=True)[..., : SHAPE[-1]]]
    return [torch.randn(SHAPE, requires_grad=True) * 1.0 for _ in range(8 if case.tensors == "eight" else 1)]


def through(communicator: Any, case: Case, tensors: list[Tensor], contiguous: bool) -> Callable[[], Any]:
    """A hop of a communicator, of ours or of Megatron's."""
    method, many = getattr(communicator, case.method), len(tensors) > 1
    (first, *_), shapes = tensors, [SHAPE] * len(tensors)

    def given() -> Any:
        if many:
            return [x.contiguous() for x in tensors] if contiguous else tensors
        return first.contiguous() if contiguous else first

    if case.method == "send_forward_recv_backward":
        return lambda: method(given(), shapes, False)
    if case.method == "send_forward":
        return lambda: method(given(), False)
    if case.method == "recv_forward":
        return lambda: method(shapes if many else SHAPE, False)
    if case.method == "send_forward_recv_forward":
        return lambda: method(given(), recv_prev=True, tensor_shape=SHAPE)
    return lambda: method(given(), given(), recv_prev=True, recv_next=True, tensor_shape=SHAPE)


def through_stages(case: Case, tensors: list[Tensor]) -> Callable[[], Any]:
    """A hop of a stage function."""
    function, many = getattr(p2p, case.method), len(tensors) > 1
    x, shape = (tensors, [SHAPE] * len(tensors)) if many else (tensors[0], SHAPE)
    arguments = {
        "send_forward": (x,),
        "recv_forward": (shape,),
        "send_forward_recv_backward": (x, shape),
        "send_forward_recv_forward": (x, shape),
        "send_forward_backward_recv_forward_backward": (x, x, shape, shape),
    }[case.method]
    return lambda: function(*arguments)


def by_hand(group: ProcessGroup, case: Case, tensors: list[Tensor]) -> Callable[[], Any]:
    """The same with nothing around it: a list of operations, one batch, every request waited for."""
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


def calls(case: Case, peer: Any, host: Host) -> dict[str, Callable[[], Any]]:
    """The hop of every provider."""
    tensors, settings = inputs(case), _settings(case)
    ours = through(p2p.P2PCommunicator(host.group, settings), case, tensors, False)
    return {
        "ours": through_stages(case, tensors) if case.stages else ours,
        "by hand": by_hand(host.group, case, tensors),
        "megatron": through(peer.P2PCommunicator(host.group, settings), case, tensors, case.tensors == "strided"),
    }


def assert_agree(case: Case, found: dict[str, Callable[[], Any]]) -> None:
    """What is received has the same form; the fake group moves no data, so values are left to the tests."""
    wanted = len(case.receives) * (8 if case.tensors == "eight" else 1)
    for provider, call in found.items():
        received = [x for x in tree_leaves(call()) if x is not None]
        assert len(received) == wanted, (case.label, provider)
        for x in received:
            assert (tuple(x.shape), x.dtype) == (SHAPE, torch.float32), (case.label, provider)
            assert (x.requires_grad, x.is_leaf) == (True, True), (case.label, provider)


def count(row: Row, provider: str, peer: Any, host: Host) -> None:
    """Messages, passes and synchronisations of one hop, the second of its communicator."""
    with host.counting():
        call = calls(row.case, peer, host)[provider]
        call()
        host.messages = host.synchronisations = 0
        with record.recording() as recorded, Traffic() as traffic:
            call()
    payload = len(row.case.sends) * len(inputs(row.case)) * torch.Size(SHAPE).numel() * 4
    row.messages[provider], row.synchronisations[provider] = host.messages, host.synchronisations
    row.passes[provider] = traffic.moved / (2 * payload) if payload else 0.0
    if provider == "ours":
        packed = sum(line.packed for line in recorded.values())
        assert packed == traffic.moved or row.case.varies, (row.case.label, packed, traffic.moved)


def measure(case: Case, peer: Any, host: Host, rounds: int = ROUNDS, inner: int = INNER) -> Row:
    """All providers in one row; one that misses a limit gets as many rounds again, pooled with the first."""
    row = Row(case)
    with host.filling(case):
        found = calls(case, peer, host)
        assert_agree(case, found)
        for provider in found:
            count(row, provider, peer, host)
        with quiet_host():
            row.samples = dict(zip(found, interleaved(list(found.values()), rounds, inner), strict=True))
            if row.suspect:
                for kept, more in zip(
                    row.samples.values(), interleaved(list(found.values()), rounds, inner), strict=True
                ):
                    kept += more
    return row


def table(rows: list[Row]) -> str:
    """One line per hop: microseconds at p20, ours of Megatron's, messages, passes and synchronisations."""
    width = max(len(row.case.label) for row in rows)
    head = ("us: ours", "by hand", "megatron", "ours of it", "messages", "passes", "syncs")
    lines = [f"{'p20; ours / by hand / megatron':{width}}" + "".join(f"  {name:>11}" for name in head)]
    for row in rows:
        cells = [f"{row.cost(provider):.1f}" for provider in PROVIDERS]
        cells.append(f"{row.ratio:.2f}")
        cells.append(" / ".join(str(row.messages[provider]) for provider in PROVIDERS))
        cells.append(" / ".join(f"{row.passes[provider]:.3g}" for provider in PROVIDERS))
        cells.append(" / ".join(str(row.synchronisations[provider]) for provider in PROVIDERS))
        lines.append(f"{row.case.label:{width}}" + "".join(f"  {cell:>11}" for cell in cells))
    lines.append(f"{'geometric mean':{width}}" + f"  {geometric_mean([row.ratio for row in rows]):50.2f}")
    return "\n".join(lines)


def failures(rows: list[Row]) -> list[str]:
    """What misses the targets."""
    found = []
    for row in rows:
        label, case = row.case.label, row.case
        if row.ratio > WORST:
            found.append(f"{label}: {row.ratio:.2f} of Megatron's time, at most {WORST}")
        if row.synchronisations["ours"]:
            found.append(f"{label}: {row.synchronisations['ours']} synchronisations, not one is needed")
        if not case.varies and row.messages["ours"] != len(case.sends):
            found.append(f"{label}: {row.messages['ours']} messages to {len(case.sends)} neighbours")
        if case.sends and not case.varies and row.passes["ours"] != PASSES[case.tensors]:
            found.append(f"{label}: {row.passes['ours']:.3g} passes over memory, not {PASSES[case.tensors]}")
    return found


def as_json(rows: list[Row]) -> dict[str, Any]:
    return {
        "versions": versions("megatron-core"),
        "unit": "microseconds per hop",
        "world": WORLD,
        "rows": [row.figures() for row in rows],
        "geometric_mean": round(geometric_mean([row.ratio for row in rows]), 3),
    }


def load_peer() -> Any | None:
    """Megatron's communicator, or None when megatron-core is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import megatron.core.pipeline_parallel.p2p_communication as peer
    except ImportError:
        return None
    return peer


@pytest.fixture(scope="module")
def peer() -> Any:
    found = load_peer()
    if found is None:
        pytest.skip("megatron-core is not installed: there is nothing to compare a hop with")
    return found


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host() as made:
        yield made


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_hop_costs_no_more_than_megatrons(benchmark: Any, case: Case, peer: Any, host: Host, rows: list[Row]) -> None:
    row = measure(case, peer, host)
    rows.append(row)
    benchmark.extra_info.update(ratio=round(row.ratio, 3), messages=row.messages["ours"], passes=row.passes["ours"])
    with host.filling(case):
        benchmark.pedantic(calls(case, peer, host)["ours"], rounds=20, iterations=INNER, warmup_rounds=1)
    assert not failures([row])
    assert not [str(line) for line in guard.against_committed(PART, {"rows": [row.figures()]})]


def test_hops_together(peer: Any, rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    if len(rows) < len(CASES):
        pytest.skip(f"{len(rows)} of {len(CASES)} hops were measured")
    with capsys.disabled():
        print("\n" + table(rows))


def main() -> int:
    options = part.arguments("One hop between two pipeline stages against megatron-core's.", "hops", ROUNDS)
    peer = load_peer()
    if peer is None:
        print("megatron-core is not installed: there is nothing to compare a hop with")
        return 2
    warnings.simplefilter("ignore")
    with Host() as host:
        rows = [measure(case, peer, host, options.rounds) for case in CASES if options.only in case.label]
    return part.finish(PART, rows, options.json, table, failures, as_json)


if __name__ == "__main__":
    sys.exit(main())
