"""Drawn reshardings: layouts that fit and others, on all ranks or on one, and what has to come of them.

What a layout means is worked out here by slicing a tensor of indices, so that a wrong box is a wrong value.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from fuzz_calls import bits, filled, group_of, named, problem_of, tensor_of
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from mapping_cases import with_layout
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tritoncomm import p2p
from tritoncomm.reshard import Layout, OwnedExchange, exchange_owned, request, reshard, reshard_plan

__all__ = ["Resharding", "reshardings", "run_resharding"]

_FLOATS = ("float32", "bfloat16", "float16", "float64")
_DTYPES = [*_FLOATS, "int64", "bool", "complex64", "float8_e5m2", "uint16"]
_ODD = [None, True, 1.5, "1", -1, 9, 2**40, 2**70, (), float("nan"), b"x", [0], 1j]
FAULTS = (
    "", "", "", "", "", "shape", "dtype", "missing", "extra", "kind", "layout", "target", "grad", "bucket", "names",
    "out",
)  # fmt: skip
_KINDS = ["plain", "plain", "leaf", "leaf", "parameter", "inference", "subclass"]
_PLANNED = ("plan", "dtypes", "owned", "exchange")
_OTHER_KINDS = ["wrapper", "dtensor", "fake", "meta", "sparse", "csr", "nested", "quantized", "none", "number", "text"]


@dataclass(frozen=True)
class Spec:
    """A layout: how it is made, and of what.

    Attributes:
        how: ``mesh``, ``split``, ``boxes``, ``replicated``, ``sequence``, ``dtensor`` (with placements), ``odd``.
        given: what the maker takes, with places in the group for ranks.
    """

    how: str
    given: Any


@dataclass(frozen=True)
class Resharding:
    """One call, of one to three tensors of one shape each.

    Attributes:
        shapes: of the global tensors.
        sources, targets: of each.
        dtypes: of each, before and after.
        memory: layout of the local tensors' memory.
        kind: of tensor.
        how: which function is called, and how.
        form: what the tensors are passed in.
        grad: as for ``reshard``.
        bucket: bytes.
        group: of ``GROUPS``.
        fault: what is wrong on one rank.
        place: that rank.
        checked: in check mode.
    """

    shapes: tuple[tuple[int, ...], ...]
    sources: tuple[Spec, ...]
    targets: tuple[Spec, ...]
    dtypes: tuple[tuple[str, str], ...]
    memory: str
    kind: str
    how: str
    form: str
    grad: Any
    bucket: Any
    group: str
    fault: str
    place: int
    checked: bool


# ---- what is drawn ----


def _mostly(likely: SearchStrategy[Any], rest: SearchStrategy[Any], times: int = 14) -> SearchStrategy[Any]:
    return st.one_of(*[likely] * times, rest)


@st.composite
def _specs(draw: Any, shape: tuple[int, ...], world: int) -> Spec:
    """A layout over some of the ranks, with something odd now and then."""
    odd = st.sampled_from(_ODD)
    how = draw(st.sampled_from(["mesh", "mesh", "dtensor", "split", "boxes", "replicated", "sequence"] * 4 + ["odd"]))
    if how == "odd":
        return Spec(how, draw(odd))
    places = draw(st.permutations(range(world)))[: draw(st.integers(1, world))]
    dims = st.integers(-len(shape), len(shape) - 1) if shape else st.none()
    if how in ("mesh", "dtensor"):
        sizes = [
            each
            for each in itertools.chain.from_iterable(itertools.product((1, 2, 4), repeat=n) for n in (1, 2))
            if math.prod(each) <= len(places)
        ]
        mesh = draw(st.sampled_from(sizes))
        places = places[: math.prod(mesh)]
        grid: Any = places if len(mesh) == 1 else [places[i * mesh[1] : (i + 1) * mesh[1]] for i in range(mesh[0])]
        placements = [draw(_mostly(st.one_of(st.none(), dims, dims), odd)) for _ in mesh]
        if how == "dtensor":
            grid = sorted(places) if len(mesh) == 1 else grid
        if draw(st.integers(0, 20)) == 0:
            placements = draw(st.sampled_from([placements[:-1], [*placements, None], None, "ab", 3, [Partial()]]))
        if draw(st.integers(0, 25)) == 0:
            grid = draw(st.sampled_from([5, "x", [], [[]], [0.5], [[0], [1, 2]], [0, 0], [99], [-1], None, [None]]))
        return Spec(how, (grid, placements))
    if how == "sequence":
        return Spec(how, (places, *draw(_sequences(shape, len(places)))))
    if how == "replicated":
        return Spec(how, draw(_mostly(st.just(places), st.sampled_from([[], [0, 0], [99], 3, None, "01", [None]]))))
    if how == "split":
        dim = draw(_mostly(dims if shape else odd, odd))
        size = shape[dim] if type(dim) is int and -len(shape) <= dim < len(shape) else 4
        edges = sorted(draw(st.lists(st.integers(0, size), min_size=len(places) - 1, max_size=len(places) - 1)))
        sizes: Any = [b - a for a, b in itertools.pairwise([0, *edges, size])]
        given: Any = dict(zip(places, sizes, strict=True))
        if draw(st.integers(0, 12)) == 0:
            given = draw(
                st.sampled_from([sizes, sizes[:-1], {}, None, "22", {0: -1, 1: size + 1}, {0: None}, {"a": 1}])
            )
        return Spec(how, (dim, given))
    return Spec(how, draw(_boxes(shape, places)))


@st.composite
def _sequences(draw: Any, shape: tuple[int, ...], world: int) -> tuple[Any, Any, Any]:
    """A dim, a kind and the boundaries of packed sequences, or something odd."""
    odd = st.sampled_from(_ODD)
    dim = draw(_mostly(st.integers(-len(shape), len(shape) - 1) if shape else odd, odd))
    size = shape[dim] if type(dim) is int and -len(shape) <= dim < len(shape) else 4
    even = st.integers(0, size // (2 * world)).map(lambda n: 2 * world * n)
    inner = draw(st.lists(st.one_of(st.integers(0, size), even), max_size=3).map(sorted))
    bounds = draw(_mostly(st.sampled_from([None, [0, size], [0, *inner, size]]), odd))
    return dim, draw(_mostly(st.sampled_from(["striped", "striped", "contiguous", "zigzag", "full"]), odd)), bounds


@st.composite
def _boxes(draw: Any, shape: tuple[int, ...], places: list[int]) -> Any:
    """Slabs along a dim, on one or several ranks each; or something else."""
    along = draw(st.integers(0, len(shape) - 1)) if shape else 0
    size = shape[along] if shape else 0
    edges = [0, *sorted(draw(st.lists(st.integers(0, size), max_size=3))), size] if shape else [0, 0]
    boxes: dict[Any, Any] = {place: [] for place in places}
    for low, high in itertools.pairwise(edges):
        start, extent = [0] * len(shape), list(shape)
        if shape:
            start[along], extent[along] = low, high - low
        for place in draw(st.lists(st.sampled_from(places), min_size=1, max_size=2, unique=True)):
            boxes[place].append((tuple(start), tuple(extent)))
    if draw(st.integers(0, 6)) == 0:  # holes, overlaps, and what is no box
        place = draw(st.sampled_from(places))
        extra = draw(
            st.sampled_from(
                [
                    ((0,) * len(shape), (1,) * len(shape)), ((-1,) * len(shape), (1,) * len(shape)), ((0,), (9,)),
                    ((0,) * len(shape), shape), (0, 1), None, ((None,) * len(shape), shape), ("a", "b"), ((0.5,), (1,)),
                ]
            )
        )  # fmt: skip
        boxes[place] = draw(st.sampled_from([boxes[place][:-1], [*boxes[place], extra], [extra], None, 3]))
    if draw(st.integers(0, 40)) == 0:
        return draw(st.sampled_from([None, 3, [], {}, {"a": []}, {99: []}]))
    return boxes


@st.composite
def reshardings(draw: Any, worlds: SearchStrategy[Any]) -> tuple[Any, Resharding]:
    """A call, with few odd arguments at a time."""
    world = draw(worlds)
    ranks = len(world) if isinstance(world, tuple) else world
    sizes = st.lists(st.sampled_from([4, 2, 3, 5, 1, 8]), max_size=4).map(tuple)
    shape = st.one_of(sizes, sizes, sizes, st.sampled_from([(4, 4), (0, 4), (2, 0), (), (9,)]))
    shapes = tuple(draw(st.lists(shape, min_size=1, max_size=3)))
    sources, targets, dtypes = [], [], []
    for each in shapes:
        sources.append(draw(_specs(each, ranks)))
        targets.append(draw(_specs(each, ranks)))
        before = draw(st.sampled_from(_DTYPES))
        after = draw(st.sampled_from([before, before, before, *_FLOATS, "int64"]))
        dtypes.append((before, after))
    fault = draw(st.sampled_from(FAULTS))
    return world, Resharding(
        shapes,
        tuple(sources),
        tuple(targets),
        tuple(dtypes),
        draw(st.sampled_from(["contiguous", "contiguous", "transposed", "sliced", "permuted", "expanded"])),
        draw(_mostly(st.sampled_from(_KINDS), st.sampled_from(_OTHER_KINDS))),
        draw(st.sampled_from(["reshard", "reshard", "plan", "dtypes", "out", "look", "owned", "exchange"])),
        draw(st.sampled_from(["dict", "list", "one"])),
        draw(_mostly(st.sampled_from(["replicated", "partial"]), st.sampled_from([None, "sum", 1]))),
        draw(_mostly(st.sampled_from([2**28, 2**20, 4096, 256]), st.sampled_from([0, -1, 1, None, "x", 1.5, 2**70]))),
        draw(_mostly(st.just("group"), st.sampled_from(["name", "mesh", "no member", "unknown", "number"]))),
        fault,
        draw(st.integers(0, 3)),
        draw(st.integers(0, 5)) == 0,
    )


# ---- closed form: which elements every place has ----


def _indices(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape)).view(shape)


def _meant(spec: Spec, shape: tuple[int, ...], world: int) -> dict[int, list[Tensor]] | None:
    """By place in the group: the indices of its boxes; None for what is no layout."""
    try:
        made = _MEANT[spec.how](spec.given, shape)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError, AssertionError, RuntimeError):
        return None
    return made if made is not None and all(type(p) is int and 0 <= p < world for p in made) else None


def _is_int(x: Any) -> bool:
    return isinstance(x, int)


def _of_mesh(given: Any, shape: tuple[int, ...]) -> dict[int, list[Tensor]]:
    grid, placements = given
    assert isinstance(placements, list | tuple)
    assert all(type(each) is int for each in torch.utils._pytree.tree_leaves(grid))
    mesh = torch.tensor(grid)
    assert mesh.dim() == len(placements)
    assert mesh.numel()
    assert len(set(mesh.flatten().tolist())) == mesh.numel()
    owned = {}
    for coordinates in itertools.product(*map(range, mesh.shape)):
        x = _indices(shape)
        for at, size, dim in zip(coordinates, mesh.shape, placements, strict=True):
            if dim is None:
                continue
            assert _is_int(dim)
            dim = int(dim)
            step = -(-x.shape[dim] // size)
            x = x.narrow(dim, min(at * step, x.shape[dim]), max(0, min(step, x.shape[dim] - at * step)))
        owned[int(mesh[coordinates])] = [x]
    return owned


def _of_split(given: Any, shape: tuple[int, ...]) -> dict[int, list[Tensor]]:
    dim, sizes = given
    assert _is_int(dim)
    by_place = sizes if isinstance(sizes, dict) else dict(enumerate(sizes))
    assert isinstance(sizes, dict | list)
    assert all(_is_int(size) for size in by_place.values())
    parts = _indices(shape).split(list(by_place.values()), int(dim))  # True is 1, which torch refuses here
    return {place: [part] for place, part in zip(by_place, parts, strict=True)}


def _of_boxes(given: Any, shape: tuple[int, ...]) -> dict[int, list[Tensor]]:
    assert isinstance(given, dict)
    owned = {}
    for place, boxes in given.items():
        owned[place] = []
        for start, extent in boxes:
            assert len(start) == len(extent) == len(shape)
            assert all(type(n) is int and n >= 0 for n in (*start, *extent))
            assert all(a + n <= size for a, n, size in zip(start, extent, shape, strict=True))
            owned[place].append(_indices(shape)[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))])
        if not shape and not owned[place]:
            del owned[place]
    return owned


def _of_sequence(given: Any, shape: tuple[int, ...]) -> dict[int, list[Tensor]]:
    places, dim, kind, bounds = given
    assert _is_int(dim)
    assert isinstance(kind, str)
    assert -len(shape) <= dim < len(shape)
    bounds = [0, shape[dim]] if bounds is None else bounds
    assert isinstance(bounds, list | tuple)
    assert all(_is_int(each) for each in bounds)
    assert (bounds[0], bounds[-1]) == (0, shape[dim])
    world, owned = len(places), {}
    for rank, place in enumerate(places):
        index = [torch.arange(0)]
        for low, high in itertools.pairwise(bounds):
            tokens = torch.arange(low, high)  # refuses what descends
            if kind == "zigzag":
                chunks = tokens.view(2 * world, len(tokens) // (2 * world))
                index += [chunks[rank], chunks[-1 - rank]]
            else:
                run = -(-len(tokens) // world)
                chunk = slice(rank * run, (rank + 1) * run)
                index.append(
                    tokens[{"striped": slice(rank, None, world), "contiguous": chunk, "full": slice(None)}[kind]]
                )
        owned[place] = [_indices(shape).index_select(int(dim), torch.cat(index))]
    return owned


_MEANT = {
    "sequence": _of_sequence,
    "mesh": _of_mesh,
    "dtensor": _of_mesh,
    "split": _of_split,
    "boxes": _of_boxes,
    "replicated": lambda given, shape: _of_mesh((list(given), [None]), shape),
    "odd": lambda given, shape: None,
}


def _are_ambiguous(boxes: list[Tensor]) -> bool:
    """Whether indices do not show along which dim boxes follow one another: empty ones of the same extent."""
    return len(boxes) > 1 and len({box.shape for box in boxes}) == 1 and not boxes[0].numel()


def _joined(boxes: list[Tensor], shape: tuple[int, ...]) -> Tensor | None:
    """The local tensor: boxes after one another; None where they do not concatenate."""
    if not boxes:
        return torch.empty((0,) * len(shape), dtype=torch.int64)
    if len(boxes) == 1:
        return boxes[0]
    extents = [tuple(box.shape) for box in boxes]
    longer = [d for d in range(len(shape)) if len({each[d] for each in extents}) > 1]
    if len(longer) > 1:
        return None
    starts = [tuple(int(i) for i in torch.unravel_index(b.flatten()[:1], shape)) if b.numel() else None for b in boxes]
    if longer:
        return torch.cat(boxes, longer[0])
    moved = [d for d in range(len(shape)) if len({start[d] for start in starts if start is not None}) > 1]
    return torch.cat(boxes, moved[0] if moved else 0) if shape else None


def _tiles(owned: dict[int, list[Tensor]], shape: tuple[int, ...]) -> bool:
    """Every element somewhere, in regions that are equal or disjoint."""
    regions = {tuple(box.flatten().tolist()) for boxes in owned.values() for box in boxes if box.numel()}
    return sorted(itertools.chain.from_iterable(regions)) == list(range(math.prod(shape)))


# ---- the call ----


def _layout(spec: Spec, shape: tuple[int, ...], ranks: Sequence[int]) -> Any:
    """What is passed to ``reshard``: a Layout, or a mesh with placements."""

    def rank(place: Any) -> Any:
        return ranks[place] if type(place) is int and 0 <= place < len(ranks) else place

    def grid(places: Any) -> Any:
        return [grid(each) for each in places] if isinstance(places, list) else rank(places)

    if spec.how == "mesh":
        return Layout.on_mesh(shape, grid(spec.given[0]), spec.given[1])
    if spec.how == "replicated":
        return Layout.replicated(shape, grid(spec.given))
    if spec.how == "split":
        dim, sizes = spec.given
        if isinstance(sizes, list) and list(ranks) != list(range(len(ranks))):
            sizes = dict(enumerate(sizes))
        return Layout.split(shape, dim, {rank(p): n for p, n in sizes.items()} if isinstance(sizes, dict) else sizes)
    if spec.how == "boxes":
        given = spec.given
        return Layout.of_boxes(shape, {rank(p): b for p, b in given.items()} if isinstance(given, dict) else given)
    if spec.how == "sequence":
        places, dim, kind, bounds = spec.given
        return Layout.sequence(shape, dim, kind, grid(places), bounds)
    if spec.how == "dtensor":
        places, placements = spec.given
        try:
            numbers = torch.tensor(grid(places))
            if len(numbers.unique()) < numbers.numel():
                return spec.given  # torch refuses it only on the ranks that are in it twice
            mesh = DeviceMesh("cpu", numbers, _init_backend=False)
        except Exception:  # torch has no such mesh
            return spec.given
        if mesh.mesh.tolist() != numbers.tolist():  # torch takes 0.5 for 0
            return spec.given
        if not isinstance(placements, list):
            return mesh, placements
        fits = [isinstance(dim, int) and abs(dim) < 2**60 for dim in placements]
        return mesh, [
            Shard(dim) if fit else Replicate() if dim is None else dim
            for dim, fit in zip(placements, fits, strict=True)
        ]
    return spec.given


@dataclass
class _Prepared:
    """What this rank passes, and what it has to get.

    Attributes:
        wanted: local results by name; None where the arguments describe no resharding.
        owned: indices of the elements that every place has, before and after, of every tensor.
    """

    tensors: dict[str, Any]
    sources: dict[str, Any]
    targets: dict[str, Any]
    dtypes: dict[str, torch.dtype]
    wanted: dict[str, Tensor] | None
    owned: list[tuple[dict[int, Tensor], dict[int, Tensor]]]


def _prepared(group: ProcessGroup, case: Resharding) -> _Prepared | str:
    ranks, place = dist.get_process_group_ranks(group), group.rank()
    made = _Prepared({}, {}, {}, {}, {}, [])
    for i, (shape, source, target, (before, after)) in enumerate(
        zip(case.shapes, case.sources, case.targets, case.dtypes, strict=True)
    ):
        name, full = f"t{i}", filled(case.shapes[i], before, 7 + i)
        if case.how in ("owned", "exchange"):
            target = source  # where they come back to
        if case.how in ("owned", "exchange", "look"):
            after = before
        ends = [_meant(each, shape, len(ranks)) for each in (source, target)]
        if any(_are_ambiguous(boxes) for end in ends if end is not None for boxes in end.values()):
            return "mixed"
        joined = [None if end is None else {p: _joined(boxes, shape) for p, boxes in end.items()} for end in ends]
        is_good = all(each is not None and None not in each.values() for each in joined)
        is_good = is_good and ends[0] is not None and _tiles(ends[0], shape)
        is_good = is_good and (before == after or {before, after} <= set(_FLOATS))
        index = joined[0].get(place) if joined[0] is not None else None
        if is_good or index is not None:
            local = full.new_empty(0) if index is None else full.flatten()[index]
        else:
            local = full.new_empty(0) if ends[0] is not None and place not in ends[0] else full
        x = tensor_of(case.kind, _memory(local, case.memory), group)
        others = [full, full.new_empty(0)] if case.kind not in _KINDS else []
        others += [full.flatten()[at] for at in (joined[0] or {}).values() if at is not None] if others else []
        if x is None and case.kind != "none":
            return "mixed"
        if case.kind != "none" and any(tensor_of(case.kind, y, group) is None for y in others):
            return "mixed"  # torch has no such tensor on some rank
        if case.kind == "wrapper" and case.how in _PLANNED:
            counts = [0 if (at := (joined[0] or {}).get(p)) is None else at.numel() for p in range(len(ranks))]
            if min(counts) == 0 < max(counts):
                return "mixed"  # only what has elements lacks memory, and a plan that is executed compares nothing
        made.tensors[name] = x
        made.sources[name], made.targets[name] = (_layout(each, shape, ranks) for each in (source, target))
        made.dtypes[name] = getattr(torch, after)
        if is_good and made.wanted is not None:
            assert joined[1] is not None
            at = joined[1].get(place)
            wanted = full.flatten() if at is None else full.flatten()[at]
            made.wanted[name] = (wanted.new_empty(0) if at is None else wanted).to(getattr(torch, after))
            made.owned.append((joined[0], joined[1]))
        else:
            made.wanted = None
    return made


def _memory(x: Tensor, layout: str) -> Tensor:
    return x if layout == "expanded" else with_layout(x, layout)


def run_resharding(group: ProcessGroup, case: Resharding) -> str:
    """``right``, ``refused: ...``, ``mixed`` (not called) or ``problem: ...``."""
    late = ("shape", "grad") if case.how in ("dtypes", "owned", "exchange") else FAULTS if case.how == "look" else ()
    if case.fault and case.fault in late:
        return "mixed"  # a plan of layouts and dtypes is right, and who executes it does not compare
    if case.fault == "extra" and case.how in ("owned", "exchange", "dtypes"):
        return "mixed"  # one more tensor that stays where it is may be in no plan
    is_planned = case.how in _PLANNED
    if is_planned and case.fault == "missing" and case.kind not in _KINDS and len(case.shapes) == 1:
        return "mixed"  # a rank that passes no tensor has none of a refused kind
    if case.fault:
        request._plans.forget(group)  # else the others would not compare, and wait for the group's timeout
    given, _ = group_of(case.group, group)
    try:
        made = _prepared(group, case)
    except Exception as error:
        return f"refused: {error}" if named(error) else problem_of(error)
    if isinstance(made, str):
        return made
    fits = made.wanted is not None
    if case.fault and not fits:
        return "mixed"  # which of the two every rank sees first is not told
    if case.how == "out" and not fits and not any(map(math.prod, case.shapes)):
        return "mixed"  # no rank has a part, so that an empty `out` is right for every layout
    if case.kind == "dtensor" and any(each == Spec("odd", None) for each in case.sources):
        return "mixed"  # a DTensor passed without a source has its own layout
    _spoil(made, group, case)
    try:
        with p2p.check(case.checked):
            outcome = _WAYS[case.how](group, given, case, made)
    except Exception as error:
        if not named(error):
            return problem_of(error)
        refused = f"refused: {type(error).__name__}: {error}"
        return f"problem: {refused}" if fits and _must_succeed(case) else refused
    if not fits and outcome == "right":
        return "problem: arguments that describe no resharding are accepted"
    return outcome


def _must_succeed(case: Resharding) -> bool:
    return (
        case.kind in ("plain", "leaf", "parameter")
        and case.group in ("group", "name", "mesh")
        and case.grad in ("replicated", "partial")
        and case.bucket in (2**28, 2**20, 4096)
        and not case.fault
        and case.how != "look"
        and not (case.how in ("owned", "exchange") and case.place == 3)
        and (case.grad == "replicated" or case.kind == "plain")
        and not (case.form == "one" and len(case.shapes) > 1)
    )


def _spoil(made: _Prepared, group: ProcessGroup, case: Resharding) -> None:
    """Change what one rank passes."""
    if not case.fault or group.rank() != case.place % group.size():
        return
    x = made.tensors["t0"]
    if case.fault == "missing":
        made.tensors.pop(f"t{len(case.shapes) - 1}")
    elif case.fault == "extra":
        made.tensors["more"] = torch.ones(2)
    elif case.fault == "names":
        made.tensors = {f"{name}'": each for name, each in made.tensors.items()}
        made.dtypes = {f"{name}'": each for name, each in made.dtypes.items()}
    elif case.kind not in _KINDS:
        return
    elif case.fault == "shape":
        made.tensors["t0"] = torch.ones(7, 1, dtype=x.dtype)
    elif case.fault == "dtype":
        made.tensors["t0"] = torch.zeros_like(x.detach(), dtype=torch.int32)  # a cast may warn
    elif case.fault == "kind":
        made.tensors["t0"] = "a text"
    elif case.fault in ("layout", "target"):
        side = made.sources if case.fault == "layout" else made.targets
        side["t0"] = Layout.replicated((3, 3), dist.get_process_group_ranks(group))
    elif case.fault == "grad" and x.is_floating_point() and type(x) is Tensor:
        made.tensors["t0"] = x.detach().clone().requires_grad_(not x.requires_grad)


def _form(form: str, values: dict[str, Any]) -> Any:
    if form == "one" and len(values) == 1:
        return next(iter(values.values()))
    return list(values.values()) if form == "list" else values


def _passed(case: Resharding, made: _Prepared) -> dict[str, Any]:
    names = list(made.tensors)
    sources = {name: made.sources.get(name, made.sources["t0"]) for name in names}
    sources = {name: None if case.sources[0].how == "dtensor" and isinstance(sources[name], tuple) else each
               for name, each in sources.items()}  # fmt: skip
    targets = {name: made.targets.get(name, made.targets["t0"]) for name in names}
    return {
        "tensors": _form(case.form, made.tensors), "source": _form(case.form, sources),
        "target": _form(case.form, targets),
    }  # fmt: skip


def _results(case: Resharding, out: Any) -> list[Any]:
    if isinstance(out, Tensor):
        return [out]
    return list(out.values()) if isinstance(out, dict) else list(out)


def _as_dtensors(case: Resharding, made: _Prepared) -> None:
    """Sources that are a mesh with placements belong to DTensors; a rank outside of the mesh passes the layout."""
    for name, layout in made.sources.items():
        if not isinstance(layout, tuple) or len(layout) != 2 or not isinstance(layout[0], DeviceMesh):
            continue
        mesh, placements = layout
        shape = case.shapes[int(name[1:])]
        made.sources[name] = Layout.on_mesh(shape, mesh, placements)
        x = made.tensors.get(name)
        if (
            mesh.get_coordinate() is not None
            and case.kind in _KINDS
            and type(x) is Tensor
            and x.is_leaf
            and not x.requires_grad
            and x.dim()
        ):
            stride = tuple(torch.empty(shape, device="meta").stride())
            made.tensors[name] = DTensor.from_local(
                x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
            )


def _options(case: Resharding, given: Any, rank: int) -> dict[str, Any]:
    bucket, grad = case.bucket, case.grad
    if case.fault == "bucket" and rank == case.place:
        bucket = 512
    return {"group": given, "bucket_bytes": bucket, "grad": grad}


def _reshard(group: ProcessGroup, given: Any, case: Resharding, made: _Prepared) -> str:
    _as_dtensors(case, made)
    leaves = list(made.tensors.values())
    options = _options(case, given, group.rank())
    dtype = {name: made.dtypes.get(name) for name in made.tensors}
    out = _results(case, reshard(**_passed(case, made), dtype=_form_of_dtypes(case, dtype), **options))
    problem = _compared(out, made)
    if problem or case.kind != "leaf" or case.fault:
        return problem or "right"
    return _gradients(group, case, made, leaves, out)


def _form_of_dtypes(case: Resharding, dtype: dict[str, Any]) -> Any:
    return next(iter(dtype.values())) if case.form == "one" and len(dtype) == 1 else _form(case.form, dtype)


def _compared(out: Sequence[Any], made: _Prepared) -> str:
    if made.wanted is None or len(out) != len(made.wanted):
        return ""
    for x, (name, wanted) in zip(out, made.wanted.items(), strict=True):
        local = x.to_local() if isinstance(x, DTensor) else getattr(x, "inside", x)  # of a wrapper
        if (local.shape, local.dtype) != (wanted.shape, wanted.dtype) or not torch.equal(bits(local), bits(wanted)):
            return f"problem: {name}: {local.dtype} {local.tolist()}, not {wanted.dtype} {wanted.tolist()}"
    return ""


def _gradients(group: ProcessGroup, case: Resharding, made: _Prepared, leaves: list[Any], out: list[Any]) -> str:
    """The gradients of the leaves, against sums of what the ranks' results get."""
    total = [torch.zeros(()).double()]
    place, world = group.rank(), group.size()
    for i, (x, leaf) in enumerate(zip(out, leaves, strict=True)):
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            continue
        local = x.to_local() if isinstance(x, DTensor) else x
        weights = _weights(case, made, i, place)
        total.append(
            (local.double() * weights).sum() if local.dtype != torch.complex64 else (local * weights).abs().sum()
        )
        if local.is_complex():
            return "right"  # gradients of complex tensors are copied as others are
    try:
        torch.stack([each.double().reshape(()) for each in total]).sum().backward()
    except Exception as error:
        if named(error) and ("overlap" in str(error) or "too small" in str(error)):  # which only gradients may be
            return f"refused: {error}"
        return "in backward, " + problem_of(error)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.requires_grad or not made.owned[i][0]:
            continue
        sums = torch.zeros(math.prod(case.shapes[i]) or 1, dtype=torch.float64)
        for w in range(world):
            index = made.owned[i][1].get(w)
            if index is None or not index.numel():
                continue
            values = _weights(case, made, i, w).flatten()
            if case.grad == "partial":
                sums.index_add_(0, index.flatten(), values)
            else:
                sums[index.flatten()] = values
        index = made.owned[i][0].get(place)
        if index is None:
            continue
        wanted = sums[index].to(leaf.dtype)
        if leaf.grad is None or not torch.equal(leaf.grad, wanted):
            return f"problem: gradient {None if leaf.grad is None else leaf.grad.tolist()}, not {wanted.tolist()}"
    return "right"


