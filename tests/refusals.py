"""Tables of refused calls: one row a fault, one test a table."""

import inspect

import pytest


def rejects(*cases):
    """Make of a function the test that it raises, once a case: (error, message, *its first arguments).

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
