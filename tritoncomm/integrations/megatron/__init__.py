"""Megatron-core on tritoncomm, unedited: ``patch()`` once Megatron is imported, ``unpatch()`` to undo it.

It replaces the tensor-parallel mappings, ``P2PCommunicator`` and the functions of the linear layers, which carry half
of the tensor-parallel traffic. Losses and gradients keep their bits. docs/integrations_megatron.md lists the calls that
stay Megatron's. ``resharding`` is a service of Megatron's resharding.
"""

from tritoncomm.integrations.megatron.patching import TESTED, Report, patch, patched, unpatch

__all__ = ["TESTED", "Report", "patch", "patched", "unpatch"]
