"""The staging allocator that a communicator gets: the one named, if it is there, fits, and passes its probe."""

from __future__ import annotations

import gc
import logging
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch

import eplb_core as eplb
from eplb_core.backend import API_VERSION, StagingInfo
from eplb_core.discovery.catalog import Catalog
from eplb_core.discovery.select_staging import build_allocator, why_unfit
from eplb_core.errors import ConfigError, EplbError, TransferError
from eplb_core.memory.landing import LandingMemory
from eplb_core.memory.staging import TorchStaging
from eplb_core.weights.layout import build_layout

SUPPORT = Path(__file__).parent / "support"
if str(SUPPORT) not in sys.path:
    sys.path.insert(0, str(SUPPORT))

import fake_device  # noqa: E402

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def device():
    yield fake_device.require()
    if fake_device.why_not() is None:
        fake_device.reset()


class Slab(TorchStaging):
    """An allocator whose probe says what the test told it to."""

    said: BaseException | dict[str, str] | None = None

    @classmethod
    def probe(cls, device):
        if isinstance(cls.said, BaseException):
            raise cls.said
        return cls.said


@pytest.fixture
def slab(monkeypatch):
    module = types.ModuleType("slab_staging")
    module.Slab = Slab
    monkeypatch.setitem(sys.modules, "slab_staging", module)
    monkeypatch.setattr(Slab, "said", {"pages": "2 MiB"})
    return StagingInfo("slab", "big pages", API_VERSION, "slab_staging:Slab")


def build(info: StagingInfo, name: str | None = "slab", *, weights=CPU, landing_device="host"):
    torchs = eplb.discover().staging["torch"]
    catalog = Catalog(staging={"torch": torchs, info.name: info})
    config = eplb.EPLBConfig(staging=name)
    return build_allocator(config, catalog, weights=weights, landing_device=landing_device, backend="swift")


def refusal(info: StagingInfo, **keywords) -> str:
    with pytest.raises(ConfigError) as caught:
        build(info, **keywords)
    assert caught.value.code == "EPLB-C014"
    return str(caught.value)


def test_the_allocator_named_is_built_for_the_weights_and_said_with_its_facts(slab, caplog):
    with caplog.at_level(logging.INFO, "eplb_core"):
        allocator = build(slab)
    assert isinstance(allocator, Slab)
    assert "EPLB staging slab for swift: named in the configuration (pages: 2 MiB)." in caplog.messages


def test_without_a_name_torchs_own_is_taken_and_nothing_is_said_aloud(slab, caplog):
    with caplog.at_level(logging.INFO, "eplb_core"):
        assert type(build(slab, None)) is TorchStaging
    assert caplog.messages == []


def test_an_unknown_name_is_refused_with_what_is_installed(slab):
    with pytest.raises(ConfigError, match=r"Unknown staging allocator 'slap'.*Installed: torch, slab.*'slab'"):
        build(slab, "slap")


@pytest.mark.parametrize(
    ("fields", "weights", "landing_device", "reason"),
    [
        ({"device_types": ("cuda",)}, CPU, "host", "it stages for cuda, not for cpu"),
        ({"memory": "device"}, CPU, "weights", "swift stages in host memory, and it has device memory only"),
        ({"memory": "device"}, CUDA, "host", "swift stages in host memory, and it has device memory only"),
        ({"memory": "host"}, CUDA, "weights", "swift stages in device memory, and it has host memory only"),
        ({"requires": ("no_such_library",)}, CPU, "host", "no_such_library is not installed"),
        ({"available": lambda: "there is no driver"}, CPU, "host", "there is no driver"),
    ],
)
def test_one_that_cannot_serve_is_refused_with_the_reason_and_never_replaced(
    slab, fields, weights, landing_device, reason
):
    unfit = StagingInfo(**{**vars(slab), "install_hint": "pip install slab", **fields})
    text = refusal(unfit, weights=weights, landing_device=landing_device)
    assert f"Staging allocator 'slab' cannot be used: {reason}. To install: pip install slab" in text


