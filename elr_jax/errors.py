"""The one error type for mistakes a person can mend: a bad value, file or flag.

Command lines print it as a single line and exit with status 2; everything else is a fault of this library and keeps
its traceback.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class ElrError(Exception):
    """A bad value, with the value and the mend in one line.

    Not a `ValueError`: parsers of command lines and files take those for their own and wrap them in their own words.
    """


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an `ElrError` into one line on stderr and exit status 2."""
    try:
        yield
    except ElrError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
