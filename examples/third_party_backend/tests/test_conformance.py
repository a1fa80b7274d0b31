"""The conformance kit over this backend: every capability that its hooks claim is tested."""

import pytest

from eplb_core.testing.conformance import BackendConformance

pytestmark = pytest.mark.slow


class TestConformance(BackendConformance):
    backend_name = "vmread"
