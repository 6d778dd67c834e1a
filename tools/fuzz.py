"""Drawn inputs of everything that takes input: ``python tools/fuzz.py [--cases 100000] [--domains NAMES]``.

What comes of a case is a right answer or an error of the library's own, within the time and the memory of its domain.
The cases are drawn by Hypothesis, which also makes a failing one small and prints how to run it again.
"""

import argparse
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import fuzz_arguments
import fuzz_attention
import fuzz_batches
import fuzz_experts
import fuzz_files
import fuzz_recurrences
import fuzz_reshard
import fuzz_segments
import fuzz_stages
import fuzz_states
import fuzz_sums
from fuzz_calls import DTYPES, GROUPS, KINDS, LAYOUTS, run_call, verdict
from hypothesis import HealthCheck, Phase, Verbosity, assume, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from mapping_cases import FUNCTIONS, Call, Matrix
from pool import Pool

__all__ = ["DOMAINS", "Domain", "fuzz", "main"]

CASES = 100_000
SECONDS, MEBIBYTES = 20, 400  # of a case; of all cases of a domain
ROUND = 2000
"""Cases between two lines of progress; those of `make test`."""


@dataclass(frozen=True)
class Domain:
    """One kind of input.

    Attributes:
        share: of the 2,000 cases of a round.
        cases: what is drawn.
        check: raises where what comes of a case is neither right nor refused by name.
    """

    share: int
    cases: SearchStrategy[Any]
    check: Callable[[Any, Any], None]


def _on_ranks(function: Callable[..., str], seconds: float = SECONDS) -> Callable[[Any, Any], None]:
    """The check of a function that every rank calls, and which says what came of it."""

    def check(pool: Pool, case: tuple[Any, Any]) -> None:
        world, drawn = case
        outcomes = pool.run(function, drawn, world=world, timeout=seconds)
        assume("mixed" not in outcomes)
        problem = verdict(outcomes)
        assert not problem, problem

    return check


WORLDS = st.sampled_from([2, 2, 4, 1, (1, 3)])
RANKS = st.sampled_from([2, 4, 4, 1, (1, 3), 8])
JUNK = st.sampled_from([None, True, 1.5, "1", -7, 7, 2**40, 2**70, [0], (), float("nan"), b"x", 1j])
SHAPES = st.one_of(
    st.lists(st.sampled_from([4, 8, 4, 12, 1, 0, 2, 3, 5, 7]), max_size=4).map(tuple),
    st.sampled_from([(4, 8), (8, 4, 4), (4, 4), (8,), (12, 1, 4)]),
)
DIMS = st.one_of(st.integers(-2, 2), st.integers(-2, 2), st.integers(-2, 2), JUNK)
SIZES = st.one_of(
    st.none(), st.none(), st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.lists(st.integers(0, 4), min_size=1, max_size=4), st.lists(JUNK, max_size=3), JUNK,
    fuzz_files.ODD_SIZES,
)  # fmt: skip
MATRICES = st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4).map(tuple), min_size=4, max_size=4).map(
    lambda rows: Matrix(tuple(rows))
)


def mostly(likely: Sequence[Any], rest: Sequence[Any]) -> SearchStrategy[Any]:
    """One of ``likely`` in three of four draws."""
    return st.one_of(*[st.sampled_from(list(likely))] * 3, st.sampled_from(list(rest)))


@st.composite
def calls(draw: Any) -> tuple[Any, Call]:
    """A call, with few odd arguments at a time."""
    world, function = draw(WORLDS), draw(st.sampled_from(list(FUNCTIONS)))
    takes = FUNCTIONS[function].sizes
    ranks = len(world) if isinstance(world, tuple) else world
    sizes: tuple[Any, Any] = (None, None)
    shape = draw(SHAPES)
    if takes and draw(st.booleans()):
        matching = st.one_of(  # any, and almost equal ones, which a gather pads
            *[st.lists(st.integers(*range_), min_size=ranks, max_size=ranks) for range_ in ((0, 4), (8, 9))]
        )
        sizes = draw(st.tuples(st.one_of(matching, SIZES), st.one_of(st.none(), matching, SIZES)))
        if takes == "rows" and draw(st.booleans()):
            sizes = (None, draw(MATRICES))
        elif takes == "split" and shape and draw(st.booleans()):
            sizes = (draw(_adding_up(shape[0], ranks)), None)
    return world, Call(
        function,
        shape,
        draw(mostly(["float32", "bfloat16", "int64", "complex64"], DTYPES)),
        draw(mostly(["contiguous", "transposed", "sliced"], LAYOUTS)),
        draw(mostly(["plain", "leaf"], KINDS)),
        draw(mostly(["group"], GROUPS)),
        draw(st.tuples(DIMS, DIMS)),
        sizes,
        draw(st.booleans()) or draw(st.booleans()),
        draw(mostly(["SUM"], ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])),
        draw(st.booleans()),
        draw(mostly(["auto"], ["torch", "triton"])),
    )


