"""The ranks' recordings against that of one process: the first wrong module, wrong gradients, in words."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import collective
from tritoncomm.core import backend
from tritoncomm.errors import MismatchError
from tritoncomm.parsing import counted
from tritoncomm.verify.recording import ROOT, Call, Recording
from tritoncomm.verify.relations import Found, Relation, candidates, difference, find, is_telling

__all__ = ["Report", "compare"]

_FACTOR = 8  # of a bound, which has the root of the longest reduction, as errors of addends are independent
_SHOWN = 12  # gradients in a report
_OF_ROUNDING = 4  # of the distance of a step in 16 bits to the same in float64


@dataclass
class Report:
    """Result of a comparison, the same on every rank.

    Attributes:
        first: name of the first wrong module, or of the module of the first wrong parameter or gradient; None if all is
            equal.
        lines: what was found, in sentences of a line each.
        problem: why nothing could be compared; empty if it was.
        counts: ``outputs``, ``parameters`` and ``gradients`` of the run in one process, those ``compared``, those that
            are ``ambiguous`` because all their values are the same, ``not checked`` because in float64 they are below
            the rounding of 16 bits, and ``alone``, without a partner.
    """

    first: str | None = None
    lines: list[str] = field(default_factory=list)
    problem: str = ""
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether everything that was compared is equal, and something was."""
        return not self.problem and self.first is None

    def json(self) -> str:
        """Return the report as JSON."""
        return json.dumps({"equal": self.equal, **asdict(self)}, indent=1)

    def raise_if_different(self) -> None:
        """Raise ``MismatchError`` with the lines unless all is equal."""
        if not self.equal:
            raise MismatchError("\n".join(["verify: " + (self.problem or "the runs differ"), *self.lines]))

    def __str__(self) -> str:
        return "\n".join([*([self.problem] if self.problem else []), *self.lines])


def compare(whole: Recording, mine: Recording | Sequence[Recording], group: ProcessGroup | None = None) -> Report:
    """Compare a step of parallel ranks with the step in one process.

    Args:
        whole: the recording of the run in one process, on every rank.
        mine: this rank's recording; or those of all ranks in their order, without a group.
        group: the ranks; all of the job by default, this rank alone without a job.

    Returns:
        The same report on every rank.
    """
    if not isinstance(mine, Recording):
        return _Comparison(whole, list(mine)).report()
    if group is None and torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
    if group is None or group.size() == 1:
        return _Comparison(whole, [mine]).report()
    every = _gathered(mine.to_bytes(), group)
    text = ""
    if group.rank() == 0:
        text = json.dumps(asdict(_Comparison(whole, [Recording.from_bytes(each) for each in every]).report()))
    return Report(**json.loads(_gathered(text.encode(), group)[0]))


def _gathered(own: bytes, group: ProcessGroup) -> list[bytes]:
    """Return the bytes of every rank."""
    device = backend.default_device(backend.cuda_backend(group))
    lengths = collective.all_gather(torch.tensor([len(own)], device=device), 0, group).tolist()
    sent = torch.frombuffer(bytearray(own or b"\0"), dtype=torch.uint8)[: len(own)].to(device)
    parts = collective.all_gather(sent, 0, group, sizes=lengths).cpu().split(lengths)
    return [each.numpy().tobytes() for each in parts]


@dataclass
class _Problem:
    """One line of a report, and the module that it is about."""

    module: str
    line: str