def _weights(case: Resharding, made: _Prepared, i: int, place: int) -> Tensor:
    """Gradients of a rank's result: equal on replicas, or not where they are summed."""
    index = made.owned[i][1].get(place)
    if index is None:
        return torch.zeros(0, dtype=torch.float64)
    return (index % 5).double() + (place if case.grad == "partial" else 0)


def _plan(group: ProcessGroup, given: Any, case: Resharding, made: _Prepared) -> str:
    """A plan of tensors, executed twice."""
    _as_dtensors(case, made)
    passed = _passed(case, made)
    dtype = _form_of_dtypes(case, {name: made.dtypes.get(name) for name in made.tensors})
    plan = reshard_plan(**passed, dtype=dtype, **_options(case, given, group.rank()))
    str(plan)
    problem = ""
    for _ in range(2):
        problem = problem or _compared(_results(case, plan.execute(passed["tensors"])), made)
    return problem or "right"


def _as_layout(case: Resharding, name: str, source: Any) -> Any:
    """The layout of what would be a DTensor."""
    if not isinstance(source, tuple) or len(source) != 2 or not isinstance(source[0], DeviceMesh):
        return source
    number = name[1:].rstrip("'")
    return Layout.on_mesh(case.shapes[int(number) if number.isdigit() else 0], *source)