@st.composite
def _adding_up(draw: Any, size: int, ranks: int) -> list[int]:
    """Sizes of as many ranks that add up."""
    edges = sorted(draw(st.lists(st.integers(0, size), min_size=ranks - 1, max_size=ranks - 1)))
    return [b - a for a, b in zip([0, *edges], [*edges, size], strict=True)]


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """An error in place of a hang of this process."""

    def late(*_: Any) -> None:
        raise AssertionError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _alone(check: Callable[[Any], None]) -> Callable[[Any, Any], None]:
    """The check of a function of this process."""

    def within(_: Any, case: Any) -> None:
        with _within(SECONDS):  # ranks have the limit of their pool, which is built anew after a hang
            check(case)

    return within


DOMAINS = {
    "calls": Domain(214, calls(), _on_ranks(run_call)),
    "reshardings": Domain(200, fuzz_reshard.reshardings(WORLDS), _on_ranks(fuzz_reshard.run_resharding)),
    "sums": Domain(40, fuzz_sums.sums(WORLDS, JUNK), _on_ranks(fuzz_sums.run_sum)),
    "attention": Domain(150, fuzz_attention.attentions(WORLDS, JUNK), _on_ranks(fuzz_attention.run_attention)),
    # The first case of a rank imports transformers.
    "batches": Domain(16, fuzz_batches.batches(), _on_ranks(fuzz_batches.run_batch, 90)),
    # Kernels of the interpreter take 8 ranks on few cores long for 1,030 columns.
    "experts": Domain(80, fuzz_experts.routings(RANKS), _on_ranks(fuzz_experts.run_routing, 90)),
    "recurrences": Domain(60, fuzz_recurrences.recurrences(RANKS), _on_ranks(fuzz_recurrences.run_recurrence)),
    "stages": Domain(150, fuzz_stages.stage_steps(WORLDS, JUNK), _on_ranks(fuzz_stages.run_stages)),
    "hops": Domain(150, fuzz_states.hops(WORLDS), _on_ranks(fuzz_states.run_hop)),
    "layouts": Domain(150, fuzz_states.layouts(WORLDS, JUNK), _on_ranks(fuzz_states.run_layout)),
    "checkpoints": Domain(100, fuzz_states.checkpoints(WORLDS), _on_ranks(fuzz_states.run_checkpoint)),
    "files": Domain(150, fuzz_states.files(WORLDS), _on_ranks(fuzz_states.run_file)),
    "arguments": Domain(50, fuzz_arguments.arguments_of(JUNK), _alone(fuzz_arguments.check_arguments)),
    "segments": Domain(50, fuzz_segments.segments_of(JUNK), _alone(fuzz_segments.check_segments)),
    "headers": Domain(140, fuzz_files.words(), _alone(fuzz_files.check_words)),
    "tables": Domain(100, fuzz_files.tables_of(), _alone(fuzz_files.check_table)),
    "records": Domain(100, fuzz_files.records(), _alone(fuzz_files.check_records)),
    "variables": Domain(100, fuzz_files.variables_of(), _alone(fuzz_files.check_variable)),
}
assert sum(domain.share for domain in DOMAINS.values()) == ROUND


def _peak() -> float:
    """The most memory that this process had at once, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_of_rank(_: Any) -> float:
    return _peak()


def fuzz(pool: Pool, name: str, cases: int, number: int) -> int:
    """Check as many cases of a domain, drawn from a seed; the number of cases that were checked.

    Raises:
        AssertionError: a wrong answer, an error without a name, a hang, a crash or too much memory. The case is as
            small as Hypothesis could make it.
    """
    domain, done, is_known = DOMAINS[name], 0, False
    before = [_peak(), *pool.run(peak_of_rank, world=4)]

    @seed(number)
    @settings(
        max_examples=cases, database=None, deadline=None, print_blob=True, verbosity=Verbosity.normal,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(domain.cases)
    def check(case: Any) -> None:
        nonlocal done, is_known
        try:
            domain.check(pool, case)
        except AssertionError as error:
            if not is_known:
                print(f"{name}, seed {number}: made smaller now, up to {SECONDS} s a try: {case}\n{error}", flush=True)
            is_known = True
            raise
        done += 1

    check()
    after = [_peak(), *pool.run(peak_of_rank, world=4)]
    more = max(b - a for a, b in zip(before, after, strict=True))
    assert more < MEBIBYTES, f"{name}: {more:.0f} MiB more than before"
    return done


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Drawn inputs: a right answer or an error by name.")
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--seed", type=int, help="of the first round; a failing round names its own")
    parser.add_argument(
        "--domains", nargs="+", default=list(DOMAINS), choices=list(DOMAINS), metavar="NAME", help=", ".join(DOMAINS)
    )
    options = parser.parse_args(arguments)
    first = int(time.time()) if options.seed is None else options.seed
    share = sum(DOMAINS[name].share for name in options.domains)
    pool, started, done, failed = Pool(), time.monotonic(), 0, 0
    try:
        for number in range(first, first + max(1, round(options.cases / share))):
            for name in options.domains:
                try:
                    done += fuzz(pool, name, DOMAINS[name].share, number)
                except Exception as error:
                    failed += 1
                    print(f"FAILED: --domains {name} --seed {number} --cases {DOMAINS[name].share}", flush=True)
                    for each in getattr(error, "exceptions", (error,)):
                        print(f"{each}\n" + "\n".join(getattr(each, "__notes__", ())), flush=True)
            print(f"{done} cases, seed {number}, {time.monotonic() - started:.0f} s, {failed} failures", flush=True)
    finally:
        pool.stop()
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
