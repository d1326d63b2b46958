"""Reduction ops, and the dtypes on which each op is defined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar

from aiocoll.elements.dtypes import DType, Kind
from aiocoll.elements.kernels import Kernel, builtin_kernel, custom_kernel
from aiocoll.elements.logical import LOGICAL, logical_kernel
from aiocoll.elements.narrow_integers import narrow_kernel
from aiocoll.elements.pairs import LOCATING, Pair, pair_kernel
from aiocoll.typing import Array, Number

__all__ = ["Kernel", "ReduceOp", "kernel"]


@dataclass(frozen=True, slots=True, repr=False)
class ReduceOp:
    """A reduction of the values of all ranks. Use the constants, `PREMUL_SUM` or `custom`; ops compare by value.

    =================  =================================================================================
    SUM, PRODUCT       any dtype; *or* and *and* on bool; integers wrap
    AVG                SUM divided by the world size; not bool; integers truncate toward zero
    MIN, MAX           not complex; a NaN on any rank gives NaN
    BAND, BOR, BXOR    bool and integers, bit by bit
    LAND, LOR, LXOR    not complex; any number but zero is true, also NaN; gives 0 or 1 in the dtype of the arrays
    MINLOC, MAXLOC     arrays of pairs, such as of np.dtype([("value", "f8"), ("index", "i8")]): the pair with the
                       smallest or largest value; NaN wins over numbers; the lowest index wins a tie
    PREMUL_SUM         floats and complex: each rank multiplies its data by its own factor before the sum
    custom             any dtype
    =================  =================================================================================

    float16, bfloat16 and float8 values are accumulated in float32 in rank order and rounded once. Integers of 4 and 2
    bits wrap at their width.

    Attributes:
        name: name of the op, such as ``"SUM"``; for a custom op the name given to it.
        factor: the factor of PREMUL_SUM, else None.
        function: the function of a custom op, else None.
        commutative: False if the operands must be applied in rank order.
    """

    name: str
    factor: float | complex | None = None
    function: Callable[[Any, Any, Any], object] | None = None
    commutative: bool = True

    SUM: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    LAND: ClassVar[ReduceOp]
    LOR: ClassVar[ReduceOp]
    LXOR: ClassVar[ReduceOp]
    MINLOC: ClassVar[ReduceOp]
    MAXLOC: ClassVar[ReduceOp]

    @staticmethod
    def PREMUL_SUM(factor: Number | Array) -> ReduceOp:
        """Multiply this rank's data by `factor`, then sum over the ranks.

        Args:
            factor: a real or complex number, or an array of one element. It may differ from rank to rank.
        """
        return ReduceOp("PREMUL_SUM", factor=_number(factor))

    @staticmethod
    def custom(f: Callable[[Any, Any, Any], object], commutative: bool = True, name: str | None = None) -> ReduceOp:
        """Reduce with the user-defined function `f`.

        Args:
            f: ``f(a, b, out)`` writes the element-wise result into `out`, for any length: 1-D NumPy arrays of the
                tensor's dtype (ml_dtypes' for bfloat16 and float8), where `a` comes from lower ranks than `b` and `out`
                is neither of them. It runs on the event loop, and must be associative. NumPy's binary ufuncs are such
                functions, except ``np.maximum`` and ``np.minimum``, which accept `out` only by name.
            commutative: False if the order of the operands matters; then they are applied in rank order.
            name: name that ranks compare to detect a mismatch; by default the function's name.
        """
        if not callable(f):
            raise TypeError(f"f must be a function f(a, b, out), not {type(f).__name__}")
        if name is None:
            name = str(getattr(f, "__name__", type(f).__name__))
        return ReduceOp(name, function=f, commutative=commutative)

    @property
    def wire_name(self) -> str:
        """The op's name in signatures. It must be equal on all ranks, and does not contain the factor of PREMUL_SUM."""
        if self.function is None:
            return self.name
        return f"custom:{self.name}" if self.commutative else f"custom:{self.name} in rank order"

    def __repr__(self) -> str:
        if self.function is not None:
            return f"ReduceOp.custom({self.name})"
        return f"ReduceOp.{self.name}" if self.factor is None else f"ReduceOp.{self.name}({self.factor})"


