"""Examination of a machine for training over several ranks: versions, backends, GPUs, links, tables and variables."""

import math
import os
import re
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist
from tritoncomm_kernels import installed_triton, tables

from tritoncomm import launchers, variables
from tritoncomm.debug.torch_recorder import Recorder, buffer_size, has_starts
from tritoncomm.doctor import selftest
from tritoncomm.errors import GroupError
from tritoncomm.parsing import counted
from tritoncomm.tune.machine_code import TARGETS
from tritoncomm.tune.measure import architecture

__all__ = ["Finding", "compute_mode", "examine"]

NEEDED = {"torch": (2, 11)}
OPEN_FILES = 256
"""Files that a rank may have open beside a socket for every other rank."""
_RUN = {"sm_90": "H100 and an H200"}  # architectures on which the GPU tests passed
VARIABLES = (
    "TRITONCOMM_PATH", "TRITONCOMM_TABLE", "TRITONCOMM_CHECK", "TRITONCOMM_FLIGHT", "TRITONCOMM_FLIGHT_SIGNALS",
    "TRITONCOMM_STRICT", "TRITONCOMM_NODE", "TRITONCOMM_MEGATRON",
    "TRITON_INTERPRET", "TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_DEBUG", "TORCH_DIST_USE_NCCL2", "TORCH_DISTRIBUTED_DEBUG",
)  # fmt: skip
# Failures of the self test that are errors of the program or of the installation.
_NO_NETWORK = re.compile(r"rank \d: (tritoncomm\.errors\.|(ModuleNotFound|Import|Attribute|Name)Error|\w+ gave wrong)")


@dataclass(frozen=True, slots=True)
class Finding:
    """One aspect of the machine.

    Attributes:
        value: state of the aspect.
        level: ``ok``, ``note`` (worth knowing) or ``problem``.
        advice: remedy, empty when all is well.
    """

    name: str
    value: str
    level: str = "ok"
    advice: str = ""


def examine(self_test: bool = True) -> Iterator[Finding]:
    """Yield the findings one by one; the self test, which takes seconds, comes last."""
    yield Finding("python", f"{sys.version.split()[0]}")
    for package, minimum in NEEDED.items():
        yield _version(package, minimum)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield from _triton(count > 0)
    yield from _backends()
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    yield from _gpus(gpus)
    yield from _compute_mode(count)
    yield from _links(count)
    yield from _tables({(gpu.name, gpu.multi_processor_count) for gpu in gpus})
    yield _recorder()
    yield from _launcher()
    yield _open_files(count > 0)
    # Findings on variables. The self test runs without those that are a problem.
    judged = [_variable(name) for name in VARIABLES if name in os.environ]
    yield from judged
    for name in sorted(os.environ):
        if name == "TORCH_NCCL_ASYNC_ERROR_HANDLING" and "TORCHELASTIC_RUN_ID" in os.environ:
            continue  # torchrun sets it
        if name == "NCCL_VERSION":
            continue  # NVIDIA's images set it, and NCCL does not read it
        if name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_")) and name not in VARIABLES:
            yield Finding(name, os.environ[name], "note", "unset it unless you know why it is there")
    for name, advice in variables.unknown().items():
        yield Finding(name, os.environ[name], "note", advice)
    if self_test:
        wrong = {one.name for one in judged if one.level == "problem"}
        yield _self_test(tuple(name for name in variables.effective() if name in wrong))


def _version(package: str, minimum: tuple[int, int]) -> Finding:
    """Examine whether a package is installed in the version that is needed."""
    needed = ".".join(map(str, minimum))
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return Finding(package, "not installed", "problem", f"pip install '{package}>={needed}'")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < minimum:
        return Finding(package, version, "problem", f"too old: pip install '{package}>={needed}'")
    return Finding(package, version)


def _triton(has_gpu: bool) -> Iterator[Finding]:
    """Examine Triton, which only kernels need, and how it launches them: the ordinary way costs the host more."""
    version, problem = installed_triton.version(), installed_triton.problem()
    if problem:
        yield Finding("triton", version or "not installed", "problem" if has_gpu else "note", problem)
        return
    yield Finding("triton", version)
    if not has_gpu:
        return  # nothing would be launched
    from tritoncomm_kernels.launch import launch_kind  # imports Triton, which is there

    kind = launch_kind()  # by the C launcher, by Triton's Python launcher (run), or as any program
    if kind == "C" or (kind == "run" and torch.version.hip):  # of HIP there is no other direct one
        yield Finding("kernel launch", "direct")
        return
    value = "by Triton's Python" if kind == "run" else "the ordinary one"
    advice = f"correct, at {'1' if kind == 'run' else '10'} us more of host time: this build of Triton is not known"
    yield Finding("kernel launch", value, "note", advice)


