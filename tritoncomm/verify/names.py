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
    """Return the partner of each module name of a rank: the name of the same module in one process.

    The partner of a wrapper is None if the module inside of it has one. A name is its own partner if one process has
    it, or if no name there is equal to it without the names of wrappers.

    Args:
        whole: names in one process.
        names: names on the rank.
    """
    whole_chains = _by_bare(whole)
    partner_by_name: dict[str, str | None] = {}
    for bare_name, chain in _by_bare(names).items():
        # A chain: the names of a module's wrappers, outer ones first, and of the module.
        whole_chain = whole_chains.get(bare_name, [])
        if not whole_chain or set(chain) <= set(whole_chain):
            partner_by_name.update(zip(chain, chain, strict=True))
            continue
        # Chains of different lengths hold the same module at their inner end, so they are matched from there.
        partner_by_name.update(dict.fromkeys(chain))
        partner_by_name.update(zip(reversed(chain), reversed(whole_chain), strict=False))
    return partner_by_name


def _by_bare(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names by what they are without wrappers, the shortest first."""
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=len):
        found.setdefault(bare(name), []).append(name)
    return found
