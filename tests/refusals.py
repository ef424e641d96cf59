"""Tables of refused calls: one row a fault, one test a table."""

import pytest


def rejects(*cases):
    """Make of a function of some arguments the test that it raises, once a case: (error, message, *arguments)."""

    def decorate(call):
        @pytest.mark.parametrize("case", cases, ids=[message for _, message, *_ in cases])
        def test(case):
            error, message, *arguments = case
            with pytest.raises(error, match=message):
                call(*arguments)

        test.__name__, test.__doc__ = call.__name__, call.__doc__
        return test

    return decorate
