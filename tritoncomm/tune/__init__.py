"""Search of the tile of every kernel: candidates judged by machine code, timed on a GPU, kept in a table.

Arguments have one meaning in all modules. ``op`` is ``pack``, ``unpack`` or ``reduce``. ``unit`` is the bytes per
access, for ``reduce`` the bytes of one element. ``target`` is a key of ``machine_code.TARGETS``, and ``lanes`` the
threads of a warp. ``results`` maps the keys of tasks to values that JSON can hold.
"""

__all__: list[str] = []
