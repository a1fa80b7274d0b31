"""Which tests of the kit are run on a backend, with what, and the one reason why others are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NoReturn

import pytest

from eplb_core.backend import BackendInfo
from eplb_core.discovery.discover import discover
from eplb_core.discovery.load import load_target
from eplb_core.discovery.select import resolve
from eplb_core.errors import EplbError
from eplb_core.testing import scenarios_growth
from eplb_core.testing.expectation import NotReached, Unmet, told
from eplb_core.testing.kit_test import GATE
from eplb_core.testing.pool import RankPool, Subject
from eplb_core.testing.usable import device_for, why_not_here

NOT_RUN = "eplb not run"
"""Property of reports of tests that were not run, because of what another one shows or is missing: the reason."""

_HOOKS = ("register_buffers", "exchange_metadata", "transfer", "wait")
_METHODS = ("progress", "abort", "close")
_DEVICE_GROUP = (
    "The kit gives it a gloo group as the host's with 'eplb verify --device-group', or with device_group = True in a "
    "class of your own."
)


class Gated:
    """What every group of kit tests stands on: the backend under test, its ranks, and the gate before each test.

    Notes
    -----
    The attributes are those of `BackendConformance`, which describes them.
    """

    backend_name: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any] | None] = None
    env: ClassVar[Mapping[str, str]] = {}
    device_type: ClassVar[str | None] = None
    device_group: ClassVar[bool] = False
    excused: ClassVar[Mapping[str, str]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls) -> Iterator[RankPool]:
        """Three processes, kept for the whole class."""
        with RankPool(3, cls.env) as pool:
            yield pool

    @pytest.fixture
    def info(self) -> BackendInfo:
        """Return what the plugin declares."""
        return resolve(discover(), "backend", self.backend_name)

    @pytest.fixture
    def subject(self, info: BackendInfo) -> Subject:
        """Return the backend as the ranks build it."""
        return self._subject(info)

    def _subject(self, info: BackendInfo) -> Subject:
        return Subject(self.backend_name, self.options, device_for(info, self.device_type), self.device_group)

    @pytest.fixture(scope="class")
    @classmethod
    def measured(cls) -> dict[str, Any]:
        """Return what was measured once for several tests."""
        return {}

    @pytest.fixture(autouse=True)
    def _gated(self, request: pytest.FixtureRequest, measured: dict[str, Any]) -> None:
        test = getattr(request.node, "originalname", request.node.name)
        try:
            info = resolve(discover(), "backend", self.backend_name)
            unusable = why_not_here(info, self.device_type)
        except EplbError as error:
            unusable = str(error)
        if unusable is not None:
            _stop(request, measured, unusable)
        capability = getattr(getattr(type(self), test, None), GATE, None)
        if capability is not None and getattr(info, capability) is not True:
            pytest.skip(f"{self.backend_name} does not declare {capability}")
        if "ranks" in request.fixturenames:
            self._stop_unless_it_can_be_built(request, measured, info, test)
        if test in self.excused:
            request.applymarker(pytest.mark.xfail(reason=self.excused[test], strict=True))

    def _stop_unless_it_can_be_built(
        self, request: pytest.FixtureRequest, measured: dict[str, Any], info: BackendInfo, test: str
    ) -> None:
        whole, built = "test_the_class_is_whole", "test_a_communicator_can_be_built"
        lacks = what_it_lacks(info)
        if lacks and whole not in self.excused:
            _stop(request, measured, f"{whole} fails:\n{lacks}", shown_by=whole)
        if test == built:
            return
        problem = self._problem_of_building(request.getfixturevalue("ranks"), self._subject(info), measured)
        if problem and built not in self.excused:
            _stop(request, measured, f"{built} fails:\n{problem}", shown_by=built)

    def _problem_of_building(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> str:
        if "building" not in measured:
            try:
                ranks.run(scenarios_growth.is_built, subject, timeout_s=30)
                problem = ""
            except (Unmet, NotReached) as failed:
                problem = str(failed)
                if "device_group" in problem and not subject.device_group:
                    problem += f"\n{_DEVICE_GROUP}"
            measured["building"] = problem
        return str(measured["building"])


def what_it_lacks(info: BackendInfo) -> str:
    """Return what keeps a backend's class from being one; empty when it is whole."""
    try:
        cls = load_target(info.target)
    except Exception as error:
        return f"{info.target} cannot be imported: {told(error)}"
    undecorated = [hook for hook in _HOOKS if not hasattr(getattr(cls, hook, None), "eplb_impl")]
    if undecorated:
        return f"missing, or without @hookimpl: {undecorated}"
    missing = [name for name in _METHODS if not callable(getattr(cls, name, None))]
    missing += [] if hasattr(cls, "shared_options") else ["shared_options"]
    if missing:
        return f"missing: {missing}"
    for attribute, known in (("landing_layout", ("rows", "packed_by_peer")), ("landing_device", ("weights", "host"))):
        if getattr(cls, attribute, None) not in known:
            return f"{attribute} must be one of {known}"
    if info.landing_layout not in (None, cls.landing_layout):
        return f"its BackendInfo declares landing_layout={info.landing_layout!r}, {info.target} {cls.landing_layout!r}"
    return ""


def _stop(request: pytest.FixtureRequest, measured: dict[str, Any], reason: str, shown_by: str = "") -> NoReturn:
    """Skip a test that cannot be run; where no test that is run shows the reason, the first one of them fails."""
    brief = reason.splitlines()[0].rstrip(":")
    seen = shown_by in tests_of(request)
    request.node.user_properties.append((NOT_RUN, brief if seen else reason))
    if not seen and "stopped" not in measured:
        measured["stopped"] = reason
        pytest.fail(reason, pytrace=False)
    pytest.skip(f"not run: {brief}")


def tests_of(request: pytest.FixtureRequest) -> set[str]:
    """Return the tests of a test's class that this run of pytest holds."""
    cls = request.node.cls
    return {getattr(item, "originalname", item.name) for item in request.session.items if _class_of(item) is cls}


def _class_of(item: pytest.Item) -> type | None:
    return getattr(item, "cls", None)
