"""What makes a method a test of the kit: its docstring says what failing means, a claim may be its condition."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from eplb_core.testing.expectation import PREFIX, NotReached, Unmet, told

GATE = "eplb_gate"
"""Attribute of a kit test: the capability without which it is skipped."""

Test = TypeVar("Test", bound=Callable[..., Any])


def kit_test(test: Test) -> Test:
    """Put what a failure means, the docstring, in front of what failed; but only where that is what failed."""

    @functools.wraps(test)
    def wrapper(*args: Any, **given: Any) -> Any:
        try:
            return test(*args, **given)
        except Unmet as failed:
            raise Unmet(f"{inspect.cleandoc(test.__doc__ or '')}\n\n{failed}") from None
        except NotReached as failed:
            raise NotReached(str(failed)) from None  # without the frames of the kit
        except Exception as error:
            text = f"{PREFIX}the backend raised before this could be checked\n{told(error)}"
            raise NotReached(text) from error

    return wrapper  # type: ignore[return-value]


def needs(capability: str) -> Callable[[Test], Test]:
    """Run a test only where the backend declares a capability."""

    def mark(test: Test) -> Test:
        setattr(test, GATE, capability)
        return test

    return mark
