"""Megatron-LM's own pipeline schedules, unedited, with our communicator: losses and gradients of one process."""

import importlib
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from tritoncomm import p2p, record

try:
    _installed = metadata.version("megatron-core")
except metadata.PackageNotFoundError:
    _installed = ""

pytestmark = pytest.mark.skipif(
    not _installed,
    reason="megatron-core is not installed: there are no schedules to drive (make test-rest installs it)",
)

MODULES = ("pipeline_parallel.schedules", "model_parallel_config", "enums", "transformer.multi_token_prediction")
BATCH, HIDDEN, LENGTH = 2, 8, 6


@dataclass(frozen=True)
class Case:
    """One way to configure a schedule.

    Attributes:
        chunks: model chunks per rank, the virtual size.
        interleaved: the schedule that Megatron takes for a virtual size, also of 1.
        strided: every chunk hands on a tensor that is not contiguous.
        checked: in check mode, a header ahead of every message.
        forward_only: an evaluation, without gradients.
        length: tokens of the longest micro-batch.
        settings: fields of Megatron's config.
    """

    name: str
    chunks: int = 1
    interleaved: bool = False
    micro_batches: int = 8
    dtype: torch.dtype = torch.float32
    strided: bool = False
    checked: bool = False
    forward_only: bool = False
    length: int = LENGTH
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def varies(self) -> bool:
        return bool(self.settings.get("variable_seq_lengths"))

    def tokens(self, micro_batch: int) -> int:
        return self.length - micro_batch % 4 if self.varies else self.length


def cases() -> Iterator[Case]:
    """Every combination of what a schedule can be told about its hops, and a few that stand alone."""
    ways = {
        "batched": {"batch_p2p_comm": True},
        "single": {"batch_p2p_comm": False},
        "overlap": {"batch_p2p_comm": False, "overlap_p2p_comm": True},
        "overlap-flush": {"batch_p2p_comm": False, "overlap_p2p_comm": True, "overlap_p2p_comm_warmup_flush": True},
    }
    for form, chunks, interleaved in (("1f1b", 1, False), ("virtual-1", 1, True), ("virtual-2", 2, True)):
        for way, settings in ways.items():
            if "overlap_p2p_comm" in settings and chunks == 1:
                continue  # one schedule refuses it, the other fails on a last stage without warm-up
            for varies in (False, True):
                for deallocate in (False, True):
                    name = "-".join([form, way, *["variable"] * varies, *["deallocate"] * deallocate])
                    more = {"variable_seq_lengths": varies, "deallocate_pipeline_outputs": deallocate}
                    yield Case(name, chunks, interleaved, settings=settings | more)
    freed = {"deallocate_pipeline_outputs": True}
    yield Case("1f1b-bfloat16", dtype=torch.bfloat16)
    yield Case("virtual-2-overlap-bfloat16", 2, True, dtype=torch.bfloat16, settings=ways["overlap"] | freed)
    yield Case("1f1b-strided", strided=True)
    yield Case("virtual-2-strided", 2, True, strided=True, settings={"variable_seq_lengths": True})
    yield Case("1f1b-checked", checked=True, settings=freed)
    yield Case("virtual-2-checked", 2, True, checked=True, settings=freed)
    yield Case("virtual-2-overlap-checked", 2, True, checked=True, settings=ways["overlap"] | freed)
    yield Case("1f1b-forward-only", forward_only=True, settings={"variable_seq_lengths": True})
    yield Case("virtual-2-forward-only", 2, True, forward_only=True, settings={"variable_seq_lengths": True})
    yield Case("1f1b-one-micro-batch", micro_batches=1)
    grouped = {"microbatch_group_size_per_vp_stage": 5}
    yield Case("virtual-2-groups-of-5", 2, True, micro_batches=10, settings=grouped | freed)
    yield Case("virtual-2-overlap-groups-of-5", 2, True, micro_batches=10, settings=ways["overlap-flush"] | grouped)
    yield Case("virtual-2-overlap-long", 2, True, length=2048, settings=ways["overlap"] | freed)
    yield Case("virtual-2-flush-long", 2, True, length=2048, settings=ways["overlap-flush"] | freed)
    flush = ways["overlap-flush"] | freed
    yield Case("virtual-2-flush-long-forward-only", 2, True, length=16384, forward_only=True, settings=flush)


CASES = {case.name: case for case in cases()}


