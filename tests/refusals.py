"""Tables of refused calls, one test a table: whole calls by `rejects`, values of single arguments by `rejections`."""

import inspect
from dataclasses import replace

import numpy as np
import pytest

from ddtree_cupy.testing import unchanged


def rejects(*cases):
    """Turn a function into the test that it raises, once for each case: (error, message, *its first arguments).

    What further arguments it has are parameters or fixtures as usual.
    """

    def decorate(call):
        names = list(inspect.signature(call).parameters)

        def test(case, **others):
            error, message, *arguments = case
            with pytest.raises(error, match=message):
                call(*arguments, **others)

        others = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names[len(cases[0]) - 2 :]]
        case = inspect.Parameter("case", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([case, *others])
        test.__name__, test.__doc__ = call.__name__, call.__doc__
        return pytest.mark.parametrize("case", cases, ids=[message for _, message, *_ in cases])(test)

    return decorate


class TorchTensor:
    """Looks to the checks like a torch tensor on a GPU."""

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **_):
        raise BufferError("must be called for no tensor on a GPU")


class CupyArray:
    """Looks to the checks like a CuPy array."""


TorchTensor.__module__, CupyArray.__module__ = "torch", "cupy"


def of(*values):
    """Return an int32 array."""
    return np.array(values, np.int32)


def read_only(array):
    """Return a copy that cannot be written."""
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def rejections(tables_of):
    """Parametrize a test by (function, name, value, error), from {function: [{name: {error: [value, ...]}}, ...]}.

    A name with a dot is a field of a container, as in `kv.page_table`, which may refuse it itself.
    """
    rows = [
        pytest.param(function, name, value, error, id=f"{function.__name__}-{name}-{error.__name__}-{number}")
        for function, tables in tables_of.items()
        for table in tables
        for name, values_of in table.items()
        for error, values in values_of.items()
        for number, value in enumerate(values)
    ]
    return pytest.mark.parametrize(("function", "name", "value", "error"), rows)


def assert_rejects(function, arguments, name, value, error, words=None):
    """Check that `value` for `name` is refused by an error that names function and argument, and nothing is written.

    `words` is what the message must hold besides the function's name; None: the name of the argument. A call that is
    right goes before: kernels do not check calls that are alike to it.
    """
    function(**arguments)
    owner, _, field = name.partition(".")
    kept = {key: one for key, one in arguments.items() if isinstance(one, np.ndarray) or hasattr(one, "map")}
    speaker = f"{function.__name__}|{type(arguments[owner]).__name__}" if field else function.__name__
    words = rf".*`({owner}\.)?{field or owner}\b" if words is None else words
    with unchanged(**kept), pytest.raises(error, match=rf"(?s)^({speaker}): {words}"):
        function(**{**arguments, owner: replace(arguments[owner], **{field: value}) if field else value})
