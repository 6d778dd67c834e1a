"""For jobs that hang or diverge: check mode, the flight record, what ranks have to agree on.

Importing it turns on what the variables TRITONCOMM_CHECK, TRITONCOMM_FLIGHT and TRITONCOMM_FLIGHT_SIGNALS say, and
reading them again does.

In the modules of this package ``name`` is the function that the program called, ``kind`` the collective that ran (a key
of ``descriptor.KINDS``), and ``count`` the number of the call on its group, from 1 on. ``ranks`` are global ranks in
the order of the group; ``rank`` is a position in it where ``world`` stands beside it, else a global rank. Keys of the
store begin with ``base``, the prefix of a call. A difference is a text for the error, empty where ranks agree; it is
the same on all ranks.
"""

from tritoncomm import record, variables
from tritoncomm.debug import signals
from tritoncomm.debug.check import check_call
from tritoncomm.debug.flight import dump
from tritoncomm.debug.flight import flight as _flight
from tritoncomm.debug.replicas import check_replicas, watch_replicas

__all__ = ["check_replicas", "dump", "watch_replicas"]

_CHECKED_CALLS = 1024  # kept in check mode, whose errors name them


def _update() -> None:
    """Turn the record and the comparisons on or off as the variables say."""
    calls, checks = variables.FLIGHT.value[0], variables.CHECK.value or variables.HASH.value
    _flight.before = check_call if checks else None
    _flight.keep(max(calls, _CHECKED_CALLS) if checks else calls)
    record.observe(_flight if calls or checks else None)
    if calls:
        signals.install()
    signals.handle(bool(calls) and variables.FLIGHT_SIGNALS.value)


for _setting in (variables.CHECK, variables.HASH, variables.FLIGHT, variables.FLIGHT_SIGNALS):
    _setting.listeners.append(_update)
_update()