def _backends() -> Iterator[Finding]:
    """Examine Gloo and NCCL, as far as torch was built with them."""
    if dist.is_gloo_available():
        yield Finding("Gloo", "built in")
    else:
        yield Finding("Gloo", "missing", "problem", "install a build of torch with Gloo: CPU tensors need it")
    if dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "built in"
        kind = nccl_kind()
        yield Finding("NCCL", f'{version}; backend "nccl" is {kind}' if kind else version)
    elif torch.cuda.is_available():
        yield Finding("NCCL", "missing", "problem", "install a CUDA build of torch with NCCL")
    else:
        yield Finding("NCCL", "not in this build of torch", "note", "needed for GPUs only")


def nccl_kind() -> str:
    """Return the implementation behind the backend name "nccl" where torch has two (2.14 and newer), else nothing."""
    c10d: Any = dist.distributed_c10d
    if not hasattr(c10d, "ProcessGroupNCCL2"):
        return ""
    getattr(c10d.Backend, "_ensure_backend_registered", lambda name: None)("nccl")
    # The registered function decides, so the answer holds for a program's own backend of that name too.
    creator = getattr(c10d.Backend._plugins.get("NCCL"), "creator_fn", None)
    if creator is None:  # torch chooses when it makes a group
        return "nccl2" if os.environ.get("TORCH_DIST_USE_NCCL2") == "1" else "nccl-legacy"
    names = {"_create_nccl2_process_group": "nccl2", "_create_nccl_process_group": "nccl-legacy"}
    names["_create_nccl_lazy_process_group"] = "nccl-lazy"
    name = getattr(creator, "__name__", repr(creator))
    return names.get(name, name)


def _recorder() -> Finding:
    """Examine whether a flight record can say which call hangs on the device."""
    if problem := Recorder().problem:
        advice = "without it a flight record does not say which call hangs on the device"
        if not dist.is_nccl_available():
            advice = "needed for GPUs only"
        return Finding("torch's recorder", problem, "note", advice)
    starts = "and when a device begins one" if has_starts() else "not when a device begins one"
    return Finding("torch's recorder", f"on: keeps {buffer_size()} collectives, {starts}")


def _launcher() -> Iterator[Finding]:
    """Examine the launcher of this process, and the place where its ranks would meet."""
    try:
        launch, meeting = launchers.started_by(os.environ), launchers.rendezvous(os.environ)
    except GroupError as error:
        yield Finding("launcher", str(error), "problem", "`initialize()` would refuse this")
        return
    if launch is not None:
        where = f"; the ranks meet at {meeting['MASTER_ADDR']}:{meeting['MASTER_PORT']}" if meeting else ""
        yield Finding("launcher", f"{launch.launcher}: this is rank {launch.rank} of {launch.size}{where}")