class _Comparison:
    """The work of ``compare``, on all recordings."""

    def __init__(self, whole: Recording, ranks: list[Recording]) -> None:
        self.whole, self.ranks = whole, ranks
        self.calls = [{(call.name, call.number): call for call in each.calls} for each in ranks]
        exact = [] if whole.exact is None else whole.exact.calls
        self.exact = {(call.name, call.number): call for call in exact}
        self.times = [self._times(each) for each in ranks]
        self.whole_times = self._times(whole)
        self.held: dict[str, Relation] = {}  # of parameters
        self.has_strides = self._has_strided_inputs()
        self.problems: list[_Problem] = []
        self.alone: list[str] = []
        self.counts: dict[str, int] = dict.fromkeys(
            ("outputs", "parameters", "gradients", "compared", "ambiguous", "not checked", "alone"), 0
        )

    @staticmethod
    def _times(recording: Recording) -> dict[str, int]:
        """Return how often every module was called."""
        times: dict[str, int] = {}
        for call in recording.calls:
            times[call.name] = times.get(call.name, 0) + 1
        return times

    def _has_strided_inputs(self) -> bool:
        """Whether a relation is declared so, or the ranks call the model with every n-th index of an input."""
        if any(relation.is_strided for each in self.ranks for relation in each.relations.values()):
            return True
        for i, whole in enumerate(self.whole.inputs):
            parts = [each.inputs[i] for each in self.ranks if i < len(each.inputs)]
            if len(parts) < len(self.ranks) or not is_telling(whole):
                continue
            relation = find(whole, parts, 0.0, False, allow_strides=True).relation
            if relation is not None and relation.is_strided:
                return True
        return False

    def report(self) -> Report:
        """Compare all, and return the report."""
        wrong = self._compare_parameters()
        if wrong and 2 * wrong > len(self.held) + wrong:
            shown = [each.line for each in self.problems[:3]]
            return Report(None, shown, "not comparable: the runs do not start from the same weights", self.counts)
        self._compare_outputs()
        is_right, before = not self.problems, len(self.problems)
        self._compare_gradients()
        is_something = self.counts["compared"] > (len(self.held) if self.counts["not checked"] else 0)
        if is_right:
            if len(self.problems) > _SHOWN:
                more = len(self.problems) - _SHOWN
                self.problems[_SHOWN:] = [_Problem("", f"gradients of {counted(more, 'parameter')} more differ")]
            self._compare_loss()
        elif others := len(self.problems) - before:
            # Wrong values make wrong gradients, of which no list is needed.
            self.problems[before:] = [_Problem("", f"gradients of {counted(others, 'parameter')} differ, too")]
        if not is_something:
            return Report(None, [], "not comparable: nothing was compared", self.counts)
        lines = []
        if self.problems:
            lines.append(f"first wrong: {self.problems[0].module or ROOT}")
        lines += [each.line for each in self.problems]
        return Report(self.problems[0].module if self.problems else None, [*lines, *self._summary()], "", self.counts)

    def _summary(self) -> Iterator[str]:
        """Yield lines on what was compared and what was not."""
        total = self.counts["outputs"] + self.counts["parameters"] + self.counts["gradients"]
        yield (
            f"compared {self.counts['compared']} of {total}: {counted(self.counts['outputs'], 'output')}, "
            f"{counted(self.counts['parameters'], 'parameter')}, {counted(self.counts['gradients'], 'gradient')}"
        )
        if not self.counts["gradients"]:
            yield "no gradients in one process: nothing was checked of backward"
        if self.counts["ambiguous"]:
            yield f"{self.counts['ambiguous']} of them have one value everywhere, which proves nothing"
        if self.counts["not checked"]:
            yield f"not checked: {counted(self.counts['not checked'], 'tensor')} below the rounding of 16 bits"
        if self.whole.is_rounded and self.whole.exact is None:
            yield "no step in float64 shows the rounding of 16 bits: bounds are the dtype's, and small values pass"
        if self.whole.has_autocast and not self.whole.is_rounded:
            yield "autocast casts nothing in float64: its dtypes were not checked; see --dtype float32"
        if self.alone:
            shown = ", ".join(name or ROOT for name in self.alone[:6])
            yield f"without a partner: {shown}{f' and {len(self.alone) - 6} more' if self.alone[6:] else ''}"
        if only := self._on_ranks_alone():
            shown = ", ".join(name or ROOT for name in only[:6])
            yield f"on ranks alone: {shown}{f' and {len(only) - 6} more' if only[6:] else ''}"
        if odd := [name for name, x in self.whole.parameters.items() if not bool(x.isfinite().all())]:
            yield f"not finite in one process: parameter {odd[0]}"
        odd = [call.name for call in self.whole.calls if not all(self._is_finite(i) for i in call.outputs)]
        if odd:
            yield f"not finite in one process: the output of {odd[0] or ROOT}"
        for line in self.whole.noise:
            yield f"set to 0: {line}"

    def _is_finite(self, index: int) -> bool:
        """Whether a tensor of the run in one process has neither NaN nor infinite values."""
        return bool(self.whole.tensors[index].isfinite().all())

    def _on_ranks_alone(self) -> list[str]:
        """Return the names of parameters, and of modules that were called, which one process does not have."""
        called = dict.fromkeys(call.name for each in self.ranks for call in each.calls)
        parameters = dict.fromkeys(name for each in self.ranks for name in each.parameters)
        modules = {*self.whole.modules, *self.whole_times}
        return [name for name in called if name not in modules] + [
            name for name in parameters if name not in self.whole.parameters
        ]

    # ---- what is compared ----

    def _compare_parameters(self) -> int:
        """Find the relations of all parameters; return how many fit none."""
        wrong = 0
        for name, whole in self.whole.parameters.items():
            self.counts["parameters"] += 1
            parts = [each.parameters[name] for each in self.ranks if name in each.parameters]
            if not parts:
                self.alone.append(name)
                self.counts["alone"] += 1
                continue
            eps = max(torch.finfo(x.dtype).eps for x in [whole, *parts] if x.is_floating_point() or x.is_complex())
            bound = 4 * eps * _largest(whole)
            found = find(_wide(whole), list(map(_wide, parts)), bound, False, self._declared(name))
            if not is_telling(_wide(whole)):
                self.counts["ambiguous"] += 1
            self.counts["compared"] += 1
            if found.relation is not None:
                self.held[name] = found.relation
                continue
            wrong += 1
            words = self._words(_wide(whole), list(map(_wide, parts)), bound, self._holders(name), found.nearest)
            figures = f"largest difference {found.error:.1e}, at most {bound:.1e}"
            self._add(name.rpartition(".")[0], f"parameter {name} is no part of the whole one{words} ({figures})")
        return wrong

    def _holders(self, name: str) -> list[int]:
        """Return the ranks that have a parameter."""
        return [rank for rank, each in enumerate(self.ranks) if name in each.parameters]

    def _compare_outputs(self) -> None:
        """Find the relations of all outputs in the order of the run in one process; stop at the first wrong one."""
        pending: list[tuple[Call, str]] = []  # outputs that are addends, of which no sum has been seen yet
        # A wrong output counts when a module around it is wrong, too: tokens in another order inside of experts, or
        # attention in other hands, may come out right.
        suspect: tuple[Call, _Problem] | None = None
        for call in self.whole.calls:
            if suspect is not None and not _is_inside(suspect[0].name, call.name):
                self.counts["outputs"] += len(call.outputs)
                continue
            status, problem = self._compare_call(call, pending)
            if status == "wrong" and problem is not None:
                if suspect is not None or not call.name:
                    break
                suspect = call, problem
            elif status in ("fits", "partial"):
                if suspect is not None:
                    self.alone.append(suspect[0].name)
                    pending = [each for each in pending if each[0] is call]
                suspect = None
        else:
            problem = self._never_summed(pending)
        if suspect is not None:
            self.problems.append(suspect[1])
        elif problem is not None:
            self.problems.append(problem)

    def _never_summed(self, pending: list[tuple[Call, str]]) -> _Problem | None:
        """Return the problem of a step that ends with addends which are no loss."""
        if not pending or pending[-1][0] is not self.whole.calls[-1]:
            return None
        call, words = pending[0]
        if not any(self.whole.tensors[i].dim() for i in call.outputs):
            return None
        return _Problem(call.name, f"{call.name or ROOT}: the ranks' parts were never summed ({words})")

    def _compare_call(self, call: Call, pending: list[tuple[Call, str]]) -> tuple[str, _Problem | None]:
        """Compare one call; return ``fits``, ``partial``, ``wrong`` with the problem, or "" where it says nothing."""
        self.counts["outputs"] += len(call.outputs)
        holders = [rank for rank, each in enumerate(self.ranks) if call.name in each.modules]
        own = [self.calls[rank].get((call.name, call.number)) for rank in holders]
        present = [(rank, each) for rank, each in zip(holders, own, strict=True) if each is not None]
        if not present:
            if call.number == 0 and call.outputs:
                self.alone.append(call.name)
            self.counts["alone"] += len(call.outputs)
            return "", None
        expected = self.whole_times[call.name]
        if len(present) < len(holders) or any(self.times[rank][call.name] != expected for rank, _ in present):
            return "wrong", _Problem(call.name, self._words_of_times(call, holders))
        status = ""
        for j, index in enumerate(call.outputs):
            if any(j >= len(each.outputs) for _, each in present):
                self.counts["alone"] += 1
                continue
            whole = self.whole.tensors[index]
            parts = [self.ranks[rank].tensors[each.outputs[j]] for rank, each in present]
            self.counts["compared"] += 1
            values = _wide(whole), list(map(_wide, parts)), self._bound(call, j)
            if not is_telling(whole):
                self.counts["ambiguous"] += 1
                if _not_finite(*values[:2], range(len(parts))):
                    return "wrong", self._blamed(call, present, pending, find(*values), values)
                continue
            found = find(*values, True, self._declared(call.name), self.has_strides)
            if self._is_below(self._exact_output(call, j), values[2], values[1]):
                continue
            if found.relation is None and self._is_divided(call.name) and self._are_stages(values, present):
                self.alone.append(call.name)
                return "", None
            if found.relation is None:
                return "wrong", self._blamed(call, present, pending, found, values)
            if found.relation.is_partial and not found.relation.is_mean:
                pending.append((call, str(found.relation)))
                status = status or "partial"
            else:
                status = "fits"
        if status == "fits":
            pending.clear()
        return status, None

    def _is_divided(self, name: str) -> bool:
        """Whether ranks have different modules inside of one, as a pipeline's stages have: its outputs differ, too."""
        every = set().union(*(each.modules for each in self.ranks))
        return any(_is_inside(inner, name) for each in self.ranks for inner in every - set(each.modules))

    def _are_stages(self, values: tuple[Tensor, list[Tensor], float], present: list[tuple[int, Call]]) -> bool:
        """Whether every rank's output is the whole one or what the last module inside returned, as of stages it is."""
        whole, parts, bound = values
        for (rank, call), part in zip(present, parts, strict=True):
            inner = {i for each in self.ranks[rank].calls if _is_inside(each.name, call.name) for i in each.outputs}
            tensors = self.ranks[rank].tensors
            if (part.shape != whole.shape or difference(part, whole) > bound) and not any(
                tensors[i].shape == part.shape and torch.equal(_wide(tensors[i]), part) for i in inner
            ):
                return False
        return True

    def _exact_output(self, call: Call, j: int) -> Tensor | None:
        """Return an output in float64; None without a step in float64."""
        exact = self.exact.get((call.name, call.number))
        if exact is None or self.whole.exact is None or j >= len(exact.outputs):
            return None
        return self.whole.exact.tensors[exact.outputs[j]]

    def _bound(self, call: Call, j: int, of_input: bool = False) -> float:
        """Return the largest difference that rounding may make to an output, or an input, of a call."""
        whole = self.whole.tensors[(call.inputs if of_input else call.outputs)[j]]
        exact = self.exact.get((call.name, call.number))
        if exact is not None and self.whole.exact is not None:
            places = exact.inputs if of_input else exact.outputs
            return _rounding(whole, self.whole.exact.tensors[places[j]] if j < len(places) else None)
        return _FACTOR * torch.finfo(call.narrowest).eps * math.sqrt(call.reduction) * _largest(whole)

    def _blamed(
        self,
        call: Call,
        present: list[tuple[int, Call]],
        pending: list[tuple[Call, str]],
        found: Found,
        values: tuple[Tensor, list[Tensor], float],
    ) -> _Problem:
        """Return the problem of a wrong output: of its module, of what computed its input, or of addends before."""
        whole, parts, bound = values
        figures = f"largest difference {found.error:.1e}, at most {bound:.1e}"
        if pending:
            return self._blamed_addends(call, present, pending[0], figures)
        where = self._wrong_input(call, present)
        if where is not None:
            parent = call.name.rpartition(".")[0]
            line = f"{parent or ROOT}: what it computes between its modules is wrong: {where} of {call.name}"
            return _Problem(parent, f"{line} ({figures})")
        words = self._words(whole, parts, bound, [rank for rank, _ in present], found.nearest, call)
        shapes = f" of shape {list(whole.shape)}, here {[list(x.shape) for x in parts]}"
        line = (
            f"{call.name or ROOT}: its output{'' if found.nearest is not None else shapes} is no part of the whole one"
        )
        return _Problem(call.name, f"{line}{words} ({figures})")

    def _blamed_addends(
        self, call: Call, present: list[tuple[int, Call]], addends: tuple[Call, str], figures: str
    ) -> _Problem:
        """Return the problem of a wrong output behind addends: nobody sent anything, or what was made of the sum."""
        culprit, words = addends
        sent = 0
        for rank, each in present:
            before = self.calls[rank].get((culprit.name, culprit.number))
            until = each.collectives[1 if _is_inside(culprit.name, call.name) else 0]
            sent = max(sent, until - before.collectives[1] if before is not None else 0)
        behind = f"{call.name or ROOT} is wrong ({figures})"
        if not sent:
            line = f"{culprit.name or ROOT}: the ranks' parts were never summed ({words}); {behind}"
            return _Problem(culprit.name, line)
        parent = culprit.name.rpartition(".")[0]
        made = f"what it makes of the {words} of {culprit.name}, with {counted(sent, 'collective')}, is wrong"
        line = f"{parent or ROOT}: {made}; {behind}"
        return _Problem(parent, line)

    def _wrong_input(self, call: Call, present: list[tuple[int, Call]]) -> str | None:
        """Return in words the input of a call that is wrong already; None if none is."""
        for j, index in enumerate(call.inputs):
            whole = self.whole.tensors[index]
            if not is_telling(whole) or any(j >= len(each.inputs) for _, each in present):
                continue
            parts = [_wide(self.ranks[rank].tensors[each.inputs[j]]) for rank, each in present]
            if find(_wide(whole), parts, self._bound(call, j, True), allow_strides=self.has_strides).relation is None:
                return f"input {j}" if len(call.inputs) > 1 else "the input"
        return None

    def _compare_gradients(self) -> None:
        """Compare gradients with the parts that the parameters are."""
        largest = max([_largest(x) for x in self.whole.gradients.values() if x is not None], default=0.0)
        eps, reduction = torch.finfo(self.whole.narrowest).eps, self.whole.reduction
        # As backward goes: a wrong gradient makes those of earlier modules wrong. What a module with others inside owns
        # itself, as positions, counts where the first of them ran.
        first: dict[str, int] = {}
        for i, call in enumerate(self.whole.calls):
            parts = call.name.split(".") if call.name else []
            for depth in range(len(parts) + 1):
                first.setdefault(".".join(parts[:depth]), i)
        own = {name: first.get(name.rpartition(".")[0], -1) for name in self.whole.gradients}
        # The gradient of a tied parameter is whole when backward has passed the first module that uses it.
        tied = {name: min(own[each] for each in names) for names in self.whole.tied.values() for name in names}
        names = sorted(self.whole.gradients, key=lambda name: (-tied.get(name, own[name]), -own[name]))
        # Of the largest of all: a gradient may be what is left of addends that cancel. That of a bias in front of a
        # norm is nothing but their rounding.
        for name in names:
            self._compare_gradient(name, _FACTOR * eps * math.sqrt(reduction) * largest)
        if not all(map(self._holders, self.whole.parameters)):
            return  # a name without a partner here may be one without a partner there
        for name in self._on_ranks_alone():
            gradients = [each.gradients.get(name) for each in self.ranks]
            if training := [rank for rank, x in enumerate(gradients) if x is not None and bool((x != 0).any())]:
                line = f"parameter {name} has a gradient on {_ranks(training)}, and one process has no such parameter"
                self._add(name.rpartition(".")[0], line)

    def _compare_gradient(self, name: str, bound: float) -> None:
        """Compare one gradient; zeros and none are the same, as they are to an optimizer without decay."""
        recorded, holders = self.whole.gradients[name], self._holders(name)
        whole = torch.zeros_like(self.whole.parameters[name]) if recorded is None else recorded
        gradients = [self.ranks[rank].gradients.get(name) for rank in holders]
        is_zero = not bool((whole != 0).any())
        self.counts["gradients"] += recorded is not None
        if name not in self.held or not holders:
            self.counts["alone"] += recorded is not None
            return
        self.counts["compared"] += recorded is not None
        self.counts["ambiguous"] += recorded is not None and is_zero
        module, missing = name.rpartition(".")[0], [r for r, x in zip(holders, gradients, strict=True) if x is None]
        if missing and not is_zero:
            self._add(module, f"gradient of {name} is None on {_ranks(missing)}")
            return
        parts = [
            _wide(torch.zeros_like(self.ranks[rank].parameters[name]) if x is None else x)
            for rank, x in zip(holders, gradients, strict=True)
        ]
        if self.whole.exact is not None and recorded is not None:
            exact = self.whole.exact.gradients.get(name)
            bound = _rounding(whole, exact)
            if self._is_below(exact, bound, parts):
                return
        relation = self._declared(f"gradient {name}") or self.held[name]
        found = find(_wide(whole), parts, bound, True, relation)
        if found.relation is not None:
            return
        words = _not_finite(_wide(whole), parts, holders)
        if not words and is_zero:
            having = [rank for rank, x in zip(holders, parts, strict=True) if bool((x != 0).any())]
            held = "is zero in one process" if recorded is not None else "is one that one process does not have"
            words = f"{held}, and not zero on {_ranks(having)}"
        words = words or self._words_of_gradient(name, _wide(whole), parts, bound, holders, relation)
        self._add(module, f"gradient of {name} {words} (largest difference {found.error:.1e}, at most {bound:.1e})")

    def _is_below(self, exact: Tensor | None, bound: float, parts: Sequence[Tensor]) -> bool:
        """Whether the values in float64 are below their bound, which says nothing then; count the tensor if so."""
        if exact is None or _largest(exact) > bound or not all(bool(x.isfinite().all()) for x in parts):
            return False
        self.counts["compared"] -= 1
        self.counts["not checked"] += 1
        return True

    def _compare_loss(self) -> None:
        """Compare the losses that the steps returned: each the whole one, its mean or its addends."""
        whole, parts = self.whole.loss, [each.loss for each in self.ranks if each.loss is not None]
        if whole is None or not parts:
            return
        if not is_telling(whole) and all(bool(x.isfinite().all()) for x in parts):
            return
        self.counts["compared"] += 1
        self.counts["outputs"] += 1
        eps, reduction = torch.finfo(self.whole.narrowest).eps, self.whole.reduction
        bound = _FACTOR * eps * math.sqrt(reduction) * _largest(whole)
        if self.whole.exact is not None:
            bound = max(bound, _rounding(whole, self.whole.exact.loss))
        found = find(_wide(whole), list(map(_wide, parts)), bound)
        if found.relation is None:
            values = ", ".join(f"{float(x.mean()):.6g}" for x in parts)
            self._add(
                "", f"the loss is {float(whole.mean()):.6g}, here {values}: neither equal nor its mean or addends"
            )

    # ---- words, from direct evidence only ----

    def _add(self, module: str, line: str) -> None:
        self.problems.append(_Problem(module, line))

    def _declared(self, name: str) -> Relation | None:
        """Return the relation that a case declares for a name."""
        for each in self.ranks[:1]:
            for pattern, relation in each.relations.items():
                if fnmatchcase(name, pattern):
                    return relation
        return None

    def _words_of_times(self, call: Call, holders: list[int]) -> str:
        """Say on which ranks a module ran how often."""
        expected = self.whole_times[call.name]
        times = {rank: self.times[rank].get(call.name, 0) for rank in holders}
        never = [rank for rank, count in times.items() if not count]
        if never:
            return f"{call.name or ROOT}: never ran on {_ranks(never)}"
        other = next(rank for rank, count in times.items() if count != expected)
        return f"{call.name or ROOT}: ran {times[other]} times on rank {other}, {expected} times in one process"

    def _words(
        self, whole: Tensor, parts: list[Tensor], bound: float, ranks: list[int], nearest: Relation | None,
        call: Call | None = None,
    ) -> str:  # fmt: skip
        """Say what explains wrong values: a factor, another rank's chunk, one rank, a bias, a narrower dtype."""
        if words := _not_finite(whole, parts, ranks):
            return f"; {words}"
        found = [*self._words_of_values(whole, parts, bound, ranks, nearest)]
        if call is not None:
            own = [self.calls[rank][call.name, call.number] for rank in ranks]
            narrower = [
                each.narrowest for each in own if torch.finfo(each.narrowest).eps > torch.finfo(call.narrowest).eps
            ]
            if narrower:
                found.append(f"{narrower[0]} appeared, which one process does not have")
            found += self._words_of_bias(call, whole, parts, bound)
            if (
                len(parts) > 1
                and all(before == after for before, after in (each.collectives for each in own))
                and not found
            ):
                found.append("no collective ran inside")
        return "".join(f"; {each}" for each in found)

    def _words_of_bias(self, call: Call, whole: Tensor, parts: list[Tensor], bound: float) -> Iterator[str]:
        """Yield what explains values to which a bias was added: how often, or what is wrong with the rest."""
        bias = self.whole.parameters.get(f"{call.name}.bias")
        if bias is None or bias.shape != whole.shape[-1:] or any(x.shape != whole.shape for x in parts):
            return
        for times in range(2, len(parts) + 1):
            if all(difference(x, whole + (times - 1) * bias) <= 4 * bound for x in parts):
                yield f"its bias was added {times} times"
                return
        whole, parts = whole - bias, [x - bias for x in parts]
        factor = _factor(parts, [whole] * len(parts), bound)
        if factor is not None:
            yield f"{factor}, but for its bias"
            return
        added = find(whole, parts, 4 * bound, True).relation
        if added is not None and added.is_partial and not added.is_mean:
            yield f"the ranks' parts were never summed ({added}, but for its bias)"

    def _words_of_values(
        self, whole: Tensor, parts: list[Tensor], bound: float, ranks: list[int], nearest: Relation | None
    ) -> Iterator[str]:
        """Yield what explains wrong values, by the ways to split the tensor that its shape allows."""
        if nearest is None:
            missing = _missing(whole, parts)
            if missing:
                yield missing
            return
        partly = ""
        for relation in candidates(whole, parts, False):
            expected = [relation.of(whole, k) for k in range(len(parts))]
            if relation.view or any(e is None or e.shape != x.shape for e, x in zip(expected, parts, strict=True)):
                continue
            pairs = [(x, e) for x, e in zip(parts, expected, strict=True) if e is not None]
            factor = _factor([x for x, _ in pairs], [e for _, e in pairs], bound)
            if factor is not None:
                yield factor
                return
            held = _chunks_held(whole, parts, relation, bound)
            if held is not None:
                places = ", ".join(f"rank {rank} has {i}" for rank, i in zip(ranks, held, strict=True))
                yield f"chunks in another order: {places}"
                return
            wrong = [rank for rank, (x, e) in zip(ranks, pairs, strict=True) if difference(x, e) > bound]
            if not partly and len(wrong) < len(pairs):
                partly = f"only {_ranks(wrong)} differ{'s' if len(wrong) == 1 else ''}"
        if partly:
            yield partly

    def _words_of_gradient(
        self, name: str, whole: Tensor, parts: list[Tensor], bound: float, ranks: list[int], relation: Relation
    ) -> str:
        """Say what is wrong with a gradient."""
        for each in candidates(whole, parts, True):
            is_sum = each.is_partial and not each.is_mean and each.splits == relation.splits
            if is_sum and find(whole, parts, bound, True, each).relation is not None:
                return f"was never summed: {each}"
        expected = [relation.of(whole, k) for k in range(len(parts))]
        if all(e is not None and e.shape == x.shape for e, x in zip(expected, parts, strict=True)):
            factor = _factor(parts, [e for e in expected if e is not None], bound)
            if factor is not None:
                return factor
            wrong = [
                rank for rank, x, e in zip(ranks, parts, expected, strict=True) if e is None or difference(x, e) > bound
            ]
            tied = next((each for each in self.whole.tied.values() if name in each), [])
            if tied and not any(name in each for one in self.ranks for each in one.tied.values()):
                others = ", ".join(each for each in tied if each != name)
                return f"is wrong: in one process it is tied to {others}, here it is not"
            if len(wrong) < len(parts):
                return f"is wrong on {_ranks(wrong)} alone"
        return "is wrong"


