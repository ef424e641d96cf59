"""The float rule: how far a kernel may be from the float64 reference, measured by what NumPy itself loses.

With baseline = the reference's code run in the kernel's precision and rounded to the kernel's dtype:

    max |kernel - ref64| <= 2 max |baseline - ref64| + floor
    rms (kernel - ref64) <= 2 rms (baseline - ref64) + floor / 4

over the finite entries; shape, dtype and the places of NaN, +inf and -inf must be equal first. A floor is what the
last rounding alone may cost; it never grows with the array. Roundings average out, so the RMS has a quarter of it.
Tensor cores cut sums off toward zero (Fasi et al., doi 10.7717/peerj-cs.330, on Volta to Ampere; what an H200 gave
agrees), which does not average out: `widen_rms=4` then leaves the whole floor.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = ["Judgement", "judge", "lse_floor", "out_floor"]

_UNIT = 2.0**-24  # half an ulp of 1 in float32


def _largest(array: Any) -> float:
    """Return the largest finite magnitude, 0 for none."""
    values = np.abs(np.asarray(array).astype(np.float64))
    return float(values[np.isfinite(values)].max(initial=0.0))


def out_floor(dtype: npt.DTypeLike, reference: Any, ckv: Any) -> float:
    """Return the floor of an attention output of `dtype`.

    32 * 2^-24 * max|ckv| for float32; one ulp of `dtype` at max|reference| for float16 and bfloat16. For float64
    (references only) the float32 rule with 2^-53.

    Parameters
    ----------
    dtype : dtype
        What the kernel writes.
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
    limits: Any = ml_dtypes.finfo
    info = limits(np.dtype(dtype))
    largest = max(_largest(reference), 2.0 ** int(info.minexp))  # below the smallest normal the step is constant
    _, exponent = np.frexp(largest)  # largest = m * 2^exponent with 0.5 <= m < 1
    return float(2.0 ** (int(exponent) - 1 - int(info.nmant)))


def lse_floor(reference: Any) -> npt.NDArray[np.float64]:
    """Return the floor of every log-sum-exp: 8 * 2^-24 * max(1, |lse|); 0 where the reference is not finite.

    Examples
    --------
    >>> (lse_floor([0.5, -4.0, -np.inf]) / 2.0**-24).tolist()
    [8.0, 32.0, 0.0]
    """
    values = np.abs(np.asarray(reference, np.float64))
    return np.where(np.isfinite(values), 8 * _UNIT * np.maximum(1.0, values), 0.0)


@dataclass(frozen=True)
class Judgement:
    """What the float rule says about one array.

    Attributes
    ----------
    max_error, max_allowed : float
        Largest excess is judged entry by entry; these are the values at the worst entry.
    rms_error, rms_allowed : float
        Over the finite entries.
    worst : list of tuple of int
        Coordinates of the largest errors beyond their bound, worst first, at most five.
    """

    max_error: float
    max_allowed: float
    rms_error: float
    rms_allowed: float
    worst: list[tuple[int, ...]]

    @property
    def passes(self) -> bool:
        """Whether both inequalities hold."""
        return self.max_error <= self.max_allowed and self.rms_error <= self.rms_allowed


def _rms(array: npt.NDArray[np.float64]) -> float:
    scale = float(np.abs(array).max(initial=0.0))
    return scale * float(np.sqrt(np.mean(np.square(array / scale)))) if scale > 0 else 0.0


def judge(
    actual: Any, reference: Any, baseline: Any, *, floor: Any, widen: float = 1.0, widen_rms: float = 1.0
) -> Judgement:
    """Measure `actual` by the float rule; entries that are not finite in `reference` are skipped.

    Parameters
    ----------
    actual, baseline : float array
        What is judged, and NumPy's result in the kernel's precision, rounded to the kernel's dtype.
    reference : float64 array
        The same result computed in float64 throughout.
    floor : float or array that broadcasts to `actual`
        From `out_floor` or `lse_floor`.
    widen : float
        Multiplies both bounds.
    widen_rms : float
        Multiplies the floor's part of the RMS bound: for errors of one sign, which do not average out.

    Examples
    --------
    >>> judge([1.0, 2.25], [1.0, 2.0], [1.0, 2.0], floor=0.5).passes  # the RMS error 0.177 is above 0.5 / 4
    False
    """
    reference = np.asarray(reference, np.float64)
    finite = np.isfinite(reference)
    where = np.argwhere(finite)
    if not len(where):
        return Judgement(0.0, 0.0, 0.0, 0.0, [])
    exact = reference[finite]
    floors = np.broadcast_to(np.asarray(floor, np.float64), reference.shape)[finite]
    error = np.abs(np.asarray(actual).astype(np.float64)[finite] - exact)
    of_baseline = np.abs(np.asarray(baseline).astype(np.float64)[finite] - exact)
    allowed = widen * (2 * of_baseline.max() + floors)
    excess = error - allowed
    order = np.argsort(-excess, kind="stable")[:5]
    first = order[0]
    worst = [tuple(int(axis) for axis in where[i]) for i in order if i == first or excess[i] > 0]
    rms_allowed = widen * (2 * _rms(of_baseline) + widen_rms * _rms(floors) / 4)
    return Judgement(float(error[first]), float(allowed[first]), _rms(error), rms_allowed, worst)
