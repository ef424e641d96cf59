"""`python -m ddtree_cupy.emulate KIND` prints the variables of a sanitizer run, for `env $(...) python ...`."""

import sys

from ddtree_cupy.emulate import sanitizer_environment
from ddtree_cupy.errors import DDTreeError


def main(arguments: list[str]) -> int:
    """Print NAME=VALUE lines; exit code 1 where the sanitizer cannot be used."""
    try:
        found = sanitizer_environment(*arguments)
    except (DDTreeError, TypeError) as error:
        print(f"ddtree_cupy.emulate: {error}; usage: python -m ddtree_cupy.emulate asan+ubsan", file=sys.stderr)
        return 1
    print("\n".join(f"{name}={value}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
