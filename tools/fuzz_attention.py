"""Drawn calls of Ulysses attention: any heads, positions, layouts and masks, and what has to come of them.

The attention inside is of small integers, so that results and gradients are exact in every dtype.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from fuzz_calls import bits, filled, group_of, named, problem_of, tensor_of
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from mapping_cases import with_layout
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.ulysses import UlyssesAttention

__all__ = ["Attention", "attentions", "run_attention"]


@dataclass(frozen=True)
class Attention:
    """One call, with few odd arguments.

    Attributes:
        batch, heads, kv_heads, width, value_width: of q, k and v.
        sizes: positions of every rank.
        given: what is passed as ``sequence_sizes``: ``none``, ``right`` or something else.
        layout: ``bshd`` or ``sbhd``.
        dtype: of all tensors.
        memory: layout of their memory.
        kind: of tensor.
        group: of ``GROUPS``.
        form: ``three`` tensors, ``packed`` in one, or what is neither.
        mask: of the attention.
        path: forced.
    """

    batch: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    sizes: tuple[int, ...]
    given: Any
    layout: Any
    dtype: str
    memory: str
    kind: str
    group: str
    form: str
    mask: str


@st.composite
def attentions(draw: Any, worlds: SearchStrategy[Any], junk: SearchStrategy[Any]) -> tuple[Any, Attention]:
    """Calls that fit in most draws."""
    world = draw(worlds)
    ranks = len(world) if isinstance(world, tuple) else world
    kv_heads = draw(st.sampled_from([1, 2, 4, 3, 1, 2, 0]))
    heads = draw(st.one_of(*[st.sampled_from([kv_heads * n for n in (1, 2, 4)])] * 5, st.integers(0, 6)))
    even = draw(st.booleans())
    size = st.sampled_from([2, 1, 3, 0] if not even else [2, 4, 1])
    sizes = (draw(size),) * ranks if even else tuple(draw(st.lists(size, min_size=ranks, max_size=ranks)))
    given: Any = "none" if even and draw(st.booleans()) else "right"
    if draw(st.integers(0, 12)) == 0:
        given = draw(st.one_of(junk, st.lists(st.integers(-1, 4), max_size=4)))
        given = "none" if given is None else given
    width = draw(st.sampled_from([4, 2, 1, 3, 0]))
    form = draw(st.sampled_from(["three"] * 6 + ["packed"] * 3 + ["two", "list", "four dims", "other dtype", "3-d"]))
    return world, Attention(
        draw(st.sampled_from([1, 2, 1, 0])),
        kv_heads if form == "packed" else heads,
        kv_heads,
        width,
        width if form == "packed" else draw(st.sampled_from([width, width, 1, 5])),
        sizes,
        given,
        draw(st.sampled_from(["bshd"] * 6 + ["sbhd"] * 4 + ["bhsd", None, 3])),
        draw(st.sampled_from(["float32", "bfloat16", "float64", "int64", "complex64", "float8_e5m2", "bool"])),
        draw(st.sampled_from(["contiguous", "contiguous", "transposed", "sliced", "permuted"])),
        draw(st.sampled_from(
            ["plain"] * 8 + ["leaf"] * 8
            + ["inference", "subclass", "meta", "sparse", "nested", "dtensor", "none", "number"]
        )),
        draw(st.sampled_from(["group"] * 10 + ["name", "mesh", "solo", "none", "no member", "unknown", "number"])),
        form,
        draw(st.sampled_from(["none"] * 6 + ["global", "local", "heads", "text", "1-d"])),
    )  # fmt: skip


def _attend(query: Tensor, key: Tensor, value: Tensor, seq: int, mask: Any = None) -> Tensor:
    """Every position gets its query, and the sum of all keys and values: exact, and every gradient differs."""
    repeats = query.shape[2] // max(1, key.shape[2])
    keys = key.sum(3, keepdim=True).sum(seq, keepdim=True).repeat_interleave(repeats, 2)
    values = value.sum(seq, keepdim=True).repeat_interleave(repeats, 2)
    return query.sum(3, keepdim=True) + keys + values


def _inputs(case: Attention) -> list[Tensor]:
    """Global q, k and v, in the layout of the call."""
    length = sum(case.sizes)
    shapes = [(case.batch, length, case.heads, case.width), (case.batch, length, case.kv_heads, case.width),
              (case.batch, length, case.kv_heads, case.value_width)]  # fmt: skip
    made = [filled(shape, case.dtype, 3 + i) for i, shape in enumerate(shapes)]
    return [x.transpose(0, 1) for x in made] if case.layout == "sbhd" else made


def run_attention(group: ProcessGroup, case: Attention) -> str:
    """``right``, ``refused: ...``, ``mixed`` (not called) or ``problem: ...``."""
    try:
        return _attention(group, case)
    except Exception as error:
        return f"refused: {type(error).__name__}: {error}" if named(error) else problem_of(error)


def _fits(case: Attention, world: int) -> bool:
    """Whether the call describes one attention over these ranks."""
    if case.layout not in ("bshd", "sbhd") or case.form not in ("three", "packed", "other dtype"):
        return False
    if case.given != "right" and (case.given != "none" or len(set(case.sizes)) > 1):
        return False
    return case.kv_heads > 0 and case.heads % case.kv_heads == 0 and case.heads >= world


def _is_seen(case: Attention) -> bool:
    """Whether wrong sizes are seen by all ranks: a rank knows its own, and what others have is left to check mode."""
    if case.given == "none":
        return len(set(case.sizes)) == 1
    if not isinstance(case.given, list) or len(case.given) != len(case.sizes) or min(case.given, default=0) < 0:
        return True
    return not any(given == size for given, size in zip(case.given, case.sizes, strict=True))


def _attention(group: ProcessGroup, case: Attention) -> str:
    given, meant = group_of(case.group, group)
    if case.group == "solo" and group.size() > 1:
        return "mixed"  # sizes are those of the larger group
    rank, world = meant.rank(), meant.size()
    if world > 1 and not _is_seen(case):
        return "mixed"
    seq = 0 if case.layout == "sbhd" else 1
    full = _inputs(case)
    if case.dtype in ("float8_e5m2", "bool"):
        return "mixed" if world == 1 else _moved(case, given, full, rank, seq)
    locals_ = [with_layout(x.split(list(case.sizes), seq)[rank], case.memory) for x in full]
    passed = _passed(case, locals_, meant)
    if passed is None:
        return "mixed"
    module = UlyssesAttention(given, attention=lambda q, k, v, **kwargs: _attend(q, k, v, seq), layout=case.layout)
    sizes = case.given
    if isinstance(sizes, str):
        sizes = {"none": None, "right": list(case.sizes)}.get(sizes, sizes)
    kwargs = {} if case.mask == "none" else {"attn_mask": _mask(case)}
    must = _fits(case, world) and case.kind in ("plain", "leaf") and case.group in ("group", "name", "mesh")
    must = must and case.mask in ("none", "global") and case.form != "other dtype"
    try:
        out = module(*passed, sequence_sizes=sizes, **kwargs)
    except Exception as error:
        if not named(error):
            raise
        refused = f"refused: {type(error).__name__}: {error}"
        return f"problem: {refused}" if must else refused
    if not _fits(case, world):
        return "right" if world == 1 else f"problem: accepted, and gives {tuple(out.shape)}"
    if case.form == "other dtype":
        full[2] = full[2].to(_other(case))
    wanted = _attend(*full, seq).split(list(case.sizes), seq)[rank]
    if out.is_meta:
        return "right" if out.shape == wanted.shape else f"problem: shape {tuple(out.shape)}"
    if (out.shape, out.dtype) != (wanted.shape, wanted.dtype) or not torch.equal(bits(out), bits(wanted)):
        return f"problem: {out.dtype} {out.tolist()}, not {wanted.dtype} {wanted.tolist()}"
    if case.kind != "leaf" or not out.requires_grad or case.form == "other dtype":
        return "right"
    return _gradients(case, passed, out, full, rank, seq)


def _moved(case: Attention, given: Any, full: list[Tensor], rank: int, seq: int) -> str:
    """Dtypes without arithmetic are moved: the attention hands back queries."""
    locals_ = [x.split(list(case.sizes), seq)[rank].contiguous() for x in full]
    module = UlyssesAttention(given, attention=lambda q, k, v: q.clone(), layout=case.layout)
    out = module(*locals_, sequence_sizes=list(case.sizes))
    if not _fits(replace(case, given="right", form="three"), len(case.sizes)):
        return "problem: accepted"
    return (
        "right" if torch.equal(bits(out), bits(locals_[0])) else f"problem: {out.tolist()}, not {locals_[0].tolist()}"
    )


def _mask(case: Attention) -> Any:
    length = sum(case.sizes)
    return {
        "global": torch.zeros(length, length), "local": torch.zeros(case.sizes[0] + 7, length),
        "heads": torch.zeros(1, case.heads + 2, length, length), "text": "causal", "1-d": torch.zeros(length),
    }[case.mask]  # fmt: skip


def _other(case: Attention) -> torch.dtype:
    """Dtype of the values where it is another one: each dtype travels in a message of its own."""
    return torch.complex128 if case.dtype == "complex64" else torch.int8


def _passed(case: Attention, tensors: list[Tensor], group: ProcessGroup) -> list[Any] | None:
    """The positional arguments; None where torch has no such tensor."""
    if case.form == "packed":
        tensors = [torch.stack(tensors, 2)]
    made: list[Any] = [tensor_of(case.kind, x, group) for x in tensors]
    if any(x is None for x in made) and case.kind != "none":
        return None
    if case.form == "two":
        return made[:2]
    if case.form == "list":
        return [made]
    if case.form == "four dims":
        return made[:1]
    if case.form == "other dtype":
        return [made[0], made[1], made[2].to(_other(case)) if isinstance(made[2], Tensor) else 3]
    if case.form == "3-d":
        if case.kind == "dtensor":  # which would send something itself
            return None
        return [x[0] if isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and x.shape[0] else 3
                for x in made]  # fmt: skip
    return made


def _gradients(case: Attention, passed: list[Tensor], out: Tensor, full: list[Tensor], rank: int, seq: int) -> str:
    weights = [filled(x.shape, case.dtype, 60 + w)
               for w, x in enumerate(_attend(*full, seq).split(list(case.sizes), seq))]  # fmt: skip
    out.backward(weights[rank])
    leaves = [x.detach().clone().requires_grad_() for x in full]
    _attend(*leaves, seq).backward(torch.cat(weights, seq))
    wanted = [x.grad.split(list(case.sizes), seq)[rank] for x in leaves]  # pyright: ignore[reportOptionalMemberAccess]
    wanted = [torch.stack(wanted, 2)] if case.form == "packed" else wanted
    for x, each in zip(passed, wanted, strict=True):
        if x.grad is None or not torch.equal(x.grad, each):
            return f"problem: the gradient {None if x.grad is None else x.grad.tolist()}, not {each.tolist()}"
    return "right"