ReduceOp.SUM = ReduceOp("SUM")
ReduceOp.AVG = ReduceOp("AVG")
ReduceOp.PRODUCT = ReduceOp("PRODUCT")
ReduceOp.MIN = ReduceOp("MIN")
ReduceOp.MAX = ReduceOp("MAX")
ReduceOp.BAND = ReduceOp("BAND")
ReduceOp.BOR = ReduceOp("BOR")
ReduceOp.BXOR = ReduceOp("BXOR")
ReduceOp.LAND = ReduceOp("LAND")
ReduceOp.LOR = ReduceOp("LOR")
ReduceOp.LXOR = ReduceOp("LXOR")
ReduceOp.MINLOC = ReduceOp("MINLOC")
ReduceOp.MAXLOC = ReduceOp("MAXLOC")


def _number(factor: Any) -> float | complex:
    value = factor
    if hasattr(factor, "item"):
        try:
            value = factor.item()
        except (ValueError, RuntimeError) as exc:
            raise ValueError("factor must be a number or an array of one element") from exc
    if isinstance(value, bool) or not isinstance(value, int | float | complex):
        raise TypeError(f"factor must be a real or complex number, not {type(factor).__name__}")
    return value if isinstance(value, complex) else float(value)


_BITWISE: tuple[Kind, ...] = ("bool", "int", "uint")
_REAL: tuple[Kind, ...] = (*_BITWISE, "float", "half")
_ALLOWED: Mapping[str, tuple[Kind, ...]] = MappingProxyType(
    {
        "SUM": ("bool", "int", "uint", "float", "half", "complex"),
        "PRODUCT": ("bool", "int", "uint", "float", "half", "complex"),
        "AVG": ("int", "uint", "float", "half", "complex"),
        "MIN": _REAL,
        "MAX": _REAL,
        "BAND": _BITWISE,
        "BOR": _BITWISE,
        "BXOR": _BITWISE,
        "LAND": _REAL,
        "LOR": _REAL,
        "LXOR": _REAL,
        "PREMUL_SUM": ("float", "half", "complex"),
    }
)
_DESCRIBED: Mapping[Kind, str] = MappingProxyType(
    {
        "bool": "bool",
        "int": "signed integers",
        "uint": "unsigned integers",
        "float": "float32, float64",
        "half": "float16, bfloat16, float8",
        "complex": "complex",
    }
)


def kernel(op: ReduceOp, dtype: DType, world_size: int) -> Kernel:
    """Return the kernel of `op` on arrays of `dtype` in a group of `world_size` ranks.

    Raises:
        TypeError: `op` is not a `ReduceOp`, or is not defined on `dtype`.
    """
    if not isinstance(op, ReduceOp):
        raise TypeError(f"op must be a ReduceOp, such as ReduceOp.SUM, not {type(op).__name__}")
    if op.wire_name in LOCATING and dtype.kind not in ("pair", "record"):
        raise TypeError(
            f"op {op.name} is not defined on {dtype.name}; it accepts arrays of pairs, such as of "
            "np.dtype([('value', 'f8'), ('index', 'i8')])"
        )
    if dtype.kind == "record":
        raise TypeError(
            f"op {op.name} is not defined on {dtype.name}, whose arrays can be sent but not reduced; reduce each "
            "numeric field in a separate call"
        )
    if op.function is not None:  # do not cache: a cache would keep the user's function alive
        return custom_kernel(op.function, op.name, op.commutative, dtype)
    return _builtin(op.name, op.factor, dtype, world_size)


# The cache is large enough for all ops and dtypes in groups of a few sizes. It is bounded, because PREMUL_SUM may have
# any number of factors.
@lru_cache(maxsize=512)
def _builtin(name: str, factor: float | complex | None, dtype: DType, world_size: int) -> Kernel:
    if isinstance(dtype, Pair):
        return pair_kernel(name, dtype)
    allowed = _ALLOWED.get(name, ())
    if dtype.kind not in allowed:
        raise TypeError(
            f"op {name} is not defined on {dtype.name}; it accepts {', '.join(_DESCRIBED[kind] for kind in allowed)}"
        )
    if isinstance(factor, complex) and dtype.kind != "complex":
        if factor.imag != 0:
            raise TypeError(
                f"op {name}: the factor {factor} is complex, but the array is {dtype.name}; pass a real factor"
            )
        factor = factor.real
    if name in LOGICAL:
        return logical_kernel(name, dtype)
    if dtype.is_narrow:
        return narrow_kernel(name, dtype, world_size)
    return builtin_kernel(name, dtype, world_size, factor)