@pytest.mark.parametrize("staged_on", ["host", "device"])
def test_memory_of_either_kind_fits_every_backend(slab, staged_on):
    either = StagingInfo(**{**vars(slab), "memory": "any"})
    assert why_unfit(either, "cuda", staged_on, "swift") is None
    assert eplb.discover().staging["torch"].memory == "any"


@pytest.mark.parametrize("error", [RuntimeError("no pages"), SystemExit("no pages"), OSError("no pages")])
def test_whatever_its_probe_raises_becomes_the_refusal(slab, error):
    Slab.said = error
    assert f"its probe() raised {type(error).__name__}: no pages" in refusal(slab)


def test_a_typed_error_of_its_probe_is_left_as_it_is(slab):
    Slab.said = TransferError("EPLB-T010", problem="no pages")
    with pytest.raises(EplbError) as caught:
        build(slab)
    assert caught.value is Slab.said


# --- what is given back, and when -------------------------------------------------------------------------------------


def landing(device: torch.device, allocator: TorchStaging) -> LandingMemory:
    layout = build_layout([[torch.zeros(2, 4096, dtype=torch.uint8, device=device)]])
    return LandingMemory(
        layout,
        staging_layers=2,
        landing_layout="rows",
        landing_device=CPU,
        num_peers=1,
        allocator=allocator,
        host_landing=None,
    )


def test_each_landing_slot_waits_for_its_own_event_and_the_others_for_the_rest(device):
    allocator, stream = TorchStaging(device), torch.Stream(device=device)
    memory = landing(device, allocator)
    over = torch.accelerator.current_stream().record_event()
    over.synchronize()
    with fake_device.held(stream):
        with stream:
            torch.zeros(8, device=device)  # so that the event has something to wait for
            pending = stream.record_event()
        memory.release({0: pending}, over)
        assert allocator.stats().nbytes_pool == 8192
        assert allocator.stats().nbytes_in_use == 0
    pending.synchronize()
    assert allocator.stats().nbytes_pool == 0


def test_a_block_stays_guarded_when_its_allocator_is_gone(device):
    allocator, stream = TorchStaging(device), torch.Stream(device=device)
    block = allocator.allocate(4096, CPU)
    data = weakref.ref(block.data)
    source = torch.full((4096,), 5, dtype=torch.uint8, device=device)
    torch.accelerator.synchronize()
    with fake_device.held(stream):
        with stream:
            block.data.copy_(source, non_blocking=True)
            event = stream.record_event()
        allocator.release(block, event)
        del block, allocator
        gc.collect()
        TorchStaging(device).stats()
        assert data() is not None
    event.synchronize()
    TorchStaging(device).stats()
    gc.collect()
    assert data() is None


def test_a_device_that_failed_does_not_keep_a_block_from_being_given_back(device):
    allocator, stream = TorchStaging(device), torch.Stream(device=device)
    first, second = allocator.allocate(8, CPU), allocator.allocate(8, CPU)
    with fake_device.held(stream):
        fake_device.fail(stream, "uncorrectable memory error")
        event = stream.record_event()
        allocator.release(first, event)
    with pytest.raises(RuntimeError, match="uncorrectable"):
        event.synchronize()
    allocator.release(second)  # asks the event, which raises
    with pytest.raises(RuntimeError, match="uncorrectable"):
        allocator.stats()


def test_landing_memory_that_cannot_be_had_whole_is_given_back():
    class Scarce(TorchStaging):
        def allocate(self, nbytes, device):
            if self.stats().nbytes_in_use:
                raise TransferError("EPLB-T010", problem="that was all")
            return super().allocate(nbytes, device)

    allocator = Scarce(CPU)
    with pytest.raises(TransferError, match="that was all"):
        landing(CPU, allocator)
    assert allocator.stats().nbytes_in_use == 0
