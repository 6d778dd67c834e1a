"""Lanes of a Trainer's data loaders: one per sequence group."""

import importlib
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader

from tritoncomm.errors import ArgumentError

__all__ = ["Lanes"]


class Lanes:
    """Sequence groups of a job, each a lane of the data loaders: its ranks draw the same samples.

    Attributes:
        leaders: first rank of every group, in order; all ranks of the job compare theirs.
    """

    def __init__(self, accelerator: Any, group: ProcessGroup, label: str) -> None:
        self._accelerator, self._prepare_as_accelerate = accelerator, accelerator.prepare_data_loader
        self._leader = torch.distributed.get_process_group_ranks(group)[0]
        if accelerator.num_processes != (world := torch.distributed.get_world_size()):
            raise ArgumentError(
                f"{label}: accelerate takes this job of {world} ranks for {accelerator.num_processes}; without a GPU, "
                "set use_cpu=True in TrainingArguments"
            )
        firsts = accelerator.gather(torch.tensor([self._leader], device=accelerator.device)).tolist()
        self.leaders = sorted(set(firsts))
        if any(firsts.count(leader) != group.size() for leader in self.leaders):
            raise ArgumentError(
                f"{label}: every rank of the job needs a sequence group of {group.size()} ranks; by rank, the groups "
                f"begin with ranks {firsts}"
            )

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Run ``Accelerator.prepare_data_loader`` with sequence groups in the place of processes."""
        accelerator = self._accelerator
        if not getattr(data_loader, "_is_accelerate_prepared", False):
            data_loader = importlib.import_module("accelerate.data_loader").prepare_data_loader(
                data_loader,
                accelerator.device,
                num_processes=len(self.leaders),
                process_index=self.leaders.index(self._leader),
                put_on_device=accelerator.device_placement if device_placement is None else device_placement,
                rng_types=accelerator.rng_types.copy(),
                dispatch_batches=False,  # rank 0 would slice its batches for all processes
                even_batches=accelerator.even_batches,
                use_seedable_sampler=accelerator.use_seedable_sampler,
                data_seed=accelerator.dataloader_config.data_seed,
                non_blocking=accelerator.non_blocking,
                use_stateful_dataloader=accelerator.use_stateful_dataloader,
            )
            data_loader._is_accelerate_prepared = True  # pyright: ignore[reportAttributeAccessIssue]
        # Which adds it to the accelerator's data loaders, and prepares none that is prepared.
        return self._prepare_as_accelerate(data_loader, device_placement, slice_fn_for_dispatch)