def _by_dtypes(group: ProcessGroup, given: Any, case: Resharding, made: _Prepared) -> str:
    """A plan of dtypes, executed with tensors."""
    passed = _passed(replace(case, form="dict"), made)
    dtypes = {name: x.dtype if isinstance(x, Tensor) else x for name, x in made.tensors.items()}
    options = _options(case, given, group.rank())
    sources = {name: _as_layout(case, name, made.sources.get(name, made.sources["t0"])) for name in dtypes}
    plan = reshard_plan(dtypes, sources, passed["target"], dtype={n: made.dtypes.get(n) for n in dtypes}, **options)
    with torch.no_grad():
        return _compared(_results(case, plan.execute(made.tensors)), made) or "right"


def _out(group: ProcessGroup, given: Any, case: Resharding, made: _Prepared) -> str:
    """Into tensors of the caller, of any strides."""
    _as_dtensors(case, made)
    passed = _passed(case, made)
    into = {
        name: with_layout(torch.full(wanted.shape, 1).to(wanted.dtype), case.memory)
        for name, wanted in (made.wanted or {}).items()
    }
    if case.fault == "out" and group.rank() == case.place:
        into["t0"] = torch.ones(7, dtype=torch.int32)
    if made.wanted is not None and set(into) != set(made.tensors):
        into = {name: into.get(name, torch.ones(1)) for name in made.tensors}
    reshard(**passed, out=_form(case.form, into), **_options(case, given, group.rank()))
    return _compared(list(into.values()), made) or "right"


