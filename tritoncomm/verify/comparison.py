"""The ranks' recordings against that of one process: the first wrong module, wrong gradients, in words."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch.distributed import ProcessGroup

from tritoncomm import collective
from tritoncomm.core import backend
from tritoncomm.errors import MismatchError
from tritoncomm.parsing import counted
from tritoncomm.verify import explanations
from tritoncomm.verify.bounds import Values
from tritoncomm.verify.gradients import Gradients
from tritoncomm.verify.ledger import ALONE, Ledger, figures
from tritoncomm.verify.outputs import Outputs
from tritoncomm.verify.recording import ROOT, Recording
from tritoncomm.verify.relations import Relation, find, is_telling
from tritoncomm.verify.runs import Recordings

__all__ = ["Report", "compare"]

_SHOWN = 12  # gradients in a report
_STEP = "the step"  # where no module is at fault
_ALONE, _INSIDE = "without a partner", "of no effect outside"  # why something was not compared


@dataclass
class Report:
    """Result of a comparison, the same on every rank.

    Attributes:
        first: name of the first wrong module, or of the module of the first wrong parameter or gradient; None if all is
            equal.
        lines: what was found, in sentences of a line each.
        problem: why nothing could be compared; empty if it was.
        counts: ``outputs``, ``parameters``, ``gradients`` and ``changed`` parameters and buffers of the run in one
            process, those ``compared``, those that are ``ambiguous`` because all their values are the same, ``not
            checked`` because their rounding is larger than a tenth of them, and ``alone``, without a partner.
        not_compared: names of what was not compared, by the reason.
    """

    first: str | None = None
    lines: list[str] = field(default_factory=list)
    problem: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    not_compared: dict[str, list[str]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether everything is equal: outputs, parameters and gradients of the whole model were compared."""
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
        return _report(whole, list(mine))
    if group is None and torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
    if group is None or group.size() == 1:
        return _report(whole, [mine])
    every = _gathered(mine.to_bytes(), group)
    text = ""
    if group.rank() == 0:
        text = json.dumps(asdict(_report(whole, [Recording.from_bytes(each) for each in every])))
    return Report(**json.loads(_gathered(text.encode(), group)[0]))


def _report(whole: Recording, ranks: list[Recording]) -> Report:
    """Return the report; where all ran in float64, too, these recordings are compared first, then those in 16 bits."""
    parts = [run.exact for run in ranks if run.exact is not None]
    if whole.exact is None or len(parts) < len(ranks):
        return _Comparison(whole, ranks).report()
    exact = _Comparison(whole.exact, parts, "exact").report()
    if not exact.equal:
        return exact
    written = _Comparison(whole, ranks, "written").report()
    if not written.equal:
        written.lines.append("in float64 all is equal")
        return written
    not_checked = written.counts["not checked"]
    line = f"in {str(whole.narrowest).removeprefix('torch.')}, too"
    if not_checked:
        line += f", but for {counted(not_checked, 'tensor')} below its rounding"
    exact.lines.append(line)
    return exact


def _gathered(own: bytes, group: ProcessGroup) -> list[bytes]:
    """Return the bytes of every rank."""
    device = backend.default_device(backend.cuda_backend(group))
    lengths = collective.all_gather(torch.tensor([len(own)], device=device), 0, group).tolist()
    sent = torch.frombuffer(bytearray(own or b"\0"), dtype=torch.uint8)[: len(own)].to(device)
    parts = collective.all_gather(sent, 0, group, sizes=lengths).cpu().split(lengths)
    return [each.numpy().tobytes() for each in parts]