def _is_inside(name: str, outer: str) -> bool:
    """Whether a module is inside of another."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in float64; a complex one with its parts in a last dim."""
    return torch.view_as_real(x.to(torch.complex128)) if x.is_complex() else x.to(torch.float64)


def _not_finite(whole: Tensor, parts: Sequence[Tensor], ranks: Sequence[int]) -> str:
    """Say on which ranks values are NaN or infinite, though none of the whole tensor is; "" if none are."""
    if not bool(whole.isfinite().all()):
        return ""
    found: dict[str, list[int]] = {}
    for rank, x in zip(ranks, parts, strict=True):
        for kind, is_odd in (("NaN", x.isnan()), ("infinite", x.isinf())):
            if bool(is_odd.any()):
                at = [int(i) for i in is_odd.nonzero()[0]]
                many = f"{int(is_odd.sum())} of {counted(x.numel(), 'value')}, first at {at}"
                many = "all values" if bool(is_odd.all()) else many
                found.setdefault(f"{kind}|{many}", []).append(rank)
    return ", ".join(
        f"is {kind} on {_ranks(who)} ({many})" for key, who in found.items() for kind, many in [key.split("|")]
    )


def _rounding(x: Tensor, exact: Tensor | None) -> float:
    """Return the bound of a step in 16 bits: four times the distance to the same step in float64."""
    eps = torch.finfo(x.dtype).eps * _largest(x)
    if exact is None or exact.shape != x.shape:
        return _FACTOR * eps
    return max(_OF_ROUNDING * difference(_wide(x), _wide(exact)), eps)


