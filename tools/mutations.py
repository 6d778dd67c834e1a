"""Mutations of the product, each of which has to turn a test red: ``python tools/mutations.py [WORDS...]``.

Every mutation is made in a copy of the tree, and the tests that it names run there until the first failure. A mutation
that passes them survives, and the command exits with 1. WORDS select mutations by what they do. Errors of collection
do not count as red: a mutation that does not even import proves nothing.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MUTATIONS", "ROOT", "Mutation", "main"]

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("tritoncomm", "kernels", "tests", "tools", "bench", "docs", "examples")
FILES = ("pyproject.toml", "README.md", "Makefile", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "constraints.txt")
TIMEOUT = 300
RED, SURVIVED = 1, 0  # exit status of pytest


@dataclass(frozen=True)
class Mutation:
    """One wrong line.

    Attributes:
        what: in words.
        file: relative to the root.
        old: occurs in the file exactly once.
        new: takes its place.
        tests: arguments of pytest.
    """

    what: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation(
        "check mode is traced into graphs", "tritoncomm/core/compiled.py",
        "if not (variables.CHECK.value or variables.HASH.value):", "if not variables.HASH.value:",
        "tests/debug/test_check.py",
    ),
    Mutation(
        "even packs are opaque in compiled graphs", "tritoncomm/core/compiled.py",
        '(ops.forced_path() == "auto" and not x.is_cuda)', '(ops.forced_path() == "auto" and x.is_cuda)',
        "tests/core/test_compile.py",
    ),
    Mutation(
        "a compiled maximum is a sum", "tritoncomm/collective.py",
        "call = _reduce_scatter_outside if async_op or op != ReduceOp.SUM else",
        "call = _reduce_scatter_outside if async_op else",
        "tests/core/test_compile.py",
    ),
    Mutation(
        "a compiled all_reduce leaves its input as it was", "tritoncomm/core/compiled.py",
        "        x.detach().copy_(total)\n", "", "tests/core/test_compile.py",
    ),
    Mutation(
        "make_fx records an exchange without its wait", "tritoncomm/core/validation.py",
        "    if _modes():\n        refuse_tracing(name)\n    if type(x) is not Tensor or x.layout",
        "    if type(x) is not Tensor or x.layout", "tests/core/test_compile.py",
    ),
    Mutation(
        "an argument that is not known is taken for known", "tritoncomm/integrations/megatron.py",
        "if len(names) > len(own) or ", "if ",
        "tests/integrations/test_megatron.py",
    ),
    Mutation(
        "names of a reloaded module are not looked for", "tritoncomm/integrations/megatron.py",
        "            before.rebinding.extend(swaps)\n", "",
        "tests/integrations/test_megatron.py",
    ),
    Mutation(
        "unpatching gives names the newest original", "tritoncomm/integrations/rebinding.py",
        "if self._replacements.get(id(original)) is not replacement:", "if True:",
        "tests/integrations/test_megatron.py",
    ),
    Mutation(
        "weights that are gathered further are multiplied as they are", "tritoncomm/integrations/megatron_functions.py",
        "if is_deferred or gtp_remat_size != 1:", "if is_deferred:",
        "tests/integrations/test_megatron.py",
    ),
    Mutation(
        "sizes that do not fit run where the shards do", "tritoncomm/tensor/rules/engine.py",
        "setdefault(label, size) != size and", "setdefault(label, size) < 0 and",
        "tests/tensor/test_sizes_that_do_not_fit.py",
    ),
    Mutation(
        "the gradient of a ColoTensor is plain", "tritoncomm/tensor/rules/gradients.py",
        "        _set(x, wrapped)\n    return wrapped\n", "    return gradient\n", "tests/tensor/test_gradients.py",
    ),
    Mutation(
        "an inf is known to its rank only", "tritoncomm/tensor/rules/gradients.py",
        "in shards_by_group(gradients):", "in shards_by_group([]):", "tests/tensor/test_gradients.py",
    ),
    Mutation(
        "the norm of a shard is taken for the global one", "tritoncomm/tensor/rules/foreach.py",
        "torch.linalg.vector_norm(gathered, ord, 0)", "partial", "tests/tensor/test_gradients.py",
    ),
    Mutation(
        "a hook sees a plain gradient", "tritoncomm/tensor/rules/gradients.py",
        "result = hook(wrapped)", "result = hook(gradient)", "tests/tensor/test_gradients.py",
    ),
    Mutation(
        "a collective of torch runs on a gathered copy", "tritoncomm/tensor/dispatch.py",
        "== distributed_c10d.__name__", '== ""', "tests/tensor/test_gradients.py",
    ),
    Mutation(
        "the gradient keeps the layout that its tensor had", "tritoncomm/tensor/colo_tensor.py",
        "gradient = gradient._redistributed(dist_spec, self.process_group)", "pass", "tests/tensor/test_gradients.py",
    ),
    Mutation(
        "a column-parallel result of one rank has no compute spec", "tritoncomm/tensor/rules/engine.py",
        "one_dim and pg.tp_world_size() == 1 and", "False and", "tests/tensor/test_training.py",
    ),
    Mutation(
        "the group of a second initialize() has the name of the first", "tritoncomm/groups.py",
        "    counter[name] += 1\n", "", "tests/test_groups.py",
    ),
    Mutation(
        "threads of a rank make two CPU groups", "tritoncomm/groups.py",
        "            with self._lock:\n", "            if True:\n", "tests/test_groups.py",
    ),
    Mutation(
        "a header to a far stage makes the CPU group of all", "tritoncomm/p2p/header.py",
        "    near = neighbours.adjacent.intersection(keys)\n", "    near = keys\n", "tests/p2p/test_communicator.py",
    ),
    Mutation(
        "initialize returns while others connect", "tritoncomm/runtime.py",
        "        _wait_until_connected()\n", "", "tests/test_groups.py",
    ),
    Mutation(
        "a group of one rank sends to itself", "tritoncomm/core/call.py",
        "    if world == 1:\n", "    if world == 0:\n", "tests/core/test_call.py",
    ),
    Mutation(
        "a collective sends a tensor that nobody checked", "tritoncomm/core/call.py",
        "        check_input(x, name)\n", "        pass\n", "tests/core/test_call.py",
    ),
    Mutation(
        "an observer does not hear that calls end", "tritoncomm/record.py",
        "        hooks.observer.end(name", "        id(name", "tests/core/test_call.py",
    ),
    Mutation(
        "an asynchronous result is not waited for", "tritoncomm/core/backend.py",
        "None\n        if work is not None:\n            work.wait()\n",
        "None\n        if work is not None:\n            work.is_completed()\n", "tests/test_collective.py",
    ),
    Mutation(
        "an asynchronous result is not unpacked", "tritoncomm/core/backend.py",
        "            finish()\n", "            del finish\n", "tests/test_collective.py",
    ),
    Mutation(
        "a rank keeps another rank's shard", "tritoncomm/core/plan.py",
        "return rank * size, size", "return (world - 1 - rank) * size, size", "tests/mappings/test_mappings.py",
    ),
    Mutation(
        "bytes sent count this rank too", "tritoncomm/core/plan.py",
        "own * (world - 1), math", "own * world, math", "tests/core/test_plan.py tests/test_record.py",
    ),
    Mutation(
        "this rank's split size is not checked", "tritoncomm/core/plan.py",
        " or sizes[rank] != shape[dim]:", ":", "tests/core/test_plan.py tests/test_errors.py",
    ),
    Mutation(
        "a ragged dim loses its last rows", "tritoncomm/core/address_map.py",
        "run = -(-shape[dim] // world) * inner", "run = shape[dim] // world * inner", "tests/core/test_ops.py",
    ),
    Mutation(
        "send and receive counts are exchanged", "tritoncomm/core/eager.py",
        "planned.recv_counts, planned.send_counts", "planned.send_counts, planned.recv_counts",
        "tests/mappings/test_mappings.py",
    ),
    Mutation(
        "a DTensor is sent as a plain tensor", "tritoncomm/core/validation.py",
        "type(x) is not Tensor or x.layout", "x.layout", "tests/test_errors.py",
    ),
    Mutation(
        "sums overwrite by default", "tritoncomm/mappings/overwriting.py",
        "    is_on = False", "    is_on = True", "tests/mappings/test_overwriting.py",
    ),
    Mutation(
        "overwrite_inputs reaches all threads", "tritoncomm/mappings/overwriting.py",
        "class _Switch(threading.local):", "class _Switch:", "tests/mappings/test_overwriting.py",
    ),
    Mutation(
        "overwrite_inputs stays on after its block", "tritoncomm/mappings/overwriting.py",
        "            _switch.is_on = self._former", "            pass", "tests/mappings/test_overwriting.py",
    ),
    Mutation(
        "a sum overwrites a leaf", "tritoncomm/mappings/overwriting.py",
        "x.is_leaf or not torch", "not torch", "tests/mappings/test_overwriting.py",
    ),
    Mutation(
        "a sum overwrites a view", "tritoncomm/mappings/overwriting.py",
        "        and not x._is_view()\n", "", "tests/mappings/test_overwriting.py",
    ),
    Mutation(
        "a sum overwrites memory of numpy", "tritoncomm/mappings/overwriting.py",
        "return storage.resizable() and", "return", "tests/mappings/test_overwriting.py",
    ),
    Mutation(
        "a sum overwrites memory of another process", "tritoncomm/mappings/overwriting.py",
        " and not (x.is_cpu and storage.is_shared())", "", "tests/mappings/test_overwriting.py",
    ),
    Mutation(
        "a gradient inside of another is overwritten", "tritoncomm/mappings/overwriting.py",
        " and grad.untyped_storage().nbytes() == grad.nbytes", "", "tests/mappings/test_overwriting.py",
    ),
    Mutation(
        "autograd does not notice an overwritten gradient", "tritoncomm/mappings/functions.py",
        "        torch.autograd.graph.increment_version(grad)\n", "", "tests/mappings/test_overwriting.py",
    ),
    Mutation(
        "a group of one rank marks inputs as overwritten", "tritoncomm/mappings/tensor_parallel.py",
        " and world_of(group, name) > 1", "", "tests/mappings/test_overwriting.py",
    ),
    Mutation(
        "the gradient of any replicated operand is overwritten", "tritoncomm/tensor/rules/engine.py",
        "copy_to(local, group, each.is_factor)", "copy_to(local, group, True)", "tests/tensor/test_passes.py",
    ),
    Mutation(
        "the gradient of a replicated factor is copied", "tritoncomm/tensor/rules/matmul.py",
        "is_factor=True", "is_factor=False", "tests/tensor/test_passes.py",
    ),
    Mutation(
        "the adjoint of an all-gather forgets to sum", "tritoncomm/mappings/functions.py",
        "-1, eager.all_gather, eager.reduce_scatter,\n", "-1, eager.all_gather, eager.split,\n",
        "tests/mappings/test_mappings.py",
    ),
    Mutation(
        "a second derivative takes a sum for a replica", "tritoncomm/mappings/functions.py",
        "args = (True, ctx.input_split_sizes", "args = (False, ctx.input_split_sizes", "tests/mappings",
    ),
    Mutation(
        "backward of all_to_all does not swap the split sizes", "tritoncomm/mappings/exchanges.py",
        "sizes = (ctx.input_split_sizes, ctx.output_split_sizes)",
        "sizes = (ctx.output_split_sizes, ctx.input_split_sizes)", "tests/mappings/test_mappings.py",
    ),
    Mutation(
        "a kernel reads past the end of a row", "kernels/tritoncomm_kernels/address.py",
        "(o < outer) & (c < row), (o < outer) & (c < cols)", "(o < outer) & (c < cols), (o < outer) & (c < cols)",
        "tests/kernels/test_kernels.py",
    ),
    Mutation(
        "ranks of a node hand out rows in the order of nodes", "tritoncomm/core/node_exchange.py",
        "for block in blocks[j::width]]", "for block in blocks[j * len(rows) : (j + 1) * len(rows)]]",
        "tests/core/test_node_exchange.py",
    ),
    Mutation(
        "ranks take two levels for large messages too", "tritoncomm/core/node_exchange.py",
        "message_bytes is None or message_bytes > AUTO_BYTES", "message_bytes is None",
        "tests/core/test_node_exchange.py",
    ),
    Mutation(
        "check mode does not compare the levels of an exchange", "tritoncomm/debug/descriptor.py",
        'fields["exchange"] = "flat" if given["node_size"] is None else', 'fields["exchange"] = "flat" if True else',
        "tests/core/test_node_exchange.py",
    ),
    Mutation(
        "a kernel forgets the stride between ranks", "kernels/tritoncomm_kernels/address.py",
        "(w.to(tl.int64) * stride_rank + (c - w * run))", "(w.to(tl.int64) * run * outer + (c - w * run))",
        "tests/kernels/test_kernels.py",
    ),
    Mutation(
        "exponentials keep the maximum of their tile", "kernels/tritoncomm_kernels/cross_entropy.py",
        "sum_exp * _exp(col_max - new_max, HAS_EX2) + terms", "sum_exp + terms",
        "tests/kernels/test_cross_entropy.py",
    ),
    Mutation(
        "a row of small logits has no maximum", "kernels/tritoncomm_kernels/cross_entropy.py",
        "LOWEST=_LOWEST[out.dtype]", "LOWEST=-1e30", "tests/kernels/test_cross_entropy.py",
    ),
    Mutation(
        "a missing Triton is found out in the middle of an import", "kernels/tritoncomm_kernels/__init__.py",
        "    installed_triton.require()\n", "", "tests/test_imports.py",
    ),
    Mutation(
        "a launcher is believed by its name", "kernels/tritoncomm_kernels/launch.py",
        "_CALLS_C.get(_source_hash(type(run).__call__))", 'True if type(run).__name__ == "CudaLauncher" else None',
        "tests/kernels/test_launch.py",
    ),
    Mutation(
        "narrow units evict what they read", "kernels/tritoncomm_kernels/copy.py",
        "tile.evict_first and unit in EVICT_UNITS", "tile.evict_first", "tests/tune/test_tune.py",
    ),
    Mutation(
        "tiles forget the width of warps", "kernels/tritoncomm_kernels/launch.py",
        ", lanes=lanes_of(device))", ")", "tests/kernels/test_launch.py",
    ),
    Mutation(
        "a long sum skips parts", "kernels/tritoncomm_kernels/reduction.py",
        "part_ptr += REST * step", "part_ptr += step", "tests/kernels/test_kernels.py",
    ),
    Mutation(
        "a shape that no tensor has is believed", "tritoncomm/p2p/header.py",
        "        if not _is_possible(shape):\n            raise Mis", "        if False:\n            raise Mis",
        "tests/p2p/test_communicator.py",
    ),
    Mutation(
        "a received tensor requires no gradient", "tritoncomm/p2p/message.py",
        "    if dtype.is_floating_point:\n        x.requires_grad_()\n", "", "tests/p2p/test_communicator.py",
    ),
    Mutation(
        "gradients are posted in the order of activations", "tritoncomm/p2p/neighbours.py",
        "-source if is_gradient else source, target", "source, target", "tests/p2p/test_order.py",
    ),
    Mutation(
        "a neighbour is skipped", "tritoncomm/p2p/neighbours.py",
        "ranks[self.stage - 1] if prev", "ranks[self.stage - 2] if prev", "tests/p2p/test_stages.py",
    ),
    Mutation(
        "a received tensor is not waited for", "tritoncomm/p2p/transport.py",
        "                work.wait()\n", "                work.is_completed()\n", "tests/p2p/test_communicator.py",
    ),
    Mutation(
        "several tensors are not counted as copied", "tritoncomm/p2p/hop.py",
        "copied + message_copied", "copied", "tests/p2p",
    ),
    Mutation(
        "ids of the padding row of a vocabulary shard are not shifted", "tritoncomm/parallel.py",
        "self.padding_idx - start", "self.padding_idx", "tests/test_parallel.py",
    ),
    Mutation(
        "a forced kernel falls back without a word", "tritoncomm/core/ops.py",
        'if _forced.value == "triton":\n        raise UnsupportedError(\n',
        "if False:\n        raise UnsupportedError(\n",
        "tests/cli/test_explain.py tests/core/test_ops.py",
    ),
    Mutation(
        "second gradients of a styled layer are lost", "tritoncomm/parallel.py",
        "    if grad.requires_grad:\n", "    if not grad.numel():\n", "tests/test_parallel.py",
    ),
    Mutation(
        "segments at any distance are one copy", "kernels/tritoncomm_kernels/segments.py",
        " or (end > first + 1 and apart != gaps)", "", "tests/kernels/test_reference.py",
    ),
    Mutation(
        "tensors in another order are concatenated", "tritoncomm/core/fused.py",
        "return plan.is_view and x.dtype", "return x.dtype", "tests/test_collective.py",
    ),
    Mutation(
        "a sum in blocks has the first block only", "kernels/tritoncomm_kernels/reference.py",
        "wire[:, start : start + block]", "wire[:, :block]", "tests/kernels/test_reference.py",
    ),
    Mutation(
        "a blocking collective is not waited for", "tritoncomm/core/backend.py",
        'work.wait()\n    except RuntimeError as error:\n        raise_for(error, _failure(error, what',
        'work.is_completed()\n    except RuntimeError as error:\n        raise_for(error, _failure(error, what',
        "tests/mappings/test_mappings.py tests/debug/test_faults.py",
    ),
    Mutation(
        "an incarnation that failed stays open until its ranks leave", "tritoncomm/debug/comparison.py",
        '        store.replace(f"{name}/open", incarnation, "")\n', "        pass\n",
        "tests/debug/test_check.py",
    ),
    Mutation(
        "each axis of one rank has a group of its own", "tritoncomm/runtime.py",
        "    if backend not in made:\n", "    if True:\n", "tests/test_groups.py",
    ),
    Mutation(
        "a pipeline over nccl2 has one stream", "tritoncomm/runtime.py",
        "{'nccl-lazy' if is_nccl(name) else name}", "{name}", "tests/test_groups.py",
    ),
    Mutation(
        "a group that was reconfigured has its size of before", "tritoncomm/core/validation.py",
        "return group.size() if _changes_in_place else len", "return len", "tests/core/test_reconfigured.py",
    ),
    Mutation(
        "values of a reconfigured group are kept", "tritoncomm/core/validation.py",
        "if found is None or found[0] != state_of(group):", "if found is None:", "tests/core/test_reconfigured.py",
    ),
    Mutation(
        "a dropped work leaves its memory at once", "tritoncomm/core/backend.py",
        "            _let_go([self._work], self._group(), self._buffers)", "            pass",
        "tests/core/test_in_flight.py",
    ),
    Mutation(
        "a batch that cannot be completed stays open", "tritoncomm/core/backend.py",
        "            _let_go([group._end_coalescing(device)], group, tensors)", "            pass",
        "tests/core/test_in_flight.py",
    ),
    Mutation(
        "memory of a transfer goes back to the stream that made it", "tritoncomm/p2p/transport.py",
        "        released(self._buffers)\n", "", "tests/core/test_in_flight.py",
    ),
    Mutation(
        "sends of a device are kept after they have completed", "tritoncomm/p2p/transport.py",
        "        while queue and queue[0].is_completed():", "        while False:", "tests/core/test_in_flight.py",
    ),
    Mutation(
        "an error of the device is a failed peer", "tritoncomm/core/backend.py",
        "    if is_device_error(error):\n        return False\n", "", "tests/core/test_backend_errors.py",
    ),
    Mutation(
        "an error of the program is a failed transfer", "tritoncomm/p2p/transport.py",
        "    if not is_backend_error(error):", "    if False:", "tests/core/test_backend_errors.py",
    ),
    Mutation(
        "a segment of rows is read as contiguous", "kernels/tritoncomm_kernels/segment_kernel.py",
        "offset += r * gap", "offset += 0 * gap", "tests/kernels/test_segments.py",
    ),
    Mutation(
        "a part of a sum is left out", "kernels/tritoncomm_kernels/segment_kernel.py",
        "for _ in range(parts):", "for _ in range(parts - 1):", "tests/kernels/test_segments.py",
    ),
    Mutation(
        "an index that is no row is followed", "kernels/tritoncomm_kernels/row_copy.py",
        "is_row = (at >= 0) & (at < limit)", "is_row = (at >= 0) & (at <= limit)", "tests/kernels/test_rows.py",
    ),
    Mutation(
        "check mode agrees to everything", "tritoncomm/debug/check.py",
        "if differ := difference(descriptors):", "if differ := difference(descriptors[:1]):",
        "tests/debug/test_check.py",
    ),
    Mutation(
        "ranks carry out different reshard plans", "tritoncomm/reshard/consistency.py",
        "if all(row == [0, *halves] for row in _gathered(", "if any(row for row in _gathered(",
        "tests/reshard/test_reshard.py",
    ),
    Mutation(
        "a sharded tensor of too many shards is accepted", "tritoncomm/tensor/redistribute.py",
        "if parts and count != world:", "if False:", "tests/tensor/test_tensor.py tests/tensor/test_fixes.py",
    ),
    Mutation(
        "a block is read at its place in the full tensor", "tritoncomm/reshard/planner.py",
        "block[0, first:] = low + (own.at - own.start).T", "block[0, first:] = low + own.at.T",
        "tests/reshard/test_passes.py",
    ),
    Mutation(
        "a block is written at the place of its box", "tritoncomm/reshard/planner.py",
        "block[1, first:] = low + (theirs.at - theirs.start).T",
        "block[1, first:] = (theirs.at - theirs.start).T + 0 * low",
        "tests/reshard/test_passes.py",
    ),
    Mutation(
        "a source that leaves elements out is accepted", "tritoncomm/reshard/layout.py",
        "missing = self.elements - int(self.size.prod(1).sum())", "missing = 0 * self.elements",
        "tests/reshard/test_reshard.py",
    ),
    Mutation(
        "boxes that overlap in part are accepted", "tritoncomm/reshard/layout.py",
        "        if len(overlaps):\n", "        if False:\n", "tests/reshard",
    ),
    Mutation(
        "sender and receiver of a block are exchanged", "tritoncomm/reshard/routes.py",
        "return np.stack([self.places[0][source], self.places[1][target]])",
        "return np.stack([self.places[1][target], self.places[0][source]])",
        "tests/reshard/test_reshard.py",
    ),
    Mutation(
        "a rank that has a block asks a replica for it", "tritoncomm/reshard/routes.py",
        "        own[found] = box[nearest[found]]\n", "", "tests/reshard/test_reshard.py",
    ),
    Mutation(
        "one replica sends everything", "tritoncomm/reshard/routes.py",
        "slots = np.clip(-(-length // most), 1, source.holders.counts)", "slots = np.ones_like(length)",
        "tests/reshard/test_reshard.py",
    ),
    Mutation(
        "a striped sequence is read at steps of its period", "tritoncomm/reshard/layout.py",
        "[stride * (period // step), stride]", "[stride * period, stride]", "tests/reshard/test_sequence_layout.py",
    ),
    Mutation(
        "the beginning of a row is part of a range that ends before it starts", "tritoncomm/reshard/boxes.py",
        "(bottom * period >= low).astype(np.int64)", "np.ones_like(low)", "tests/reshard/test_sequence_layout.py",
    ),
    Mutation(
        "of many boxes those that meet late are not looked at", "tritoncomm/reshard/intersections.py",
        'last = np.searchsorted(lows, low + extent, "left")',
        'last = np.searchsorted(lows, low, "left")', "tests/reshard/test_sequence_layout.py",
    ),
    Mutation(
        "the chunks of a zigzag sequence are in the order of rings", "tritoncomm/reshard/boxes.py",
        "(2 * world - 1 - rank) * chunk", "(world + rank) * chunk", "tests/reshard/test_sequence_layout.py",
    ),
    Mutation(
        "a part of a split block overlaps the next", "tritoncomm/reshard/intersections.py",
        "first, end = first_of_part(volume, parts, part), first_of_part(volume, parts, part + 1)",
        "first, end = first_of_part(volume, parts, part), first_of_part(volume, parts, part + 1) + (part + 1 < parts)",
        "tests/reshard/test_reshard.py",
    ),
    Mutation(
        "a plan is known by its source alone", "tritoncomm/reshard/plan.py",
        "            + item.target.digest\n", "", "tests/reshard",
    ),
    Mutation(
        "a plan is looked up without its targets", "tritoncomm/reshard/request.py",
        "return self.bucket_bytes, self.grad, self.name, self.moving",
        "return self.bucket_bytes, self.grad, self.name, tuple([(item.name, item.source) for item in self.moving])",
        "tests/reshard",
    ),
    Mutation(
        "a group without all ranks of a layout is accepted", "tritoncomm/reshard/plan.py",
        "            if missing:\n", "            if missing and False:\n", "tests/reshard/test_reshard.py",
    ),
    Mutation(
        "blocks that stay are read after they were overwritten", "tritoncomm/reshard/execute.py",
        "if self._in_place else blocks, places", "if False else blocks, places", "tests/reshard",
    ),
    Mutation(
        "a kernel copies blocks that stay over each other", "tritoncomm/reshard/execute.py",
        "copies = None if in_place else tables.copies_of(", "copies = tables.copies_of(",
        "tests/reshard/test_reshard.py",
    ),
    Mutation(
        "targets are taken for as aligned as tensors", "kernels/tritoncomm_kernels/segment_copy.py",
        "ends = aligned[::2], aligned[1::2],", "ends = aligned[::2], aligned[::2],",
        "--device=sm90 tests/kernels/test_copies.py",
    ),
    Mutation(
        "copies go to the tensors instead of the targets", "kernels/tritoncomm_kernels/segment_kernel.py",
        "                    paired = tl.where(tensor + 1 == t,", "                    paired = tl.where(tensor == t,",
        "tests/kernels/test_copies.py",
    ),
    Mutation(
        "a forward leaves no line for its backward", "tritoncomm/debug/sites.py",
        "    node._tritoncomm_site = call_site()", "    pass", "tests/debug/test_flight.py",
    ),
    Mutation(
        "a backward that a program's own frame calls is recorded there", "tritoncomm/debug/flight.py",
        "_frame(depth if _current_node() is None else depth - 1)", "_frame(depth)", "tests/debug/test_flight.py",
    ),
    Mutation(
        "an exchange that fails does not say how to find the cause", "tritoncomm/core/backend.py",
        "failed{rank}: {error}{advice()}", "failed{rank}: {error}", "tests/reshard/test_disagreements.py",
    ),
    Mutation(
        "a rank that refuses arguments of a cached plan reports it to nobody", "tritoncomm/reshard/request.py",
        '            _report(name, group, request.tensors, f"refused: {error}", error)\n', "",
        "tests/reshard/test_disagreements.py",
    ),
    Mutation(
        "a repeated call does not keep its plan among the last", "tritoncomm/reshard/request.py",
        "        plans.move_to_end(request.key)\n", "", "tests/reshard/test_second_calls.py",
    ),
    Mutation(
        "a DTensor of another layout is taken", "tritoncomm/reshard/request.py",
        "    if own != layout:", "    if False:", "tests/reshard/test_second_calls.py",
    ),
    Mutation(
        "a plan keeps its group", "tritoncomm/reshard/api.py",
        "        self._rank = request.participants.rank",
        "        self._rank, self._request = request.participants.rank, request",
        "tests/reshard/test_second_calls.py",
    ),
    Mutation(
        "threads compare over clients of their own", "tritoncomm/debug/store.py",
        "    with _lock:", "    if True:", "tests/debug/test_check.py",
    ),
    Mutation(
        "a p2p step that fails leaves no error", "tritoncomm/p2p/hop.py",
        "            record.failed(name, error)", "            pass", "tests/debug/test_flight.py",
    ),
    Mutation(
        "a rank forgets which it was", "tritoncomm/debug/flight.py",
        "        self.place = _place(self.place)\n", "", "tests/debug/test_flight.py",
    ),
    Mutation(
        "the record installs handlers without being asked to", "tritoncomm/debug/__init__.py",
        "bool(calls) and variables.FLIGHT_SIGNALS.value", "bool(calls)", "tests/debug/test_signals.py",
    ),
    Mutation(
        "a forked worker keeps its rank's handlers", "tritoncomm/debug/signals.py",
        "        _remove_handlers()\n        _pipe = None\n", "        _pipe = None\n", "tests/debug/test_signals.py",
    ),
    Mutation(
        "a handler that is chained ends the process", "tritoncomm/debug/signals.py",
        "    if number == signal.SIGTERM and _is_ours(number):", "    if number == signal.SIGTERM:",
        "tests/debug/test_signals.py",
    ),
    Mutation(
        "nothing is written periodically", "tritoncomm/debug/signals.py",
        "        write_if_changed()\n", "        pass\n", "tests/debug/test_signals.py",
    ),
    Mutation(
        "the path of a record is not printed", "tritoncomm/debug/flight.py",
        '    report(f"the flight record ({reason}) is in {file.absolute()}")', "    pass",
        "tests/debug/test_signals.py",
    ),
    Mutation(
        "a hang on the device is not reported", "tritoncomm/debug/signals.py",
        "last_collective < oldest.created <= limit", "last_collective < oldest.created < 0",
        "tests/debug/test_torch_recorder.py",
    ),
    Mutation(
        "a query of the recorder ends captures of CUDA graphs", "tritoncomm/debug/torch_recorder.py",
        "                _allow_queries()\n", "", "tests/debug/test_torch_recorder.py",
    ),
    Mutation(
        "a named pipe is read as a record", "tritoncomm/debug/trace.py",
        "    if not stat.S_ISREG(mode):", "    if stat.S_ISDIR(mode):", "tests/debug/test_trace.py",
    ),
    Mutation(
        "a group that is made again reads the verdicts of before", "tritoncomm/debug/check.py",
        'self.incarnation: str | None = "" if is_unique else None', 'self.incarnation: str | None = ""',
        "tests/debug/test_check.py",
    ),
    Mutation(
        "a first comparison leaves its incarnation open", "tritoncomm/debug/check.py",
        '        member.store.replace(key, joined, "")', "        pass", "tests/debug/test_check.py",
    ),
    Mutation(
        "a channel that was closed stays closed", "tritoncomm/debug/store.py",
        '            while reference is not None and self.has(', "            while False and self.has(",
        "tests/debug/test_p2p_check.py tests/debug/test_check.py",
    ),
    Mutation(
        "a send without elements is not compared", "tritoncomm/p2p/hop.py",
        "            self.empty = [key for key in sends if key not in wires]\n", "",
        "tests/debug/test_check.py",
    ),
    Mutation(
        "a rank that is terminated writes nothing", "tritoncomm/debug/signals.py",
        '            write_on("signal SIGTERM")', "            pass", "tests/debug/test_signals.py",
    ),
    Mutation(
        "messages between other ranks begin at the first byte", "tritoncomm/reshard/plan.py",
        "starts = np.cumsum(self.lengths) - self.lengths", "starts = 0 * self.lengths", "tests/reshard",
    ),
    Mutation(
        "an exchange is not waited for while blocks are copied", "tritoncomm/reshard/execute.py",
        "            work.wait()\n", "            del work\n", "tests/reshard",
    ),
    Mutation(
        "gradients of replicas are sent by one of them", "tritoncomm/reshard/execute.py",
        'sums = self.grad == "partial" and not self.transfers.sums', "sums = False",
        "tests/reshard/test_sequence_layout.py",
    ),
    Mutation(
        "gaps between rows of the wire are dropped", "tritoncomm/core/segments.py",
        "0 if gap == row else gap)", "0)", "tests/core/test_segments.py",
    ),
    Mutation(
        "an index of an outer dim walks by another stride", "tritoncomm/core/segments.py",
        "at = first + sum(i * by for i, (_, by, _) in zip(index, dims, strict=True))",
        "at = first + sum(i * by for i, (_, _, by) in zip(index, dims, strict=True))", "tests/core/test_segments.py",
    ),
    Mutation(
        "a block outside of its tensor is accepted", "tritoncomm/core/segments.py",
        " or at + count > size for", " for", "tests/core/test_segments.py",
    ),
    Mutation(
        "sums of several buckets overwrite", "tritoncomm/reshard/execute.py",
        "return segments.scatter(wire, chosen, self.table, accumulate=self.accumulate, sums=self.sums)[0]",
        "return segments.scatter(wire, chosen, self.table, sums=self.sums)[0]", "tests/reshard",
    ),
    Mutation(
        "a table's rows walk by their length", "kernels/tritoncomm_kernels/segment_tiles.py",
        "np.where(records.has_rows, r * records.stride + skip, first)",
        "np.where(records.has_rows, r * records.row + skip, first)", "tests/kernels/test_segments.py",
    ),
    Mutation(
        "the row of a unit is rounded down too far", "kernels/tritoncomm_kernels/segment_tiles.py",
        "((1 << 31) + row - 1) // row, 0)", "(1 << 31) // row, 0)", "tests/kernels/test_segments.py",
    ),
    Mutation(
        "a segment beyond its tensor is accepted", "kernels/tritoncomm_kernels/segments.py",
        "_end(segment) > limits[segment.tensor]", "segment.offset > limits[segment.tensor]",
        "tests/kernels/test_segments.py",
    ),
    Mutation(
        "segments that overlap are written", "kernels/tritoncomm_kernels/segments.py",
        "        if _overlap(mine) is not None:\n", "        if _overlap(mine) is not None and not mine:\n",
        "tests/kernels/test_segments.py",
    ),
    Mutation(
        "rows of other periods are taken for side by side", "kernels/tritoncomm_kernels/segments.py",
        "    if all(one[3] == period for one in tangle) and all(", "    if all(", "tests/kernels/test_segments.py",
    ),
    Mutation(
        "a slab goes although a graph copies from it", "kernels/tritoncomm_kernels/device_table.py",
        "            slab.in_graph = True\n            return", "            return",
        "tests/kernels/test_device_table.py",
    ),
    Mutation(
        "a slab goes although a graph reads an older table of it", "kernels/tritoncomm_kernels/device_table.py",
        "            self._slab.in_graph = True\n", "            pass\n", "tests/kernels/test_device_table.py",
    ),
    Mutation(
        "slabs never go", "kernels/tritoncomm_kernels/device_table.py",
        "if slab.in_graph or slab.tables]", "if slab]", "tests/kernels/test_device_table.py",
    ),
    Mutation(
        "eager calls take what captures need", "kernels/tritoncomm_kernels/device_table.py",
        "slabs[-1].room - _RESERVE:", "slabs[-1].room:", "tests/kernels/test_device_table.py",
    ),
    Mutation(
        "a table of a graph is taken for one that is there", "kernels/tritoncomm_kernels/device_table.py",
        "            if captures:\n                return _in_graph(self.content, self._device)\n", "",
        "tests/kernels/test_device_table.py",
    ),
    Mutation(
        "a launch is kept for other alignments", "kernels/tritoncomm_kernels/segment_copy.py",
        "key = wire.data_ptr() & 15, aligned if any(aligned) else None", "key = wire.data_ptr() & 15, None",
        "tests/kernels/test_segment_call.py",
    ),
    Mutation(
        "results overwrite pass-through tensors before they are copied", "tritoncomm/reshard/api.py",
        "if pairs and share_memory(out, tensors):", "if False:", "tests/reshard/test_odd_uses.py",
    ),
    Mutation(
        "check mode does not compare dtypes", "tritoncomm/debug/descriptor.py",
        "    if dtype is not None:\n", "    if dtype is not None and not name:\n", "tests/debug/test_check.py",
    ),
    Mutation(
        "check mode does not compare the layout of heads", "tritoncomm/debug/descriptor.py",
        '        fields["layout"] = as_json(given["layout"])\n', "", "tests/debug/test_check.py tests/test_ulysses.py",
    ),
    Mutation(
        "check mode does not compare the plan of a resharding", "tritoncomm/debug/descriptor.py",
        '"collective": kind, "plan": given["plan"]}', '"collective": kind}', "tests/reshard/test_disagreements.py",
    ),
    Mutation(
        "rows that are sent are not compared with those expected", "tritoncomm/debug/descriptor.py",
        "if not differ and first.sends and not _rows_match(descriptors):",
        "if not differ and first.sends and not descriptors:", "tests/debug/test_check.py",
    ),
    Mutation(
        "the digest has no rows", "tritoncomm/debug/check.py",
        "        rows -= sum(hash((place, other, rank, size))", "        rows -= sum(hash((place, rank, other, size))",
        "tests/debug/test_check.py",
    ),
    Mutation(
        "a circle is believed whose ranks have come", "tritoncomm/debug/comparison.py",
        "    if any(awaited not in _missing(store, each) for each, awaited in following):\n", "    if False:\n",
        "tests/debug/test_comparison.py",
    ),
    Mutation(
        "a read that ended early holds its thread", "tritoncomm/debug/store.py",
        '                self._store.compare_set(name, "", abandoned or _PASSED_OVER)\n', "                pass\n",
        "tests/debug/test_comparison.py",
    ),
    Mutation(
        "check mode leaves its keys in the store", "tritoncomm/debug/comparison.py",
        "                self.store.delete(own)\n", "                pass\n", "tests/debug/test_comparison.py",
    ),
    Mutation(
        "a rank whose parent is in another call does not search for a circle", "tritoncomm/debug/comparison.py",
        "any(key or self._is_elsewhere(rank) for", "any(key for", "tests/debug/test_comparison.py",
    ),
    Mutation(
        "a circle of waiting ranks is not seen", "tritoncomm/debug/comparison.py",
        "    if circle is None:\n", "    if circle is None or circle:\n",
        "tests/debug/test_comparison.py tests/debug/test_check.py",
    ),
    Mutation(
        "check mode does not compare what a p2p step sends", "tritoncomm/debug/p2p_check.py",
        "if their_key == PAIRS[transfer.key] and fits:", "if their_key == PAIRS[transfer.key]:",
        "tests/debug/test_check.py tests/p2p/test_faults.py",
    ),
    Mutation(
        "a step that was given up leaves its channel open", "tritoncomm/debug/p2p_check.py",
        '            self._store.set_once(transfer.verdict, _with_remedy(f"{text} its {transfer.words}: {why}"))\n', "",
        "tests/debug/test_p2p_check.py tests/debug/test_check.py",
    ),
    Mutation(
        "replicas with exchanged elements are equal", "tritoncomm/debug/replicas.py",
        ".to(torch.int64) + weights[: len(part)]", ".to(torch.int64) + weights[0]",
        "tests/debug/test_replicas.py tests/tensor/test_training.py",
    ),
    Mutation(
        "names and shapes of replicas are not compared", "tritoncomm/debug/replicas.py",
        "if others or max(counts) > common:", "if max(counts) > common:", "tests/debug/test_replicas.py",
    ),
    Mutation(
        "a step in flight is not waited for", "tritoncomm/p2p/hop.py",
        "(*self.posted.values(), *self.headers):\n                posted.wait()",
        "self.headers:\n                posted.wait()", "tests/p2p",
    ),
    Mutation(
        "headers in flight are not waited for", "tritoncomm/p2p/hop.py",
        "(*self.posted.values(), *self.headers):\n                posted.wait()",
        "self.posted.values():\n                posted.wait()", "tests/p2p",
    ),
    Mutation(
        "a handle does not wait", "tritoncomm/p2p/hop.py",
        "            self._hop.posted[self._key].wait()\n", "            self._hop.posted[self._key].is_completed()\n",
        "tests/p2p",
    ),
    Mutation(
        "a handle hides what is wrong with its message", "tritoncomm/p2p/hop.py",
        "        if self._key in self._hop.problems:\n", "        if self._key in self._hop.received:\n",
        "tests/p2p tests/debug/test_check.py",
    ),
    Mutation(
        "a sender does not compare", "tritoncomm/p2p/hop.py",
        'if each.startswith("send")), *self.empty]:', 'if each.startswith("recv") and False)]:',
        "tests/p2p/test_faults.py tests/debug/test_check.py",
    ),
    Mutation(
        "a failed step is not given up", "tritoncomm/p2p/hop.py",
        '                    self.checked.give_up(f"{type(error).__name__}: {error}")\n', "                    pass\n",
        "tests/debug/test_check.py",
    ),
    Mutation(
        "transformers: a batch that is not sharded passes", "tritoncomm/integrations/transformers.py",
        "        if over is None:\n", "        if over == 0:\n", "tests/integrations/test_transformers.py",
    ),
    Mutation(
        "transformers: shards for another group pass", "tritoncomm/integrations/transformers.py",
        "        if over != self.group.group_name:\n", "        if not over:\n",
        "tests/integrations/test_transformers.py",
    ),
    Mutation(
        "transformers: batches are not compared in check mode", "tritoncomm/integrations/transformers.py",
        "if variables.CHECK.value or variables.HASH.value or _compared", "if _compared",
        "tests/integrations/test_transformers.py",
    ),
    Mutation(
        "transformers: a switch writes into a shared config", "tritoncomm/integrations/transformers.py",
        "setattr(module, attribute, deepcopy(value, copies))", "copies[id(value)] = value",
        "tests/integrations/test_transformers.py",
    ),
    Mutation(
        "Trainer: every rank draws samples of its own", "tritoncomm/integrations/trainer.py",
        "num_processes=len(self._leaders),", "num_processes=accelerator.num_processes,",
        "tests/integrations/test_trainer.py",
    ),
    Mutation(
        "Trainer: labels of a group count once per rank", "tritoncomm/integrations/trainer.py",
        "        return self.sequence_group.size()\n", "        return 1\n", "tests/integrations/test_trainer.py",
    ),
    Mutation(
        "backward of attention goes the same way again", "tritoncomm/ulysses.py",
        "ctx.names = (backward_call, forward_call), layout", "ctx.names = (forward_call, backward_call), layout",
        "tests/test_ulysses.py",
    ),
    Mutation(
        "this rank's positions are not checked", "tritoncomm/ulysses.py",
        "    if sizes[rank] != query[seq_dim]:\n", "    if sizes[rank] < 0:\n", "tests/test_ulysses.py",
    ),
    Mutation(
        "a query head meets another kv head", "tritoncomm/core/heads.py",
        "starts = tuple([head for head, count in enumerate(ranks) for _ in range(count)])",
        "starts = tuple([kv_heads - 1 - head for head, count in enumerate(ranks) for _ in range(count)])",
        "tests/test_ulysses.py",
    ),
    Mutation(
        "ranks of equal heads are read at one place", "tritoncomm/core/heads.py",
        "copy.start + w * copy.stride[0], size,", "copy.start, size,", "tests/test_ulysses.py",
    ),
    Mutation(
        "counts of an exchange of heads are exchanged", "tritoncomm/core/heads.py",
        "received, wire.view(-1), plan.recv_counts, plan.send_counts",
        "received, wire.view(-1), plan.send_counts, plan.recv_counts", "tests/test_ulysses.py",
    ),
    Mutation(
        "a shared head takes one gradient of many", "tritoncomm/core/heads.py",
        "    for block in blocks[1:]:\n        total += block\n",
        "    for block in blocks[1:]:\n        total += 0 * block\n", "tests/test_ulysses.py",
    ),
    Mutation(
        "a flight record forgets the arguments", "tritoncomm/debug/flight.py",
        "{name: as_json(value) for name, value in zip(names, arguments, strict=False)}", "{}",
        "tests/debug/test_flight.py",
    ),
    Mutation(
        "digests are not compared", "tritoncomm/debug/comparison.py",
        "fits = digest[:8] != _UNEQUAL and", "fits =", "tests/debug/test_comparison.py",
    ),
    Mutation(
        "a view of a sharded dim is taken for a replica", "tritoncomm/tensor/gathered_view.py",
        "_is_gathered: ClassVar[bool] = True", "_is_gathered: ClassVar[bool] = False", "tests/tensor/test_views.py",
    ),
    Mutation(
        "shards are compared as if they were replicas", "tritoncomm/tensor/process_group.py",
        "if self._tp > 1 and not is_sharded:", "if self._tp > 1:", "tests/tensor/test_training.py",
    ),
    Mutation(
        "watched replicas are compared when others are updated", "tritoncomm/debug/replicas.py",
        "if id(x) in updated}", "if x is not None}", "tests/debug/test_replicas.py",
    ),
    Mutation(
        "the first parameter is named instead of the first that differs", "tritoncomm/debug/replicas.py",
        "place = others[0] if others else common", "place = 0", "tests/debug/test_replicas.py",
    ),
    Mutation(
        "a trace keeps the calls of all records", "tritoncomm/debug/trace.py",
        "_LOADED = 16", "_LOADED = 4096", "tests/debug/test_trace.py",
    ),
    Mutation(
        "messages are counted in records that lack the first ones", "tritoncomm/debug/trace.py",
        "if group in each.peers and each.oldest(group) == 1}", "if group in each.peers}",
        "tests/debug/test_trace.py",
    ),
    Mutation(
        "a step that was refused counts as a message", "tritoncomm/debug/trace.py",
        ' or call["error"].startswith(REFUSED)', "", "tests/debug/test_trace.py",
    ),
    Mutation(
        "a wait is not under way", "tritoncomm/debug/flight.py",
        "        call[_END], last[1], last[2] = 0, call, _time()\n", "", "tests/debug/test_flight.py",
    ),
    Mutation(
        "a p2p step is at the line of its caller's caller", "tritoncomm/p2p/hop.py",
        "neighbours, transfers), 3)", "neighbours, transfers), 5)", "tests/debug/test_flight.py",
    ),
    Mutation(
        "a rank that ended is not named to its neighbour", "tritoncomm/debug/p2p_check.py",
        "if not text and (ended := self._store.ended(", "if text and (ended := self._store.ended(",
        "tests/debug/test_faults.py",
    ),
    Mutation(
        "strided tensors share nothing", "tritoncomm/core/memory.py",
        "        return np.shares_memory(", "        return False and np.shares_memory(", "tests/core/test_memory.py",
    ),
    Mutation(
        "a text that is no mode of checks is taken", "tritoncomm/variables.py",
        "if problem := check_problem(text):\n        raise", "if not (problem := check_problem(text)):\n        raise",
        "tests/test_variables.py",
    ),
    Mutation(
        "memory of a collective goes back to the stream that made it", "tritoncomm/core/backend.py",
        "        released((self.result, *self._buffers))\n", "", "tests/streams",
    ),
    Mutation(
        "a table is read before it was copied", "kernels/tritoncomm_kernels/device_table.py",
        "            current.wait_event(self._copied)\n", "", "tests/streams",
    ),
    Mutation(
        "a slab is written before its memory is free", "kernels/tritoncomm_kernels/device_table.py",
        "            stream.wait_event(self._made)\n", "", "tests/streams",
    ),
    Mutation(
        "a slab goes back although another stream reads it", "kernels/tritoncomm_kernels/device_table.py",
        "            self._memory.record_stream(stream)\n", "", "tests/streams",
    ),
    Mutation(
        "slabs are allocated in the caller's thread", "kernels/tritoncomm_kernels/device_table.py",
        "    with ThreadPoolExecutor(1) as thread:\n        return thread.submit(allocate).result()",
        "    assert ThreadPoolExecutor\n    return allocate()", "tests/streams",
    ),
)  # fmt: skip


def copy_of(folder: Path) -> Path:
    """A copy of what the tests need."""
    tree = folder / "tree"
    tree.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".hypothesis")
    for name in COPIED:
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in FILES:
        shutil.copy2(ROOT / name, tree / name)
    return tree


def run(mutation: Mutation, folder: Path) -> tuple[int, str]:
    """Exit status and the first failure of the tests that the mutation names."""
    tree = copy_of(folder)
    path = tree / mutation.file
    path.write_text(path.read_text().replace(mutation.old, mutation.new))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree), str(tree / "kernels")))}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *mutation.tests.split()], cwd=tree, env=environment, capture_output=True, text=True,
            timeout=TIMEOUT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return RED, f"nothing within {TIMEOUT} s"
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, failures[0] if failures else (done.stdout + done.stderr).strip().splitlines()[-1]


def main(words: Sequence[str]) -> int:
    """Run every mutation, or those with one of ``words``; the number that were not seen."""
    chosen = [each for each in MUTATIONS if not words or any(word in each.what for word in words)]
    unseen = []
    for mutation in chosen:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            status, line = run(mutation, Path(folder))
        word = {RED: "red", SURVIVED: "SURVIVED"}.get(status, f"NOT RUN ({status})")
        print(f"{word:9} {time.monotonic() - begun:4.0f} s  {mutation.what}: {line[:120]}", flush=True)
        if status != RED:
            unseen.append(mutation.what)
    print(f"{len(chosen) - len(unseen)} of {len(chosen)} mutations turn a test red")
    return min(len(unseen), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
