"""Names of the ranks' modules and parameters in the run of one process, where wrappers have added to them."""

import re
from collections.abc import Iterable

__all__ = ["bare", "partners"]

# What torch's wrappers and those of peft add to the names of what they hold; Megatron's, DeepSpeed's and accelerate's
# wrappers say "module" as torch's do.
_ADDED = re.compile(
    r"(?:(?<=\.)|^)(?:module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module"
    r"|base_model(?:\.model)?|base_layer|original_module|modules_to_save\.\w+)(?:\.|$)"
)


def bare(name: str) -> str:
    """Return a name without what wrappers add to it."""
    return _ADDED.sub("", name).rstrip(".")


def partners(whole: Iterable[str], names: Iterable[str]) -> dict[str, str | None]:
    """Return for names of a rank those in one process; None for a wrapper around what has the partner.

    A name that one process has, or that has no partner there even without the names of wrappers, stands for itself.
    """
    there, found = _by_bare(whole), dict[str, str | None]()
    for stem, same in _by_bare(names).items():
        targets = there.get(stem, [])
        if not targets or set(same) <= set(targets):
            found.update(zip(same, same, strict=True))
            continue
        # Both are chains of wrappers, outer ones first: what they hold at the inner end is the same.
        found.update(dict.fromkeys(same))
        found.update(zip(reversed(same), reversed(targets), strict=False))
    return found


def _by_bare(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names by what they are without wrappers, the shortest first."""
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=len):
        found.setdefault(bare(name), []).append(name)
    return found
