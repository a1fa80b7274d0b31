"""The conformance kit: inherit `BackendConformance`, set ``backend_name``, and every claim of a backend is a test.

Each test's docstring says what its failure means. The checks run in real processes on loopback, which stay from one
test to the next; after a failure they are replaced, so that no test inherits what another one broke.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from eplb_core.testing.checks_bytes import ByteChecks
from eplb_core.testing.checks_claims import ClaimChecks
from eplb_core.testing.checks_declaration import DeclarationChecks
from eplb_core.testing.checks_failure import FailureChecks
from eplb_core.testing.checks_growth import GrowthChecks
from eplb_core.testing.checks_lives import LifeChecks
from eplb_core.testing.checks_order import OrderChecks
from eplb_core.testing.expectation import expect
from eplb_core.testing.gate import tests_of
from eplb_core.testing.kit_test import GATE, kit_test

KIT_VERSION = 1
"""Rises when the kit asks for more: a backend that passed before may then fail."""


# pytest runs what a class inherits from its last base first.
class BackendConformance(
    ClaimChecks, GrowthChecks, LifeChecks, FailureChecks, OrderChecks, ByteChecks, DeclarationChecks
):
    """Tests that every backend must pass. Inherit, set `backend_name`, and run pytest.

    A failing test first shows what its failure means. If the backend raised before that could be checked, it shows
    ``not reached`` and the exception instead.

    Where the backend cannot be used (not installed, its ``requires`` or ``available`` say no, no such device here), the
    first test fails with the reason and the others are skipped with it: one reason, and no green run that has tested
    nothing. A suite that is to pass on machines without the device says so itself:
    ``pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")``. Likewise, when the class
    is incomplete or no communicator can be built, the test of that fails and the tests that need one are skipped.

    Attributes
    ----------
    backend_name : str
        The backend under test; its distribution must be installed.
    options : mapping of str to object or None
        Options of the backend, for all tests.
    env : mapping of str to str
        Environment of the ranks, for instance a transport.
    device_type : str or None
        Where the weights live; None is ``cpu`` where the backend declares it, else its first device that is here.
    device_group : bool
        Does the backend need the host's process group (``device_group=``)? The kit then gives it a gloo group.
    excused : mapping of str to str
        Kit tests that this backend cannot pass yet, and why. They run all the same, are shown with the reason, and
        must fail: one that passes is no longer excused.

    Examples
    --------
    >>> class TestMine(BackendConformance):
    ...     backend_name = "mine"
    """

    def __init_subclass__(cls, **given: Any) -> None:
        """Refuse a class that replaces or removes kit tests."""
        super().__init_subclass__(**given)
        replaced = [name for name in kit_tests() if name in vars(cls)]
        if replaced:
            raise TypeError(
                f"{cls.__name__} replaces or drops kit tests: {', '.join(replaced)}. Tests of your own need names of "
                "their own; a kit test that cannot pass yet goes into `excused`, with the reason."
            )
        unknown = sorted(set(cls.excused) - set(kit_tests()))
        if unknown:
            raise TypeError(f"{cls.__name__}.excused names no tests of the kit: {', '.join(unknown)}")

    @kit_test
    def test_the_kit_is_complete(self, request: pytest.FixtureRequest) -> None:
        """Tests of the kit were dropped, replaced or deselected; passing the rest proves nothing."""
        replaced = [n for n, test in kit_tests().items() if inspect.getattr_static(type(self), n, None) is not test]
        expect(not replaced, f"replaced or dropped: {replaced}")
        left_out = sorted(set(kit_tests()) - tests_of(request))
        expect(not left_out, f"not collected: {left_out}")


def kit_tests() -> dict[str, Callable[..., Any]]:
    """Return every test of the kit by name, in the order in which they are run."""
    groups = reversed(BackendConformance.__mro__)
    return {name: test for group in groups for name, test in vars(group).items() if name.startswith("test_")}


def gate_of(name: str) -> str | None:
    """Return the capability without which a kit test is skipped."""
    gate: str | None = getattr(kit_tests()[name], GATE, None)
    return gate
