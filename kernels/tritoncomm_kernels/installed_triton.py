"""The Triton of this environment: its version, and the remedy if kernels cannot use it.

torch is the only dependency. Its CUDA builds require Triton, its ROCm builds bring one in a distribution of another
name, its CPU builds bring none: the import tells, the names of distributions do not.
"""

import re

import torch

__all__ = ["OLDEST", "numbers", "problem", "require", "version"]

OLDEST = (3, 6)
_ROCM_INDEX = "https://download.pytorch.org/whl/rocm"


def _imported() -> tuple[str, str]:
    """Return the version of Triton, and the error of its import; one of them is empty."""
    try:
        import triton  # whose import takes as long as all of ours: where it is asked for only
    except ImportError as error:
        return "", str(error)
    found = getattr(triton, "__version__", "")  # a folder that an uninstallation has left has none
    return found, "" if found else f"{list(triton.__path__)} is not Triton"


def version() -> str:
    """Return the version of Triton, empty where it cannot be imported."""
    return _imported()[0]


def numbers() -> tuple[int, int]:
    """Return major and minor of ``version``, whatever a build adds to them; zeros where there is none."""
    found = re.match(r"(\d+)\.(\d+)", version())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def problem() -> str:
    """Return the reason why kernels cannot run, with the remedy; empty if they can."""
    found, error = _imported()
    oldest = ".".join(map(str, OLDEST))
    if not found:
        state = f"it cannot be imported ({error})"
    elif numbers() < OLDEST:
        state = f"this is {found}"
    else:
        return ""
    if torch.version.hip:  # PyPI's triton is for CUDA
        index = _ROCM_INDEX + ".".join(torch.version.hip.split(".")[:2])
        remedy = f"`pip install --force-reinstall torch --index-url {index}` brings the one for ROCm"
    else:
        remedy = f"`pip install torch 'triton>={oldest}'` installs the one that torch wants"
    return f"kernels need Triton {oldest} or newer, and {state}: {remedy}"


def require() -> None:
    """Raise an ``ImportError`` where kernels cannot run."""
    if sentence := problem():
        raise ImportError(sentence, name="triton")
