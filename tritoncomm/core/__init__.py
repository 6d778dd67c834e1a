"""Movement of bytes, not differentiable: plans of collectives, pack and unpack, eager and compiled collectives.

Arguments have one meaning in all modules. ``name`` is the public function that the program called, for errors,
counters and reports. ``group`` has ``world`` ranks, all of which call; ``rank`` is a position in it, not a global rank.
``x`` is the tensor of this rank. ``dim`` is the dim that is split or concatenated, and may be negative. ``sizes`` has
the size of that dim on each rank; None splits it evenly, which in pack, unpack and address maps means as
``torch.chunk`` does. ``itemsize`` is the bytes of an element; strides are in elements. "Copied" bytes are read plus
written bytes.
"""

__all__: list[str] = []