class OnTheCPU(TorchFunctionMode):
    """Everything that is to be made on a GPU is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Chunk(nn.Module):
    """Some layers of the model, with what Megatron's schedules ask of one."""

    def __init__(self, case: Case, place: int, config: Any, model_type: Any) -> None:
        super().__init__()
        self.config, self.model_type, self.strided = config, model_type, case.strided
        generator = torch.Generator().manual_seed(place)
        self.layers = nn.Sequential(nn.Linear(HIDDEN, 3 * HIDDEN), nn.Tanh(), nn.Linear(3 * HIDDEN, HIDDEN))
        for parameter in self.layers.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)
        self.layers.to(case.dtype)
        self.received: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        (self.received,) = tensors

    def forward(self, x: Tensor) -> Tensor:
        if self.strided:
            return self.layers(x.transpose(0, 1)).transpose(0, 1)
        return x + self.layers(x)


def batches(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((case.tokens(i), BATCH, HIDDEN) for i in range(case.micro_batches))
    return [torch.randn(shape, generator=generator).to(case.dtype) for shape in shapes]


def forward_step(data: Iterator[Tensor], chunk: Chunk) -> tuple[Tensor, Any]:
    batch = next(data)
    out = chunk(batch if chunk.received is None else chunk.received)
    return out, lambda y: ((loss := y.float().square().mean()), loss.detach().clone())


def one_process(case: Case, chunks: list[Chunk]) -> list[Tensor]:
    """Losses of the whole model; its gradients are in ``chunks``."""
    losses = []
    for x in batches(case):
        for chunk in chunks:
            x = chunk(x)
        loss = x.float().square().mean()
        losses.append(loss.detach().clone())
        if not case.forward_only:
            (loss / case.micro_batches).backward()
    return losses


def run_schedule(group: ProcessGroup, name: str) -> tuple[int, int, int]:
    """Run one case; on this rank: hops, bytes packed for them, headers sent and received."""
    case = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Megatron misses on this machine, it says while it is imported
        schedules, configs, enums, _ = (importlib.import_module(f"megatron.core.{module}") for module in MODULES)
    stages, stage = group.size(), group.rank()
    config = configs.ModelParallelConfig(
        pipeline_model_parallel_size=stages,
        pipeline_dtype=case.dtype,
        virtual_pipeline_model_parallel_size=case.chunks if case.interleaved else None,
        **case.settings,
    )
    config.hidden_size, config.fine_grained_activation_offloading = HIDDEN, False
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    collection = importlib.import_module("megatron.core.process_groups_config").ProcessGroupCollection
    groups = collection.__new__(collection)  # 0.17 and newer look at the type
    vars(groups).update(tp=alone, cp=alone, embd=None, pos_embd=None, pp=group, dp_cp=alone)
    kind = enums.ModelType.encoder_or_decoder
    places = range(stage, stages * case.chunks, stages)
    mine = [Chunk(case, place, config, kind) for place in places]
    schedule = schedules.forward_backward_pipelining_without_interleaving
    if case.interleaved:
        schedule = schedules.forward_backward_pipelining_with_interleaving
    check = p2p.check() if case.checked else nullcontext()
    grad = torch.set_grad_enabled(not case.forward_only)
    with OnTheCPU(), check, grad, record.recording() as counted:
        losses = schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(batches(case)) for _ in mine],
            model=mine,
            num_microbatches=case.micro_batches,
            seq_length=case.length,
            micro_batch_size=BATCH,
            forward_only=case.forward_only,
            p2p_communicator=p2p.P2PCommunicator(group, config),
            pg_collection=groups,
        )
    whole = [Chunk(case, place, config, kind) for place in range(stages * case.chunks)]
    wanted = one_process(case, whole)
    if stage == stages - 1:
        torch.testing.assert_close(losses, wanted, rtol=0, atol=0)
    else:
        assert losses == []
    for chunk, place in zip(mine, places, strict=True):
        for (label, ours), theirs in zip(chunk.named_parameters(), whole[place].parameters(), strict=True):
            torch.testing.assert_close(
                ours.grad, theirs.grad, rtol=0, atol=0, msg=lambda text, at=(place, label): f"{at}: {text}"
            )
            assert case.forward_only or ours.grad is not None
    hops = [count for (called, _), count in counted.items() if not called.endswith(".header")]
    headers = [count for (called, _), count in counted.items() if called.endswith(".header")]
    return sum(x.calls for x in hops), sum(x.bytes_copied for x in hops), sum(x.calls for x in headers)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_as_one_process(pool: Pool, name: str, world: int) -> None:
    case = CASES[name]
    hops, packed, headers = zip(*pool.run(run_schedule, name, world=world, timeout=60), strict=True)
    assert all(hops)
    assert all(headers) == any(headers) == (case.varies or case.checked)
    assert any(packed) == case.strided, "strided tensors are copied before they are sent, and no others"
