"""Recordings of one process and of the ranks, and what a comparison looks up in them."""

from collections import Counter
from fnmatch import fnmatchcase

from tritoncomm.verify.bounds import Bounds
from tritoncomm.verify.recording import Call, Recording
from tritoncomm.verify.relations import Relation, find, is_telling

__all__ = ["Recordings", "is_inside"]


class Recordings:
    """The run in one process and those of the ranks, by its names.

    Attributes:
        whole: the recording of one process.
        ranks: those of the ranks.
        bounds: of rounding.
        calls: of every rank, by name and number.
        times: of every rank, how often every module was called.
        whole_times: the same in one process.
        has_strides: whether ranks may hold every n-th index of a dim, as samplers of data parallelism draw them.
    """

    def __init__(self, whole: Recording, ranks: list[Recording]) -> None:
        self.whole, self.ranks, self.bounds = whole, [run.renamed(whole) for run in ranks], Bounds(whole)
        self.calls = [{(call.name, call.number): call for call in run.calls} for run in self.ranks]
        self.times = [Counter(call.name for call in run.calls) for run in self.ranks]
        self.whole_times = Counter(call.name for call in whole.calls)
        self.has_strides = self._has_strided_inputs()

    def _has_strided_inputs(self) -> bool:
        """Whether a relation is declared so, or the ranks call the model with every n-th index of an input."""
        if any(relation.is_strided for run in self.ranks for relation in run.relations.values()):
            return True
        for key, whole in self.whole.inputs.items():
            parts = [run.inputs[key] for run in self.ranks if key in run.inputs]
            if len(parts) < len(self.ranks) or not is_telling(whole):
                continue
            relation = find(whole, parts, 0.0, allow_sums=False, allow_strides=True).relation
            if relation is not None and relation.is_strided:
                return True
        return False

    def present(self, call: Call) -> list[tuple[int, Call]]:
        """Return the ranks that made a call, with theirs."""
        own = [(rank, self.calls[rank].get((call.name, call.number))) for rank in self.with_module(call.name)]
        return [(rank, each) for rank, each in own if each is not None]

    def with_module(self, name: str) -> list[int]:
        """Return the ranks that have a module, called or not."""
        return [rank for rank, run in enumerate(self.ranks) if name in run.modules]

    def holders(self, name: str) -> list[int]:
        """Return the ranks that have a parameter."""
        return [rank for rank, run in enumerate(self.ranks) if name in run.parameters]

    def declared(self, name: str) -> Relation | None:
        """Return the relation that a case declares for a name."""
        for run in self.ranks[:1]:
            for pattern, relation in run.relations.items():
                if fnmatchcase(name, pattern):
                    return relation
        return None

    def around(self, name: str) -> str:
        """Return the name of the next outer module that ran: lists of modules never do."""
        while name:
            name = name.rpartition(".")[0]
            if name in self.whole_times:
                break
        return name

    def on_ranks_alone(self) -> list[str]:
        """Return the names of parameters, and of modules that were called, which one process does not have."""
        called = dict.fromkeys(call.name for run in self.ranks for call in run.calls)
        parameters = dict.fromkeys(name for run in self.ranks for name in run.parameters)
        modules = {*self.whole.modules, *self.whole_times}
        return [name for name in called if name not in modules] + [
            name for name in parameters if name not in self.whole.parameters
        ]


def is_inside(name: str, outer: str) -> bool:
    """Whether a module is inside of another."""
    return name != outer and (not outer or name.startswith(f"{outer}."))
