"""Operators around a collective: pack, unpack and reduce, on the path that suits the tensor."""

from tritoncomm.core.ops import forced_path, pack, pack_into, path, path_for, reduce, unpack

__all__ = ["forced_path", "pack", "pack_into", "path", "path_for", "reduce", "unpack"]