class _Comparison:
    """The work of ``compare``, on all recordings.

    Attributes:
        stage: of a step in 16 bits "exact" in float64, then "written": what this one cannot check was checked before.
        held: relations of parameters.
    """

    def __init__(self, whole: Recording, ranks: list[Recording], stage: str = "") -> None:
        self.stage, self.runs, self.ledger = stage, Recordings(whole, ranks), Ledger(whole.is_rounded)
        self.whole, self.ranks, self.bounds = whole, self.runs.ranks, self.runs.bounds
        self.held: dict[str, Relation] = {}

    def report(self) -> Report:
        """Compare all, and return the report."""
        wrong = self._compare_parameters()
        if wrong > len(self.held):  # most of the parameters
            shown = [each.line for each in self.ledger.problems[:3]]
            return self._refused("not comparable: the runs do not start from the same weights", shown)
        Outputs(self.runs, self.ledger).compare()
        gradients = Gradients(self.runs, self.ledger, self.held)
        num_problems = len(self.ledger.problems)
        is_right = not num_problems
        has_outputs = self.ledger.counts["outputs"] > 0
        gradients.compare()
        blame = gradients.blame_on_step() if is_right else None
        # Fold the problems that the gradients added to fewer lines, unless outputs are wrong before them.
        self.ledger.fold(num_problems, "gradients of", is_right)
        if blame is not None:
            self.ledger.problems.insert(0, blame)
        if is_right:
            gradients.compare_loss()
        num_problems = len(self.ledger.problems)
        if self.stage != "written":
            gradients.compare_changed()
        self.ledger.fold(num_problems, "changes of", not num_problems)
        if not self.ledger.problems and (problem := self._not_comparable(has_outputs)):
            return self._refused(problem, list(self._summary()) if self.ledger.done.total() else [])
        lines = []
        if self.ledger.problems:
            lines.append(f"first wrong: {self.ledger.problems[0].module or ROOT}")
        lines += [each.line for each in self.ledger.problems]
        first = self.ledger.problems[0].module if self.ledger.problems else None
        return Report(first, [*lines, *self._summary()], "", self.ledger.counts, self.ledger.left)

    def _refused(self, problem: str, lines: list[str]) -> Report:
        """Return the report of runs that could not be compared."""
        return Report(
            first=None, lines=lines, problem=problem, counts=self.ledger.counts, not_compared=self.ledger.left
        )

    def _not_comparable(self, has_outputs: bool) -> str:
        """Say why equal values prove nothing; "" if they do."""
        if not self.ledger.done.total():
            return "not comparable: nothing was compared"
        if self.stage == "written":  # behind the comparison in float64, which has proved it
            return ""
        if self.whole.is_rounded and self.ledger.counts["not checked"]:
            return f"not checked: {counted(self.ledger.counts['not checked'], 'tensor')} below the rounding of 16 bits"
        parameters = {name for run in self.ranks for name in run.parameters}
        modules = {name for run in self.ranks for name in run.modules}
        called = dict.fromkeys(call.name for call in self.whole.calls if call.outputs)
        only = self.runs.on_ranks_alone()
        for kind, missing, there in (
            ("parameter", [name for name in self.whole.parameters if name not in parameters], parameters),
            ("module", [name for name in called if name not in modules], modules),
        ):
            if missing and (others := [name for name in only if name in there]):
                return (
                    f"not comparable: no rank has the {kind} {missing[0]} of one process, and one process has no "
                    f"{others[0]}, which ranks have: Case.rename gives the names of one process"
                )
        for kind, is_there in (("output", has_outputs), ("gradient", self.ledger.counts["gradients"] > 0)):
            if is_there and self.ledger.done[f"{kind}s"] <= 0:  # less what was left out
                return f"not comparable: no {kind} was compared, and one process has {kind}s"
        if self.ledger.done["outputs"] + self.ledger.done["loss"] <= 0:
            return "not comparable: no output was compared"
        return f"not comparable: {self.ledger.parts[0]}" if self.ledger.parts else ""

    def _summary(self) -> Iterator[str]:
        """Yield lines on what was compared and what was not, the first one on all of it."""
        kinds = {"outputs": "output", "parameters": "parameter", "gradients": "gradient", "changed": "change"}
        counts = self.ledger.counts
        total = sum(counts[kind] for kind in kinds)
        line = f"compared {counts['compared']} of {total}: " + ", ".join(
            counted(counts[kind], word) for kind, word in kinds.items() if counts[kind] or kind != "changed"
        )
        for reason, names in self.ledger.left.items():
            shown = ", ".join(name or ROOT for name in names[:6])
            line += f"; {reason}: {shown}{f' and {len(names) - 6} more' if names[6:] else ''}"
        yield line
        if not self.ledger.counts["gradients"]:
            yield "no gradients in one process: nothing was checked of backward"
        if self.ledger.counts["ambiguous"]:
            yield f"{self.ledger.counts['ambiguous']} of them have one value everywhere, which proves nothing"
        if self.whole.is_rounded and self.whole.exact is None:
            yield "no step in float64 shows the rounding of 16 bits: bounds are the dtype's"
        if self.whole.has_autocast and not self.whole.is_rounded and not self.stage:
            yield "autocast casts nothing in float64: its dtypes were not checked; see --dtype float32"
        if coarse := self._coarse_gradients():
            yield f"the ranks' gradients are {coarse}: compared within its rounding"
        if only := self.runs.on_ranks_alone():
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
        dtypes = {x.dtype for run in self.ranks for x in run.gradients.values() if x is not None}
        coarse = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)
        if coarse is None or torch.finfo(coarse).eps <= torch.finfo(self.whole.narrowest).eps:
            return None
        return coarse

    def _is_finite(self, index: int) -> bool:
        """Whether a tensor of the run in one process has neither NaN nor infinite values."""
        return bool(self.whole.tensors[index].isfinite().all())

    def _compare_parameters(self) -> int:
        """Find the relations of all parameters; return how many fit none."""
        wrong = 0
        for name, whole in self.whole.parameters.items():
            self.ledger.counts["parameters"] += 1
            parts = [run.parameters[name] for run in self.ranks if name in run.parameters]
            if not parts:
                self.ledger.leave(ALONE, name)
                self.ledger.counts["alone"] += 1
                continue
            values = Values.of(whole, parts, self.bounds.of_parameter(whole, parts))
            fit = find(*values, allow_sums=False, known=self.runs.declared(name))
            if not is_telling(values.whole):
                self.ledger.counts["ambiguous"] += 1
            self.ledger.count("parameters")
            if (relation := self.ledger.relation(fit, f"parameter {name}", whole, len(parts))) is not None:
                self.held[name] = relation
                continue
            wrong += 1
            reason = explanations.of_output(values, self.runs.holders(name), fit.nearest)
            line = f"parameter {name} is no part of the whole one{reason} ({figures(fit, values)})"
            self.ledger.add(name.rpartition(".")[0], line)
        return wrong
