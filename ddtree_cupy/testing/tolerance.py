"""The float rule: how far a kernel may be from the float64 reference, measured by the error of NumPy itself.

With baseline = the reference's formula in the kernel's precision, rounded to the kernel's dtype:

    max |kernel - ref64| <= 2 max |baseline - ref64| + floor
    rms (kernel - ref64) <= rms_factor rms (baseline - ref64) + floor / 4
    |bias (kernel)|      <= max(2 |bias (baseline)|, 1.5 spread) + 1/8             float16 and bfloat16 alone

over the finite entries; before that, shape, dtype and the places of NaN, +inf and -inf must be equal. A floor is the
error that the last rounding alone may cause; roundings average out, so the RMS has a quarter of it. `rms_factor` is 2,
or 1.25 for kernels whose arithmetic is as good as that of the baseline.

The bias is the mean error away from zero in ulps: with u the ulp of dtype at |ref64|,

    bias = sum of sign(ref64) (x - ref64) / sum of u        spread = sqrt(sum of u^2) / sum of u

Rounding to nearest has a bias of 0 with a standard deviation of 0.29 spread. Truncation has a bias of -0.5, which the
other two inequalities do not catch. The spread is 1 / sqrt(n) for n entries of one size, so truncation shows from about
30 entries on.

No bound grows with the array. None grows with the length of sums either, provided that the baseline adds long sums from
sums of at most 1,024 terms, as kernels must. Tensor cores cut sums off toward zero. That error does not average out,
and the kernel cannot avoid it, so the baseline of such a kernel takes its products from `tensor_core_matmul`.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = ["Judgement", "judge", "lse_floor", "out_floor", "tensor_core_matmul"]

_UNIT = 2.0**-24  # half an ulp of 1 in float32
_PRODUCTS_OF_A_STEP = 16
_PRODUCTS_AT_ONCE = 1 << 13  # for each of 16 terms, so that they stay in a cache
_KEPT_BITS = 24 + 2


def _largest(array: Any) -> float:
    """Return the largest finite magnitude; 0 if there is none."""
    values = np.abs(np.asarray(array).astype(np.float64))
    return float(values[np.isfinite(values)].max(initial=0.0))


def out_floor(dtype: npt.DTypeLike, reference: Any, ckv: Any) -> float:
    """Return the floor of an attention output of `dtype`.

    32 * 2^-24 * max|ckv| for float32; one ulp of `dtype` at max|reference| for float16 and bfloat16. For float64
    (references only) the float32 rule with 2^-53.

    Parameters
    ----------
    dtype : dtype
        The dtype that the kernel writes.
    reference : float64 array
        The float64 result.
    ckv : float array
        The values that were averaged; unreachable NaN rows are ignored.

    Examples
    --------
    >>> out_floor(np.float32, np.ones(3), 2 * np.ones(4)) == 64 * 2.0**-24
    True
    >>> out_floor(np.float16, np.ones(3), np.ones(4)) == 2.0**-10
    True
    """
    name = np.dtype(dtype).name
    if name == "float32":
        return 32 * _UNIT * _largest(ckv)
    if name == "float64":
        return 32 * 2.0**-53 * _largest(ckv)
    if name not in ("float16", "bfloat16"):
        raise TypeError(f"out_floor: `dtype` is {name}, expected float32, float16, bfloat16 or float64")
    return float(_ulp(name, np.float64(_largest(reference))))


def _ulp(name: str, values: Any) -> Any:
    """Return the step between neighbours of float16 or bfloat16 at magnitudes; constant below the smallest normal."""
    limits: Any = ml_dtypes.finfo
    info = limits(np.dtype(name))
    _, exponents = np.frexp(np.maximum(values, 2.0 ** int(info.minexp)))  # m * 2^exponent with 0.5 <= m < 1
    return np.ldexp(1.0, exponents - 1 - int(info.nmant))


def lse_floor(reference: Any) -> npt.NDArray[np.float64]:
    """Return the floor of every log-sum-exp: `8 * 2^-24 * max(1, |lse|)`; 0 where the reference is not finite.

    Examples
    --------
    >>> (lse_floor([0.5, -4.0, -np.inf]) / 2.0**-24).tolist()
    [8.0, 32.0, 0.0]
    """
    values = np.abs(np.asarray(reference, np.float64))
    return np.where(np.isfinite(values), 8 * _UNIT * np.maximum(1.0, values), 0.0)


def tensor_core_matmul(left: Any, right: Any) -> npt.NDArray[np.float32]:
    """Multiply matrices of float16 or bfloat16 as tensor cores of sm_90 do: float32, sums cut off toward zero.

    Sixteen products at a time are added to the accumulator. All 17 numbers are aligned to the largest exponent among
    them, where a product has the sum of the exponents of its factors. 24 + 2 bits of each are kept, the others dropped,
    and the sum is rounded toward zero. A kernel that splits the dimensions adds several such products.

    Parameters
    ----------
    left : float16 or bfloat16 array, shape (n, k)
        Finite, as `right` is; the last axis is taken in steps of 16.
    right : array of the same dtype, shape (k, m)

    Returns
    -------
    float32 array, shape (n, m)

    Notes
    -----
    Source: Fasi et al., doi 10.7717/peerj-cs.330, on Volta to Ampere; Khattak and Mikaitis, arXiv 2512.07004, for
    the model of the H200; own measurements on an H200 agree. sm_80 and sm_86 take eight products at a time.

    Examples
    --------
    >>> row = np.array([[1.0, 2.0**-13, 0.0]], np.float16)
    >>> float(tensor_core_matmul(row, row.T)[0, 0]) == 1.0  # 2^-26 is beyond 24 + 2 bits
    True
    """
    left, right = np.asarray(left), np.asarray(right)
    limits: Any = ml_dtypes.finfo
    least = int(limits(left.dtype).minexp)
    total = np.zeros((len(left), right.shape[1]))
    block = max(1, _PRODUCTS_AT_ONCE // max(1, right.shape[1]))  # of rows
    for start in range(0, left.shape[1], _PRODUCTS_OF_A_STEP):
        step = slice(start, start + _PRODUCTS_OF_A_STEP)
        columns = right[step, None, :].astype(np.float64)
        of_columns = _exponents(columns, least)
        for first in range(0, len(left), block):
            rows = left[first : first + block, step].T[..., None].astype(np.float64)
            total[first : first + block] = _add_cut_off(
                total[first : first + block], rows * columns, _exponents(rows, least) + of_columns
            )
    return total.astype(np.float32)


def _add_cut_off(total: Any, products: Any, exponents: Any) -> Any:
    """Add products [k, n, m] to float32 numbers [n, m] held as float64, in one step of a tensor core."""
    largest = np.maximum(_exponents(total, -126), exponents.max(axis=0))
    parts = np.ldexp(1.0, _KEPT_BITS - 1 - largest)  # of 1
    products *= parts
    kept = np.trunc(total * parts) + np.trunc(products, out=products).sum(axis=0)
    mantissa, exponent = np.frexp(kept / parts)
    return np.ldexp(np.trunc(mantissa * 2.0**24), exponent - 24)


def _exponents(values: npt.NDArray[np.float64], least: int) -> npt.NDArray[np.int32]:
    """Return floor(log2 |values|), at least `least`; for 0 a number below all sums of two exponents."""
    return np.where(values == 0, -400, np.maximum(np.frexp(values)[1] - 1, least)).astype(np.int32)


@dataclass(frozen=True)
class Judgement:
    """The result of the float rule for one array.

    Attributes
    ----------
    max_error, max_allowed : float
        The values at the entry that exceeds its own bound the most.
    rms_error, rms_allowed : float
        Taken over the finite entries.
    bias, bias_allowed : float
        Mean error away from zero in ulps, and the largest magnitude that it may have; 0 except for 16-bit floats.
    worst : list of tuple of int
        Coordinates of the largest errors beyond their bound, worst first, at most five.
    """

    max_error: float
    max_allowed: float
    rms_error: float
    rms_allowed: float
    bias: float
    bias_allowed: float
    worst: list[tuple[int, ...]]

    @property
    def passes(self) -> bool:
        """Whether all inequalities hold."""
        return (
            self.max_error <= self.max_allowed
            and self.rms_error <= self.rms_allowed
            and abs(self.bias) <= self.bias_allowed
        )


def _rms(array: npt.NDArray[np.float64]) -> float:
    scale = float(np.abs(array).max(initial=0.0))
    return scale * float(np.sqrt(np.mean(np.square(array / scale)))) if scale > 0 else 0.0


def judge(
    actual: Any, reference: Any, baseline: Any, *, floor: Any, widen: float = 1.0, rms_factor: float = 2.0
) -> Judgement:
    """Measure `actual` by the float rule; entries that are not finite in `reference` are skipped.

    Parameters
    ----------
    actual, baseline : float array
        The result to judge; NumPy's result in the precision of the kernel, rounded to the dtype of the kernel.
    reference : float64 array
        The same result computed in float64 throughout.
    floor : float or array that broadcasts to `actual`
        From `out_floor` or `lse_floor`.
    widen : float
        Multiplies all bounds.
    rms_factor : float
        Multiplies the RMS of the baseline.

    Examples
    --------
    >>> judge([1.0, 2.25], [1.0, 2.0], [1.0, 2.0], floor=0.5).passes  # the RMS error 0.177 is above 0.5 / 4
    False
    """
    reference = np.asarray(reference, np.float64)
    finite = np.isfinite(reference)
    where = np.argwhere(finite)
    if not len(where):
        return Judgement(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, [])
    exact = reference[finite]
    floors = np.broadcast_to(np.asarray(floor, np.float64), reference.shape)[finite]
    actual, baseline = np.asarray(actual), np.asarray(baseline)
    signed, of_baseline = (array.astype(np.float64)[finite] - exact for array in (actual, baseline))
    bias = bias_allowed = 0.0
    if actual.dtype.name in ("float16", "bfloat16"):
        ulps = _ulp(actual.dtype.name, np.abs(exact))
        bias, bias_of_baseline = (
            float((np.sign(exact) * errors).sum() / ulps.sum()) for errors in (signed, of_baseline)
        )
        spread = float(np.sqrt(np.square(ulps / ulps.sum()).sum()))
        bias_allowed = widen * (max(2 * abs(bias_of_baseline), 1.5 * spread) + 1 / 8)
    error, of_baseline = np.abs(signed), np.abs(of_baseline)
    allowed = widen * (2 * of_baseline.max() + floors)
    excess = error - allowed
    order = np.argsort(-excess, kind="stable")[:5]
    first = order[0]
    worst = [tuple(int(axis) for axis in where[i]) for i in order if i == first or excess[i] > 0]
    rms_allowed = widen * (rms_factor * _rms(of_baseline) + _rms(floors) / 4)
    return Judgement(float(error[first]), float(allowed[first]), _rms(error), rms_allowed, bias, bias_allowed, worst)
