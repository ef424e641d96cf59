"""NVRTC's options in the spelling of a host compiler."""

import re
from collections.abc import Sequence

_ARCH = re.compile(r"^(?:-arch|--gpu-architecture)=(?:sm|compute)_([0-9]+)([af]?)$")
_SHORT = ("-D", "-U", "-I")
_WITH_VALUE = (*_SHORT, "-arch", "--gpu-architecture", "--define-macro", "--undefine-macro", "--include-path")


def joined(options: Sequence[str]) -> tuple[str, ...]:
    """Return the options, each in one word with its value, which NVRTC takes as a word of its own, too."""
    words: list[str] = []
    for option in options:
        if words and words[-1] in _WITH_VALUE:
            words[-1] += ("=" if words[-1] not in _SHORT else "") + option
        else:
            words.append(re.sub(r"^(-[DUI])\s+", r"\1", option))
    return tuple(words)


def architecture(options: Sequence[str]) -> tuple[str, ...]:
    """Return what defines `__CUDA_ARCH__`: that of the last `-arch`, else of an H100 or H200."""
    found = [match for option in options if (match := _ARCH.match(option))]
    number, features = (found[-1][1], found[-1][2]) if found else ("90", "")
    feature = (f"-D__CUDA_ARCH_FEAT_SM{number}_ALL=1",) if features == "a" else ()
    return f"-DEMU_ARCH={number}0", *feature


def compiler_options(options: Sequence[str]) -> tuple[str, ...]:
    """Return the options a host compiler shares with NVRTC, in its spelling."""
    kept = []
    for option in options:
        spelled = re.sub(r"^--(define-macro|undefine-macro|include-path)=", _short, option)
        if re.match(r"^-[DUI].", spelled):
            kept.append(spelled)
    return tuple(kept)


def _short(match: re.Match[str]) -> str:
    return {"define-macro": "-D", "undefine-macro": "-U", "include-path": "-I"}[match.group(1)]
