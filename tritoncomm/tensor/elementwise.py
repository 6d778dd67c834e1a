"""Operator names by their effect on a layout; a name covers the function and the method."""

__all__ = ["ELEMENTWISE", "KEEPS_LAYOUT", "MAKES_NEW", "QUERIES", "RESHAPES_IN_PLACE", "writes"]

_QUERIES = """
    numel nelement dim ndimension stride is_contiguous storage_offset data_ptr storage untyped_storage element_size
    is_floating_point is_complex is_conj is_neg is_signed is_inference is_pinned is_shared is_same_size get_device
    is_set_to has_names register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ __hash__ __format__
    _is_view _use_count dense_dim sparse_dim is_distributed _is_zerotensor _has_compatible_shallow_copy_type
    record_stream share_memory_ result_type can_cast
"""
QUERIES = frozenset(_QUERIES.split())
"""Queries and settings of the local tensor; no new tensor is made."""

MAKES_NEW = frozenset(["new_tensor", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"])
"""New tensors with the dtype and device of the input and an explicit shape: replicas."""

_KEEPS_LAYOUT = """
    alias clone contiguous cpu cuda detach detach_ pin_memory to type bfloat16 bool byte char double float half int long
    short empty_like full_like ones_like zeros_like resolve_conj resolve_neg to_dense dequantize type_as
    alias_copy cdouble cfloat chalf detach_copy
"""
KEEPS_LAYOUT = frozenset(_KEEPS_LAYOUT.split())
"""Copies and casts of one tensor, or new tensors of the same layout."""

_UNARY = """
    abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_not ceil
    conj conj_physical cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor frac i0 imag isfinite isinf
    isnan isneginf isposinf isreal lgamma log log10 log1p log2 logical_not logit mvlgamma nan_to_num neg negative
    positive rad2deg real reciprocal relu relu6 round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh
    trunc celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish selu silu softplus
    softshrink softsign tanhshrink threshold clamp clip clamp_min clamp_max fill zero
    __abs__ __invert__ __neg__ __pos__
"""
_SEVERAL = """
    add sub subtract rsub mul multiply div divide true_divide floor_divide fmod remainder pow float_power atan2 arctan2
    copysign fmax fmin hypot ldexp lerp logaddexp logaddexp2 maximum minimum nextafter xlogy addcdiv addcmul where
    masked_fill bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift logical_and logical_or
    logical_xor eq ge gt le lt ne greater greater_equal less less_equal not_equal isclose copy
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__
    __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __lshift__
    __rlshift__ __rshift__ __rrshift__ __eq__ __ne__ __ge__ __gt__ __le__ __lt__
    __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
    __ilshift__ __irshift__
"""
_names = (_UNARY + _SEVERAL).split()
ELEMENTWISE = frozenset(_names + [f"{name}_" for name in _names if not name.startswith("__")])
"""Each element of the result depends only on the corresponding elements of the inputs."""

_RESHAPES = """
    t_ unsqueeze_ squeeze_ transpose_ swapaxes_ swapdims_ resize_ resize_as_ resize_as_sparse_ set_ as_strided_
    sparse_resize_ sparse_resize_and_clear_
"""
RESHAPES_IN_PLACE = frozenset(_RESHAPES.split())
"""In-place changes of shape or memory, which would invalidate the layout."""

_AUGMENTED = frozenset(name for name in ELEMENTWISE if name.startswith("__i") and name != "__invert__")


def writes(name: str) -> bool:
    """Whether an operator of this name writes into its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED
