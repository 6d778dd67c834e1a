"""The ranks' recordings against that of one process: the first wrong module, wrong gradients, in words."""

import json
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
from tritoncomm.verify import explanations
from tritoncomm.verify.bounds import Bounds, Values, is_below, wide
from tritoncomm.verify.explanations import factor_of as _factor
from tritoncomm.verify.explanations import not_finite, ranks_in_words
from tritoncomm.verify.recording import ROOT, Call, Recording
from tritoncomm.verify.relations import Found, Relation, difference, find, is_telling

__all__ = ["Report", "compare"]

_SHOWN = 12  # gradients in a report


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


@dataclass
class _Wrong:
    """A call with a wrong output.

    Attributes:
        index: of the call in one process.
        call: in one process.
        problem: what the report says of it.
        has_right_inputs: whether none of its inputs is wrong, so that the fault is in it.
        is_repaired: whether a right call has an input that was computed from it, and is right, too.
    """

    index: int
    call: Call
    problem: _Problem
    has_right_inputs: bool
    is_repaired: bool = False


class _Comparison:
    """The work of ``compare``, on all recordings."""

    def __init__(self, whole: Recording, ranks: list[Recording]) -> None:
        self.whole, self.ranks, self.bounds = whole, ranks, Bounds(whole)
        self.calls = [{(call.name, call.number): call for call in each.calls} for each in ranks]
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
        if coarse := self._coarse_gradients():
            yield f"the ranks' gradients are {coarse}: compared within its rounding"
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

    def _coarse_gradients(self) -> torch.dtype | None:
        """Return the dtype of the ranks' gradients if it is narrower than any in one process; else None."""
        dtypes = {x.dtype for each in self.ranks for x in each.gradients.values() if x is not None}
        coarse = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)
        if coarse is None or torch.finfo(coarse).eps <= torch.finfo(self.whole.narrowest).eps:
            return None
        return coarse

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
            values = Values.of(whole, parts, self.bounds.of_parameter(whole, parts))
            found = find(*values, False, self._declared(name))
            if not is_telling(values.whole):
                self.counts["ambiguous"] += 1
            self.counts["compared"] += 1
            if found.relation is not None:
                self.held[name] = found.relation
                continue
            wrong += 1
            words = explanations.of_output(values, self._holders(name), found.nearest)
            line = f"parameter {name} is no part of the whole one{words} ({_figures(found, values)})"
            self._add(name.rpartition(".")[0], line)
        return wrong

    def _holders(self, name: str) -> list[int]:
        """Return the ranks that have a parameter."""
        return [rank for rank, each in enumerate(self.ranks) if name in each.parameters]

    def _compare_outputs(self) -> None:
        """Find the relations of all outputs in the order of the run in one process, and add the first problem."""
        pending: list[tuple[Call, str]] = []  # outputs that are addends, of which no sum has been seen yet
        wrong: list[_Wrong] = []
        for index, call in enumerate(self.whole.calls):
            status, problem = self._compare_call(call, pending)
            if problem is not None:
                wrong.append(_Wrong(index, call, problem, self._has_right_inputs(call)))
                pending.clear()  # the problem is about them
            elif status in ("fits", "partial"):
                harmless = [each for each in wrong if _is_inside(each.call.name, call.name)]
                self.alone += [each.call.name for each in harmless if each.has_right_inputs]
                wrong = [each for each in wrong if each not in harmless]
                if harmless:
                    pending = [each for each in pending if each[0] is call]
                if status == "fits":
                    self._note_repairs(wrong, call)
        if (problem := self._first(wrong)) is None:
            self.alone += [each.call.name for each in wrong if each.has_right_inputs]
            problem = self._never_summed(pending)
        if problem is not None:
            self.problems.append(problem)

    def _has_right_inputs(self, call: Call) -> bool:
        """Whether no input of a call is wrong, as far as it can be compared."""
        present = self._present(call)
        return bool(present) and self._wrong_input(call, present) is None

    def _note_repairs(self, wrong: list[_Wrong], call: Call) -> None:
        """Mark wrong outputs from which an input of a right call was computed: masked lookups, tokens put in order."""
        inputs = [index for index in call.inputs if is_telling(self.whole.tensors[index])]
        if not inputs or not self._has_right_inputs(call):
            return
        for each in wrong:
            if each.call.has_graph:
                each.is_repaired |= each.index in call.sources
            elif tensors := [*each.call.outputs, *each.call.inputs]:  # of a frozen module: an input that is new
                each.is_repaired |= max(inputs) > max(tensors)

    @staticmethod
    def _first(wrong: list[_Wrong]) -> _Problem | None:
        """Return the problem of the first module at fault; None if what the wrong ones returned was repaired."""
        open_ones = [each for each in wrong if not each.is_repaired]
        if not open_ones:
            return None
        # A module at fault has right inputs. A module inside of it says more: one that is at fault itself, or one whose
        # input the code between the modules made wrong.
        chosen = next((each for each in open_ones if each.has_right_inputs), open_ones[0])
        inside = [each for each in open_ones if each is chosen or _is_inside(each.call.name, chosen.call.name)]
        first = inside[0]
        # An input that is wrong already for the module around it was made wrong there.
        for each in open_ones:
            if not (first.has_right_inputs or each.has_right_inputs) and _is_inside(first.call.name, each.call.name):
                first = each
        return first.problem

    def _never_summed(self, pending: list[tuple[Call, str]]) -> _Problem | None:
        """Return the problem of a step that ends with addends which are no loss."""
        if not pending or pending[-1][0] is not self.whole.calls[-1]:
            return None
        call, words = pending[0]
        if not any(self.whole.tensors[i].dim() for i in call.outputs):
            return None
        return _Problem(call.name, f"{call.name or ROOT}: the ranks' parts were never summed ({words})")

    def _present(self, call: Call) -> list[tuple[int, Call]]:
        """Return the ranks that made a call, with theirs."""
        own = [(rank, self.calls[rank].get((call.name, call.number))) for rank in self._with_module(call.name)]
        return [(rank, each) for rank, each in own if each is not None]

    def _with_module(self, name: str) -> list[int]:
        """Return the ranks that have a module, called or not."""
        return [rank for rank, each in enumerate(self.ranks) if name in each.modules]

    def _compare_call(self, call: Call, pending: list[tuple[Call, str]]) -> tuple[str, _Problem | None]:
        """Compare one call; return ``fits``, ``partial`` or "" if it says nothing, and the problem of a wrong one."""
        self.counts["outputs"] += len(call.outputs)
        holders, present = self._with_module(call.name), self._present(call)
        if not present:
            if call.number == 0 and call.outputs:
                self.alone.append(call.name)
            self.counts["alone"] += len(call.outputs)
            return "", None
        expected = self.whole_times[call.name]
        if len(present) < len(holders) or any(self.times[rank][call.name] != expected for rank, _ in present):
            return "", _Problem(call.name, self._words_of_times(call, holders))
        status = ""
        for j, index in enumerate(call.outputs):
            if any(j >= len(each.outputs) for _, each in present):
                self.counts["alone"] += 1
                continue
            whole = self.whole.tensors[index]
            parts = [self.ranks[rank].tensors[each.outputs[j]] for rank, each in present]
            self.counts["compared"] += 1
            values = Values.of(whole, parts, self.bounds.of_output(call, j))
            if not is_telling(whole):
                self.counts["ambiguous"] += 1
                if not_finite(values, range(len(parts))):
                    return "", self._blamed(call, present, pending, find(*values), values)
                continue
            found = find(*values, True, self._declared(call.name), self.has_strides)
            if self._is_unchecked(self.bounds.exact_output(call, j), values):
                continue
            if found.relation is None and self._is_divided(call.name) and self._are_stages(values, present):
                self.alone.append(call.name)
                return "", None
            if found.relation is None:
                return "", self._blamed(call, present, pending, found, values)
            if found.relation.is_partial and not found.relation.is_mean:
                pending.append((call, str(found.relation)))
                status = status or "partial"
            else:
                status = "fits"
        if status == "fits":
            pending.clear()
        return status, None

    def _is_unchecked(self, exact: Tensor | None, values: Values) -> bool:
        """Whether a comparison of these values says nothing; count the tensor if so."""
        if not is_below(exact, values):
            return False
        self.counts["compared"] -= 1
        self.counts["not checked"] += 1
        return True

    def _is_divided(self, name: str) -> bool:
        """Whether ranks have different modules inside of one, as a pipeline's stages have: its outputs differ, too."""
        every = set().union(*(each.modules for each in self.ranks))
        holders = [set(each.modules) for each in self.ranks if name in each.modules]
        return any(_is_inside(inner, name) for modules in holders for inner in every - modules)

    def _are_stages(self, values: Values, present: list[tuple[int, Call]]) -> bool:
        """Whether every rank's output is the whole one or what the last module inside returned, as of stages it is."""
        whole, parts, bound = values
        for (rank, call), part in zip(present, parts, strict=True):
            inner = {i for each in self.ranks[rank].calls if _is_inside(each.name, call.name) for i in each.outputs}
            tensors = self.ranks[rank].tensors
            if (part.shape != whole.shape or difference(part, whole) > bound) and not any(
                tensors[i].shape == part.shape and torch.equal(wide(tensors[i]), part) for i in inner
            ):
                return False
        return True

    def _blamed(
        self,
        call: Call,
        present: list[tuple[int, Call]],
        pending: list[tuple[Call, str]],
        found: Found,
        values: Values,
    ) -> _Problem:
        """Return the problem of a wrong output: of its module, of what computed its input, or of addends before."""
        figures = _figures(found, values)
        if pending:
            return self._blamed_addends(call, present, pending[0], figures)
        where = self._wrong_input(call, present)
        if where is not None and not call.name:
            return _Problem("", f"{ROOT}: {where} is no part of the whole one ({figures})")
        if where is not None:
            parent = call.name.rpartition(".")[0]
            line = f"{parent or ROOT}: what it computes between its modules is wrong: {where} of {call.name}"
            return _Problem(parent, f"{line} ({figures})")
        bias = self.whole.parameters.get(f"{call.name}.bias")
        calls = [call, *(each for _, each in present)]
        words = explanations.of_output(values, [rank for rank, _ in present], found.nearest, bias, calls)
        shapes = f" of shape {list(values.whole.shape)}, here {[list(x.shape) for x in values.parts]}"
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
            parts = [self.ranks[rank].tensors[each.inputs[j]] for rank, each in present]
            values = Values.of(whole, parts, self.bounds.of_output(call, j, True))
            if find(*values, allow_strides=self.has_strides).relation is None:
                return f"input {j}" if len(call.inputs) > 1 else "the input"
        return None

    def _compare_gradients(self) -> None:
        """Compare gradients with the parts that the parameters are."""
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
        for name in names:
            self._compare_gradient(name)
        if not all(map(self._holders, self.whole.parameters)):
            return  # a name without a partner here may be one without a partner there
        for name in self._on_ranks_alone():
            gradients = [each.gradients.get(name) for each in self.ranks]
            if training := [rank for rank, x in enumerate(gradients) if x is not None and bool((x != 0).any())]:
                where = ranks_in_words(training)
                line = f"parameter {name} has a gradient on {where}, and one process has no such parameter"
                self._add(name.rpartition(".")[0], line)

    def _compare_gradient(self, name: str) -> None:
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
            self._add(module, f"gradient of {name} is None on {ranks_in_words(missing)}")
            return
        parts = [
            torch.zeros_like(self.ranks[rank].parameters[name]) if x is None else x
            for rank, x in zip(holders, gradients, strict=True)
        ]
        exact = None if recorded is None else self.bounds.exact_gradient(name)
        values = Values.of(whole, parts, self.bounds.of_gradient(whole, parts, exact))
        if self._is_unchecked(exact, values):
            return
        relation = self._declared(f"gradient {name}") or self.held[name]
        found = find(*values, True, relation)
        if found.relation is not None:
            return
        words = not_finite(values, holders)
        if not words and is_zero:
            having = [rank for rank, x in zip(holders, parts, strict=True) if bool((x != 0).any())]
            held = "is zero in one process" if recorded is not None else "is one that one process does not have"
            words = f"{held}, and not zero on {ranks_in_words(having)}"
        words = words or explanations.of_gradient(name, values, holders, relation, self.whole, self.ranks)
        self._add(module, f"gradient of {name} {words} ({_figures(found, values)})")

    def _compare_loss(self) -> None:
        """Compare the losses that the steps returned: each the whole one, its mean or its addends."""
        whole, parts = self.whole.loss, [each.loss for each in self.ranks if each.loss is not None]
        if whole is None or not parts:
            return
        if not is_telling(whole) and all(bool(x.isfinite().all()) for x in parts):
            return
        self.counts["compared"] += 1
        self.counts["outputs"] += 1
        values = Values.of(whole, parts, self.bounds.of_loss(whole))
        if find(*values).relation is None:
            losses = ", ".join(f"{float(x.mean()):.6g}" for x in parts)
            is_like = all(x.shape == whole.shape for x in parts)
            factor = _factor(values.parts, [values.whole] * len(parts), values.bound) if is_like else None
            words = factor or "neither equal nor its mean or addends"
            self._add("", f"the loss is {float(whole.mean()):.6g}, here {losses}: {words}")

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
            return f"{call.name or ROOT}: never ran on {ranks_in_words(never)}"
        other = next(rank for rank, count in times.items() if count != expected)
        return f"{call.name or ROOT}: ran {times[other]} times on rank {other}, {expected} times in one process"


def _figures(found: Found, values: Values) -> str:
    """Return the difference and its bound in words."""
    return f"largest difference {found.error:.1e}, at most {values.bound:.1e}"


def _is_inside(name: str, outer: str) -> bool:
    """Whether a module is inside of another."""
    return name != outer and (not outer or name.startswith(f"{outer}."))