def _look(group: ProcessGroup, given: Any, case: Resharding, made: _Prepared) -> str:
    """A plan without communication, of this rank or of one that is not there."""
    ranks = dist.get_process_group_ranks(group)
    rank = {0: ranks[group.rank()], 1: 99, 2: ranks[0], 3: -1}[case.place]
    passed = _passed(replace(case, form="dict"), made)
    dtypes = {name: x.dtype if isinstance(x, Tensor) else x for name, x in made.tensors.items()}
    sources = {name: each for name, each in made.sources.items() if name in dtypes}
    plan = reshard_plan(
        dtypes, sources, passed["target"], ranks=ranks, rank=rank, bucket_bytes=case.bucket, grad=case.grad
    )
    assert str(plan)
    assert plan.bytes_sent >= 0
    return "right" if made.wanted is not None else "problem: accepted"


def _owned(group: ProcessGroup, given: Any, case: Resharding, made: _Prepared) -> str:
    """Full tensors on their owners and back."""
    ranks = dist.get_process_group_ranks(group)
    _as_dtensors(case, made)
    owners: Any = {name: ranks[i % len(ranks)] for i, name in enumerate(made.tensors)}
    if case.place == 3 and case.fault == "":
        owners = [{}, dict.fromkeys(owners, 99), dict.fromkeys(owners, "x"), None][len(case.shapes)]
    passed = _passed(replace(case, form="dict"), made)
    options = {"group": given, "bucket_bytes": case.bucket}
    with torch.no_grad():
        if case.how == "owned":
            kept = OwnedExchange(passed["tensors"], owners, passed["source"], **options)
            full = kept.collect(passed["tensors"])
            back = kept.distribute({name: x.clone() for name, x in full.items()})
        else:
            back = exchange_owned(passed["tensors"], owners, lambda _, x: x.clone(), passed["source"], **options)
    for name, x in made.tensors.items():
        if name not in back:  # a rank gets the names of which it has a part
            if (x.to_local() if isinstance(x, DTensor) else x).numel():
                return f"problem: {name} did not come back"
            continue
        local, wanted = (each.to_local() if isinstance(each, DTensor) else each for each in (back[name], x))
        if case.kind not in _KINDS:
            continue
        if made.wanted is not None and local.numel() + wanted.numel() and not torch.equal(bits(local), bits(wanted)):
            return f"problem: {name}: {local.tolist()} came back, not {wanted.tolist()}"
    return "right"


_WAYS = {
    "reshard": _reshard, "plan": _plan, "dtypes": _by_dtypes, "out": _out, "look": _look, "owned": _owned,
    "exchange": _owned,
}  # fmt: skip