def _largest(x: Tensor) -> float:
    """Return the largest finite magnitude, at least a number that is not zero."""
    if not x.numel():
        return 1.0
    return max(float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()), 1e-30)


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _factor(parts: Sequence[Tensor], expected: Sequence[Tensor], bound: float) -> str | None:
    """Say by which number all values are off, if one number explains them."""
    top = sum(float((x * e).sum()) for x, e in zip(parts, expected, strict=True))
    bottom = sum(float((e * e).sum()) for e in expected)
    if not bottom or not math.isfinite(top / bottom):
        return None
    ratio = top / bottom
    if any(difference(x, ratio * e) > 4 * bound * max(1.0, abs(ratio)) for x, e in zip(parts, expected, strict=True)):
        return None
    if abs(ratio) < 1e-9:
        return "is zero"
    if abs(ratio - round(ratio)) < 1e-6 and abs(round(ratio)) > 1:
        return f"is {round(ratio)} times the whole one"
    if abs(1 / ratio - round(1 / ratio)) < 1e-6:
        return (
            "has the other sign"
            if round(ratio, 6) == -1
            else f"is {'-' * (ratio < 0)}1/{round(abs(1 / ratio))} of the whole one"
        )
    return f"is {ratio:.6g} times the whole one"


def _chunks_held(whole: Tensor, parts: Sequence[Tensor], relation: Relation, bound: float) -> list[int] | None:
    """Return which chunk each rank holds, if each holds one and they are not in order."""
    if len(relation.splits) != 1:
        return None
    (_, chunks, _), found = relation.splits[0], []
    for x in parts:
        for i in range(chunks):
            expected = relation.of(whole, i * relation.splits[0][2])
            if expected is not None and expected.shape == x.shape and difference(x, expected) <= bound:
                found.append(i)
                break
        else:
            return None
    return found


def _missing(whole: Tensor, parts: Sequence[Tensor]) -> str:
    """Say how much of a dim the ranks hold together, if they hold less than all of it."""
    if any(x.dim() != whole.dim() for x in parts):
        return ""
    for dim, size in enumerate(whole.shape):
        held = sum(x.shape[dim] for x in parts)
        if held < size and any(x.shape[dim] != size for x in parts):
            return f"the ranks hold {held} of {size} along dim {dim}"
    return ""