def _open_files(has_gpu: bool) -> Finding:
    """Examine the limit of open files against the sockets that a rank of this job may need."""
    try:
        launch = launchers.started_by(os.environ)
        ranks = launch.size if launch else launchers.world_size(os.environ) or 1
        is_first = launchers.is_first(launch) if launch else os.environ.get("RANK", "0") == "0"
    except GroupError:  # `_launcher` has told it
        ranks, is_first = 1, True
    soft, hard = (
        math.inf if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    # Over Gloo every rank has connections to all others. In a job over NCCL the first one has, as it holds the store;
    # the others have some to the ranks of a CPU group that they use.
    connects_to_all = is_first or not has_gpu
    needed = ranks + OPEN_FILES
    value = f"{soft:.0f} in a process, for {counted(ranks, 'rank')}"
    if soft >= needed:
        return Finding("open files", value)
    advice = f"`ulimit -n {needed}` on every node, before the job starts"
    if hard < needed:
        advice += f"; root has to raise the hard limit, {hard:.0f}, first"
    return Finding("open files", value, "problem" if connects_to_all else "note", advice)


def _gpus(gpus: Sequence[Any]) -> Iterator[Finding]:
    """Report every GPU, and whether the kernels were compiled for its architecture; ``gpus`` are torch's properties."""
    if not gpus:
        hint = "mappings run over Gloo with torch's copies; kernels run on GPUs, and interpreted"
        if shutil.which("nvidia-smi"):
            hint = "the driver is there: is this a CPU build of torch, or is CUDA_VISIBLE_DEVICES empty?"
        yield Finding("GPUs", "none that torch can use", "note", hint)
    for index, gpu in enumerate(gpus):
        size = f"{gpu.total_memory / 2**30:.0f} GiB, {gpu.multi_processor_count} SMs"
        yield Finding(f"GPU {index}", f"{gpu.name}, {size}, {architecture(gpu)}")
    for name in sorted({architecture(gpu) for gpu in gpus}):
        if name in _RUN:
            yield Finding(f"kernels on {name}", f"tests and benchmarks ran on an {_RUN[name]}")
            continue
        tested = "compiled for it in tests" if name in TARGETS else f"tests compile for {', '.join(TARGETS)} only"
        yield Finding(f"kernels on {name}", f"{tested}; never run on it", "note", "`make gpu` of a checkout runs them")


def compute_mode() -> str:
    """Return the compute mode of the first GPU as ``nvidia-smi`` names it, empty where it does not say."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ""
    command = [smi, "--query-gpu=compute_mode", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def _compute_mode(count: int) -> Iterator[Finding]:
    """Report a mode in which a GPU takes one process at a time, or none."""
    mode = compute_mode() if count else ""
    if mode not in ("", "Default"):
        advice = "several ranks cannot share a GPU, as the demo's do on one: a GPU for each, or `nvidia-smi -c DEFAULT`"
        yield Finding("compute mode", mode, "note", advice)


def _links(count: int) -> Iterator[Finding]:
    """Examine whether every pair of GPUs can reach each other's memory, and the links between them."""
    if count < 2:
        return
    pairs = combinations(range(count), 2)
    unreachable = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if unreachable:
        advice = "NCCL goes through host memory there: look at `nvidia-smi topo -m`, at ACS and at /dev/shm"
        yield Finding("peer access", f"not between GPUs {', '.join(unreachable)}", "note", advice)
    else:
        yield Finding("peer access", "between all GPUs")
    if smi := shutil.which("nvidia-smi"):
        done = subprocess.run([smi, "topo", "-m"], capture_output=True, text=True, timeout=30, check=False)
        links = [line.split()[: count + 1] for line in done.stdout.splitlines() if line.startswith("GPU")]
        kinds = sorted({cell for row in links for cell in row[1:]} - {"X"})
        yield Finding("links", ", ".join(kinds) or "unknown: nvidia-smi topo -m printed nothing")


def _tables(kinds: set[tuple[str, int]]) -> Iterator[Finding]:
    """Examine the tuned tables that apply to every kind of GPU here."""
    for name, multiprocessors in sorted(kinds):
        with warnings.catch_warnings(record=True) as ignored:
            warnings.simplefilter("always")
            chosen = tables.chosen(name, multiprocessors)
        for one in ignored:
            yield Finding("tuned table", str(one.message), "note", "see `Which table counts` in docs/tuning.md")
        if chosen:
            digest = tables.digest(name, multiprocessors)
            yield Finding("tuned table", f"{', '.join(table.origin for table in chosen)} (digest {digest})")
        else:
            yield Finding("tuned table", f"none for {name}: built-in rules", "note", "`tritoncomm tune` makes one")
    if not kinds:
        yield Finding("tuned table", "none in use without a GPU", "note", "`tritoncomm tune` makes one on a GPU")


def _variable(name: str) -> Finding:
    """Return the effect of a variable of ``VARIABLES`` on a job."""
    value = os.environ[name]
    if name == tables.VARIABLE:
        return _table_variable(name, value)
    if name == variables.PATH.name and not variables.is_on(value):
        value = "auto"
    return Finding(name, value if value.strip() else repr(value), *_judged(name, value))


def _judged(name: str, value: str) -> tuple[str, str]:
    """Return level and advice of a variable."""
    gpu = torch.cuda.is_available()
    match name:
        case "TRITONCOMM_PATH" if value not in variables.PATHS:
            return "problem", "no path of this name: auto, torch or triton"
        case "TRITONCOMM_PATH" if value == "triton" and not gpu and os.environ.get("TRITON_INTERPRET") != "1":
            return "problem", "kernels need a GPU: unset it, or set TRITON_INTERPRET=1 to debug"
        case "TRITONCOMM_PATH" if value == "triton" and installed_triton.problem():
            return "problem", installed_triton.problem()
        case "TRITONCOMM_PATH" if value != "auto":
            return "note", "forces one path"
        case "TRITONCOMM_CHECK" if variables.check_problem(value):
            return "problem", variables.check_problem(value)
        case "TRITONCOMM_CHECK" if interval := variables.hash_interval(value):
            collectives = f"ranks compare one digest every {counted(interval, 'collective')}"
            return "note", f"{collectives}; p2p steps are compared with TRITONCOMM_CHECK=1 only; set it on all ranks"
        case "TRITONCOMM_CHECK" if variables.is_on(value):
            return "note", "ranks compare their calls, for debugging; set it on all ranks or none"
        case "TRITONCOMM_FLIGHT" if variables.is_on(value):
            calls, folder = variables.flight_of(value)
            if folder and not _can_be_written(Path(folder)):
                return "problem", f"no record can be written to {folder}"
            where = f"{folder}, one every 10 s too" if folder else "the current folder"
            return "note", f"keeps the last {calls} calls; records go to {where}"
        case "TRITONCOMM_MEGATRON" | "TRITONCOMM_STRICT" | "TRITONCOMM_FLIGHT_SIGNALS" if variables.switch_problem(
            value
        ):
            return "problem", variables.switch_problem(value)
        case "TRITONCOMM_STRICT" if variables.is_on(value):
            return "note", "optimizers that are not known to be element-wise raise for shards; set it on all ranks"
        case "TRITONCOMM_MEGATRON" if value.strip() and not variables.is_on(value):
            return "note", "`patch_megatron()` replaces nothing; set it on all ranks"
        case "TRITONCOMM_FLIGHT_SIGNALS" if variables.is_on(value):
            if not variables.is_on(os.environ.get(variables.FLIGHT.name, "")):
                return "note", f"does nothing without {variables.FLIGHT.name}"
            return "note", "SIGUSR1 and SIGTERM write the flight record, beside the program's own handlers"
        case "TORCH_NCCL_ENABLE_TIMING" if has_starts():
            return "note", "torch's recorder knows when a device begins a collective, at the cost of an event for each"
        case "TRITON_INTERPRET" if value == "1" and gpu:
            return "problem", "kernels run in Python, thousands of times slower: unset it"
        case "TRITON_INTERPRET":
            return "note", "kernels run in Python, for debugging"
        case "CUDA_DEVICE_MAX_CONNECTIONS" if value == "1":
            return "note", "keeps Megatron-LM's order of kernels; newer GPUs do not need it"
        case "CUDA_VISIBLE_DEVICES" if not value.strip() or value.strip().startswith("-1"):
            return "note", "hides every GPU"
        case "CUDA_LAUNCH_BLOCKING" | "NCCL_P2P_DISABLE" | "NCCL_SHM_DISABLE" | "NCCL_IB_DISABLE" if value.strip("0"):
            return "problem", "turns the fast way between GPUs off: unset it"
        case "TORCH_DIST_USE_NCCL2":
            return "note", 'chooses what backend "nccl" is, see above; unset it unless you know why'
        case "TORCH_DISTRIBUTED_DEBUG" if value.upper() == "DETAIL" and nccl_kind() == "nccl2":
            return "problem", "nccl2 does not support it: unset it, or take backend nccl-legacy"
        case "NCCL_DEBUG" | "TORCH_DISTRIBUTED_DEBUG" if value.upper() in ("INFO", "TRACE", "DETAIL"):
            return "note", "slows every collective down: for debugging only"
    return "ok", ""


def _can_be_written(folder: Path) -> bool:
    """Whether a file can be made in a folder, or the folder itself."""
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _table_variable(name: str, value: str) -> Finding:
    """Examine the file or folder that TRITONCOMM_TABLE names."""
    named = tables.variable()
    if not named:
        return Finding(name, repr(value))
    if named == "none":
        return Finding(name, repr(value), "note", "no tuned table is read")
    try:
        path = tables.expanded(named)
        if path.is_dir():
            files = sorted(file.name for file in path.glob("*.json"))
            if files:
                return Finding(name, f"{value}: {', '.join(files)}")
            advice = "`tritoncomm tune --out` that folder, on each kind of GPU"
            return Finding(name, f"{value}: no table in it", "problem", advice)
        table = tables.read(path)
    except (OSError, tables.TableError) as error:
        return Finding(name, f"{value}: {error}", "problem", "built-in rules are used: name a table, or unset it")
    return Finding(name, f"{value}: for {table.device} with {table.sm_count} SMs")


def _self_test(without: tuple[str, ...]) -> Finding:
    """Let two ranks exchange known values, without the variables that are wrong: the test is of the connection."""
    backend = "nccl" if dist.is_nccl_available() and torch.cuda.device_count() > 1 else "gloo"
    what = "all_to_all_sp2hp over two ranks, forward and backward"
    wrong = selftest.run(backend, without=without)
    value = f"{what}, {backend}: {wrong or 'exact'}" + (f" (without {', '.join(without)})" if without else "")
    if not wrong:
        return Finding("self test", value)
    advice = "run it with NCCL_DEBUG=INFO; check the variables above and `nvidia-smi topo -m`"
    if backend == "gloo":
        advice = "check GLOO_SOCKET_IFNAME, and that this machine's own name resolves (`getent hosts $(hostname)`)"
    if _NO_NETWORK.match(wrong):
        advice = "the network is not to blame: check the findings above and the installation (`pip check`)"
    return Finding("self test", value, "problem", advice)
