"""Exchanges between ranks end to end: forward and backward of every mapping, sums over 16-bit wires, hops and Ulysses.

Written by ``tritoncomm bench --ranks N --json exchanges.json``, which needs no clone, in five minutes. Every rank has
an input of so many MiB. Values and gradients of all providers are the same bits, or nothing is timed. All ranks meet
before each sample of one call, every provider takes its turn in every round, and the slowest rank's time counts: of
CUDA events on a GPU, where "captured" replays the same calls as CUDA graphs. "plain" is Megatron-LM's formulation in
plain torch, "DTensor" a redistribution where torch has one, and "bare" the collectives alone on contiguous buffers of
the same bytes. Over Gloo, DTensor's all-to-all is an all-gather. "peak" is the most new memory at once, in inputs;
"matmul" is the time of a matrix product beside the exchange over its time alone.
"""

from tritoncomm.bench.run import BenchError, Settings, run

__all__ = ["BenchError", "Settings", "run"]
