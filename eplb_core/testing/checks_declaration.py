"""Kit tests: declarations are true and cheap to read, and equal ranks fit together."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from eplb_core.backend import API_VERSION, BackendInfo
from eplb_core.discovery.load import load_target
from eplb_core.testing import scenarios_failure, scenarios_growth
from eplb_core.testing.expectation import Unmet, expect
from eplb_core.testing.gate import Gated, what_it_lacks
from eplb_core.testing.kit_test import kit_test
from eplb_core.testing.pool import RankPool, Subject

_KNOWN_DEVICES = {"*", "cpu", "cuda", "xpu", "npu", "hpu", "mps", "privateuseone", "meta", "xla", "mtia", "musa", "mlu"}


class DeclarationChecks(Gated):
    """The plugin's declaration is true, and its class is complete."""

    @kit_test
    def test_the_declaration_is_light(self, info: BackendInfo) -> None:
        """Listing what is installed imports the backend or its library: every host pays for it, chosen or not."""
        module = info.target.partition(":")[0]
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"import json, eplb_core; found = eplb_core.discover()\n"
            f"info = found.backends[{info.name!r}]; info.available and info.available()\n"
            f"print(json.dumps([m for m in ({module!r}, 'torch', 'numpy') if m in sys.modules]))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        expect(done.returncode == 0, f"discovery fails in a new process: {done.stderr[-500:]}")
        loaded = json.loads(done.stdout.splitlines()[-1])
        expect(not loaded, f"after discover(), these are imported: {loaded}")

    @kit_test
    def test_the_declaration_is_sound(self, info: BackendInfo) -> None:
        """Something declared cannot be true: a device type torch does not have, or another version of the contract."""
        expect(info.api_version == API_VERSION, f"api_version is {info.api_version}, this core's is {API_VERSION}")
        unknown = [name for name in info.device_types if name not in _KNOWN_DEVICES]
        expect(not unknown, f"device_types {unknown}: none of torch's device types")

    @kit_test
    def test_the_class_is_whole(self, info: BackendInfo) -> None:
        """The class lacks a hook, its decorator, a method or an attribute; building a communicator fails or guesses."""
        lacks = what_it_lacks(info)
        expect(not lacks, lacks)

    @kit_test
    def test_a_communicator_can_be_built(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> None:
        """The constructor or `register_buffers` raises, or never returns: no host gets as far as a transfer."""
        problem = self._problem_of_building(ranks, subject, measured)
        expect(not problem, problem)

    @kit_test
    def test_unknown_options_are_refused(self, info: BackendInfo) -> None:
        """A misspelt option is ignored in silence, and the operator believes that it is set."""
        model: Any = load_target(info.options) if isinstance(info.options, str) else info.options
        if model is None:
            return  # the core refuses whatever is given
        try:
            model(**{**(self.options or {}), "no_such_option_of_any_backend": 1})
        except ValueError:
            return
        raise Unmet(f"{model.__name__} accepts an option that it does not have; set extra='forbid'")

    @kit_test
    def test_equal_ranks_fit_together(self, ranks: RankPool, subject: Subject) -> None:
        """Ranks with equal settings refuse each other: `shared_options` holds a value that differs by rank."""
        stories = ranks.run(scenarios_growth.describes_itself, subject)
        first = stories[0]["shared"]
        differing = {key for story in stories for key in first if story["shared"].get(key) != first[key]}
        expect(not differing, f"shared_options that differ between ranks built alike: {sorted(differing)}")

    @kit_test
    def test_metadata_is_small(self, ranks: RankPool, subject: Subject) -> None:
        """Metadata grows with the number of rows; with hundreds of ranks, connecting takes minutes."""
        nbytes = ranks.run(scenarios_growth.describes_itself, subject)[0]["nbytes"]
        expect(nbytes <= 64 << 10, f"metadata of 61 layers x 6 tensors x 32 rows takes {nbytes} bytes of 65536")

    @kit_test
    def test_foreign_metadata_is_refused(self, ranks: RankPool, subject: Subject) -> None:
        """Bytes that another program or version wrote are taken for addresses: weights go anywhere, or it crashes."""
        problems = ranks.run(scenarios_failure.refuses_foreign_metadata, subject)[0]
        expect(not problems, "; ".join(problems))

    @kit_test
    def test_nothing_is_pickled(self, ranks: RankPool, subject: Subject) -> None:
        """A pickle travels between ranks: whoever can write to the wire can run code in every engine."""
        for rank, calls in enumerate(ranks.run(scenarios_growth.serialises, subject)):
            expect(not calls, f"rank {rank}: {calls}")
