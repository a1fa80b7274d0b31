"""Selection: the rules fire in their order, every candidate has its reason, and nothing is taken in silence."""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch

from eplb_core import API_VERSION, BackendInfo, Communicator, ControlPlane, EPLBConfig
from eplb_core.backend import PolicyInfo, StagingInfo
from eplb_core.discovery.catalog import Catalog, Failure, Origin
from eplb_core.discovery.select import resolve, select
from eplb_core.discovery.usable import why_not, why_unavailable
from eplb_core.errors import ConfigError, DiscoveryError

NCCL = "NCCL multi-stream conflicts"


def backend(name, **declared):
    declared = {"async_safe": True, "device_types": ("*",), "auto_priority": 50} | declared
    return BackendInfo(name, f"{name} for tests", API_VERSION, f"eplb_{name}.backend:Backend", **declared)


def installed(*infos, failures=(), conflicts=None, excluded=()):
    backends = {info.name: info for info in sorted(infos, key=lambda info: info.name)}
    return Catalog(backends=backends, failures=tuple(failures), conflicts=conflicts or {}, excluded=tuple(excluded))


def failed(name, cause=None):
    error = DiscoveryError("EPLB-D001", entry_point=name, distribution=f"eplb-{name}", version="1.0", reason="it broke")
    error.__cause__ = cause
    return Failure(name, f"eplb-{name}", "1.0", "it broke", error)


GLOO = backend("torch_gloo", elastic_safe=True)
NIXL = backend("nixl", auto_priority=100, device_types=("cpu", "cuda"))
TORCH_NCCL = backend(
    "torch_nccl", async_safe=False, async_reason=NCCL, device_types=("cuda",), auto_priority=None, batched=True
)
UNDECLARED = backend("undeclared", async_safe=None)
BROKEN = backend(
    "broken", auto_priority=100, available=lambda: "libbroken.so.2 does not load", install_hint="pip install b"
)
FIELD = installed(GLOO, NIXL, TORCH_NCCL)


def refusal(communicator, catalog, *, use_async=True, device_type="cuda", elastic=False, fallback=None):
    cfg = EPLBConfig(communicator=communicator, use_async=use_async, fallback=fallback)
    with pytest.raises((ConfigError, DiscoveryError)) as caught:
        select(cfg, device_type=device_type, elastic=elastic, catalog=catalog)
    return caught.value


# --- a backend that is named ------------------------------------------------------------------------------------------


def test_a_named_backend_that_passes_the_rules_is_taken():
    choice = select(EPLBConfig(communicator="torch_gloo"), catalog=FIELD)
    assert (choice.name, choice.info) == ("torch_gloo", GLOO)
    assert choice.reasons == {
        "torch_gloo": "named in the configuration",
        "nixl": "torch_gloo was named",
        "torch_nccl": f"incompatible with async EPLB: {NCCL}",
    }


def test_a_backend_without_auto_priority_is_taken_when_named():
    assert select(EPLBConfig(communicator="torch_nccl", use_async=False), catalog=FIELD).name == "torch_nccl"


def test_nccl_with_async_is_refused_word_for_word():
    """Case 18."""
    error = refusal("torch_nccl", FIELD)
    assert error.code == "EPLB-C004"
    assert str(error).startswith(
        "torch_nccl communicator is incompatible with async EPLB due to NCCL multi-stream conflicts. "
        "Use 'torch_gloo' or 'nixl' instead, or leave communicator unset for automatic selection."
    )


def test_a_backend_that_declares_nothing_about_async_is_refused_too():
    """Case 18."""
    error = refusal("undeclared", installed(UNDECLARED, GLOO))
    assert str(error).startswith(
        "undeclared communicator is incompatible with async EPLB due to undeclared async safety. "
        "Use 'torch_gloo' instead, or leave communicator unset for automatic selection."
    )


def test_the_alternatives_to_an_async_unsafe_backend_ascend_by_priority():
    catalog = installed(
        TORCH_NCCL, backend("b", auto_priority=9), backend("c", auto_priority=None), backend("a", auto_priority=9)
    )
    assert "Use 'c' or 'a' or 'b' instead" in str(refusal("torch_nccl", catalog))


def test_the_refusal_is_grammatical_without_any_alternative():
    text = str(refusal("torch_nccl", installed(TORCH_NCCL, UNDECLARED)))
    assert "Use an async-safe backend (none is installed) instead, or leave communicator unset" in text
    assert "With use_async=False torch_nccl may be used." in text


def test_an_async_unsafe_backend_without_a_reason_still_has_one():
    text = str(refusal("mute", installed(backend("mute", async_safe=False))))
    assert "due to its plugin's declaration async_safe=False." in text


def test_a_backend_for_another_device_is_refused():
    error = refusal("torch_nccl", FIELD, use_async=False, device_type="cpu")
    assert error.code == "EPLB-C005"
    assert str(error).startswith("torch_nccl communicator cannot be used: it moves weights on cuda, not on cpu.")


def test_the_index_of_a_device_is_no_part_of_its_type():
    assert select(EPLBConfig(communicator="nixl"), device_type="cuda:1", catalog=FIELD).name == "nixl"


def test_a_backend_that_cannot_grow_is_refused_where_ranks_join():
    error = refusal("nixl", FIELD, elastic=True)
    assert error.code == "EPLB-C005"
    assert "ranks cannot join after connect" in str(error)
    assert select(EPLBConfig(communicator="torch_gloo"), elastic=True, catalog=FIELD).name == "torch_gloo"


def test_an_unavailable_backend_is_refused_with_the_hint_of_its_plugin():
    error = refusal("broken", installed(BROKEN, GLOO))
    assert error.code == "EPLB-C005"
    assert str(error) == (
        "broken communicator cannot be used: libbroken.so.2 does not load. To install: pip install b [EPLB-C005]"
    )


def test_an_unknown_name_is_refused_with_the_one_that_was_meant():
    error = refusal("nixle", FIELD)
    assert error.code == "EPLB-C006"
    assert str(error).startswith("Unknown communicator 'nixle'. Installed: nixl, torch_gloo, torch_nccl.")
    assert "Did you mean 'nixl'?" in str(error)
    assert error.__cause__ is None


def test_a_name_whose_plugin_failed_is_refused_because_of_that_failure():
    failure = failed("late", cause=ImportError("no libfabric"))
    error = refusal("late", installed(GLOO, failures=[failure]))
    assert error.code == "EPLB-C006"
    assert error.__cause__ is failure.error
    assert "late of eplb-late 1.0: it broke" in str(error)


def test_a_name_in_conflict_is_refused_before_any_other_rule():
    claimants = (Origin("torch_nccl", "eplb-nccl", "1.0"), Origin("torch_nccl", "eplb-nccl-fork", "0.9"))
    error = refusal("torch_nccl", installed(GLOO, conflicts={("backend", "torch_nccl"): claimants}))
    assert error.code == "EPLB-D002"
    assert "eplb-nccl 1.0 and eplb-nccl-fork 0.9" in str(error)


def test_the_rules_fire_in_the_order_async_device_elastic_available():
    asked = []
    worst = backend("worst", async_safe=None, device_types=("npu",), available=lambda: asked.append(1) or "broken")
    need = {"use_async": True, "device_type": "cuda", "elastic": True}
    assert why_not(worst, **need) == "incompatible with async EPLB: undeclared async safety"
    assert why_not(worst, **need | {"use_async": False}) == "it moves weights on npu, not on cuda"
    need |= {"use_async": False, "device_type": "npu"}
    assert why_not(worst, **need) == "ranks cannot join after connect (not elastic_safe)"
    assert asked == []
    assert why_not(worst, **need | {"elastic": False}) == "broken"
    assert why_not(GLOO, use_async=True, device_type="anything", elastic=True) is None


def test_only_the_backend_that_is_named_is_asked_whether_it_is_available():
    def spy():
        pytest.fail("a backend that nobody named was called")

    catalog = installed(GLOO, backend("noisy", auto_priority=900, available=spy))
    assert select(EPLBConfig(communicator="torch_gloo"), catalog=catalog).reasons["noisy"] == "torch_gloo was named"


def test_what_is_no_configuration_is_refused():
    with pytest.raises(ConfigError, match="takes an EPLBConfig, got dict"):
        select({"communicator": "nixl"}, catalog=FIELD)


# --- the automatic choice ---------------------------------------------------------------------------------------------


def test_the_highest_priority_among_the_usable_is_chosen():
    choice = select(EPLBConfig(), catalog=FIELD)
    assert choice.name == "nixl"
    assert choice.reasons == {
        "nixl": "highest auto_priority (100) among the usable",
        "torch_gloo": "usable, but auto_priority is 50 and nixl comes first",
        "torch_nccl": f"incompatible with async EPLB: {NCCL}",
    }


def test_of_equal_priorities_the_first_name_is_chosen_on_every_rank():
    catalog = Catalog(backends={name: backend(name) for name in ("b", "a", "c")})
    assert select(EPLBConfig(), catalog=catalog).name == "a"


def test_a_backend_without_auto_priority_is_never_chosen_automatically():
    choice = select(EPLBConfig(use_async=False), catalog=installed(GLOO, TORCH_NCCL))
    assert choice.name == "torch_gloo"
    assert choice.reasons["torch_nccl"] == "taken only when named"


def test_every_candidate_has_a_reason_broken_conflicting_and_excluded_ones_too():
    claimants = (Origin("swift", "eplb-swift", "1.0"), Origin("swift", "eplb-swift-fork", "0.9"))
    catalog = installed(
        GLOO,
        BROKEN,
        failures=[failed("late")],
        conflicts={("backend", "swift"): claimants, ("staging", "pool"): claimants},
        excluded=[Origin("heron", "eplb-heron", "2.1")],
    )
    choice = select(EPLBConfig(), catalog=catalog)
    assert choice.reasons == {
        "broken": "libbroken.so.2 does not load",
        "heron": "left out by EPLB_PLUGINS (eplb-heron 2.1)",
        "late": "it broke (eplb-late 1.0)",
        "swift": "claimed by more than one distribution: eplb-swift 1.0 and eplb-swift-fork 0.9",
        "torch_gloo": "highest auto_priority (50) among the usable",
    }


def test_when_nothing_is_usable_every_reason_is_given():
    error = refusal(None, installed(UNDECLARED, BROKEN, TORCH_NCCL, failures=[failed("late")]))
    assert error.code == "EPLB-C007"
    assert str(error).startswith("No usable EPLB backend. ")
    for part in (
        "broken: libbroken.so.2 does not load",
        "late: it broke (eplb-late 1.0)",
        f"torch_nccl: incompatible with async EPLB: {NCCL}",
        "undeclared: incompatible with async EPLB: undeclared async safety",
    ):
        assert part in str(error)


def test_when_nothing_is_installed_that_is_said():
    assert "No backend plugin is installed." in str(refusal(None, Catalog()))


# --- availability -----------------------------------------------------------------------------------------------------


def raising(error):
    def available():
        raise error

    return available


@pytest.mark.parametrize(
    ("available", "reason"),
    [
        (lambda: "libx.so.1:\n  cannot open.", "libx.so.1: cannot open"),
        (raising(OSError("no device")), "its available() raised OSError: no device"),
        (raising(SystemExit(1)), "its available() raised SystemExit: 1"),
        (raising(GeneratorExit()), "its available() raised GeneratorExit"),
        (lambda: True, "its available() returned bool, neither None nor a reason"),
        (lambda: False, "its available() returned bool, neither None nor a reason"),
        (lambda: "", "its available() returned str, neither None nor a reason"),
        (lambda argument: None, "its available() raised TypeError"),
    ],
)
def test_whatever_available_does_becomes_a_reason(available, reason):
    odd = backend("odd", auto_priority=900, available=available)
    choice = select(EPLBConfig(), catalog=installed(GLOO, odd))
    assert choice.name == "torch_gloo"
    assert choice.reasons["odd"].startswith(reason)
    assert refusal("odd", installed(odd)).code == "EPLB-C005"


def test_an_interrupt_by_the_user_is_no_reason():
    odd = backend("odd", available=raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        select(EPLBConfig(), catalog=installed(odd))


def test_a_required_module_that_is_missing_makes_a_backend_unavailable():
    asked = []
    needy = backend("needy", requires=("json", "eplb_no_such_library"), available=lambda: asked.append(1))
    assert why_unavailable(needy) == "eplb_no_such_library is not installed"
    assert asked == []
    assert why_unavailable(backend("content", requires=("json", "email.mime.text"))) is None
    assert why_unavailable(backend("deep", requires=("email.mime.no_such_part",))) == (
        "email.mime.no_such_part is not installed"
    )
    assert why_unavailable(backend("deeper", requires=("json.decoder.x",))) == "json.decoder.x is not installed"


def test_looking_for_a_required_module_imports_nothing(tmp_path, monkeypatch):
    package = tmp_path / "eplb_heavy_library"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('the library was imported')\n")
    (package / "part.py").write_text("raise SystemExit('the library was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert why_unavailable(backend("light", requires=("eplb_heavy_library", "eplb_heavy_library.part"))) is None
    assert "eplb_heavy_library" not in sys.modules


def test_a_module_that_is_loaded_without_a_spec_counts_as_installed(monkeypatch):
    module = types.ModuleType("eplb_made_by_hand")
    module.__spec__ = None
    monkeypatch.setitem(sys.modules, "eplb_made_by_hand", module)
    assert why_unavailable(backend("made", requires=("eplb_made_by_hand",))) is None


def test_a_finder_that_raises_becomes_a_reason(monkeypatch):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "eplb_looked_for":
                raise RuntimeError("index is corrupt")

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert "index is corrupt" in why_unavailable(backend("unlucky", requires=("eplb_looked_for",)))


# --- fallback ---------------------------------------------------------------------------------------------------------


def test_a_fallback_is_taken_with_a_warning_when_the_named_backend_is_not_available(caplog):
    with caplog.at_level(logging.INFO):
        choice = select(EPLBConfig(communicator="broken", fallback="torch_gloo"), catalog=installed(GLOO, BROKEN))
    assert choice.name == "torch_gloo"
    assert choice.reasons == {"torch_gloo": "fallback for broken", "broken": "libbroken.so.2 does not load"}
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "EPLB communicator torch_gloo: fallback for broken. Not taken: broken: libbroken.so.2 does not load."
    )


def test_a_fallback_is_taken_when_nothing_can_be_chosen_automatically(caplog):
    with caplog.at_level(logging.INFO):
        choice = select(EPLBConfig(use_async=False, fallback="torch_nccl"), catalog=installed(BROKEN, TORCH_NCCL))
    assert choice.name == "torch_nccl"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_fallback_that_is_not_needed_is_not_taken(caplog):
    cfg = EPLBConfig(communicator="nixl", fallback="torch_gloo")
    with caplog.at_level(logging.INFO):
        assert select(cfg, catalog=FIELD).name == "nixl"
        assert select(EPLBConfig(fallback="torch_gloo"), catalog=FIELD).name == "nixl"
    assert {record.levelname for record in caplog.records} == {"INFO"}


@pytest.mark.parametrize(
    ("communicator", "need", "code"),
    [
        ("torch_nccl", {}, "EPLB-C004"),
        ("torch_nccl", {"use_async": False, "device_type": "cpu"}, "EPLB-C005"),
        ("nixl", {"elastic": True}, "EPLB-C005"),
        ("nixle", {}, "EPLB-C006"),
    ],
)
def test_a_fallback_does_not_hide_a_mistake_in_the_configuration(communicator, need, code):
    assert refusal(communicator, FIELD, fallback="torch_gloo", **need).code == code


@pytest.mark.parametrize(
    ("fallback", "text"),
    [
        ("torch_nccl", "torch_nccl communicator is incompatible with async EPLB"),
        ("unheard_of", "Unknown communicator 'unheard_of'"),
        ("broken_too", "broken_too communicator cannot be used: broken too"),
    ],
)
def test_a_fallback_passes_the_same_rules_or_both_reasons_are_given(fallback, text):
    catalog = installed(BROKEN, TORCH_NCCL, backend("broken_too", available=lambda: "broken too"))
    error = refusal("broken", catalog, fallback=fallback)
    assert error.code == "EPLB-C005"
    assert "libbroken.so.2 does not load" in str(error)
    assert f"The fallback cannot be used either: {text}" in str(error)
    assert error.__cause__ is not None


# --- what is said -----------------------------------------------------------------------------------------------------


def test_one_info_line_says_what_was_chosen_why_and_who_was_rejected_for_what(caplog):
    with caplog.at_level(logging.INFO):
        select(EPLBConfig(), catalog=installed(GLOO, TORCH_NCCL, BROKEN))
    [record] = caplog.records
    assert record.levelno == logging.INFO
    assert record.name.startswith("eplb_core")
    assert record.getMessage() == (
        "EPLB communicator torch_gloo: highest auto_priority (50) among the usable. Not taken: "
        f"broken: libbroken.so.2 does not load; torch_nccl: incompatible with async EPLB: {NCCL}."
    )


def test_a_lone_backend_is_logged_without_a_list_of_others(caplog):
    with caplog.at_level(logging.INFO):
        select(EPLBConfig(communicator="torch_gloo"), catalog=installed(GLOO))
    assert caplog.messages == [
        "EPLB communicator torch_gloo: named in the configuration. Not taken: there is no other."
    ]


# --- other names ------------------------------------------------------------------------------------------------------


def test_staging_allocators_and_policies_are_looked_up_by_the_same_rules():
    pool = StagingInfo("pool", "a pool", API_VERSION, "a:Pool")
    greedy = PolicyInfo("greedy", "a policy", API_VERSION, "a:greedy")
    claimants = (Origin("x", "eplb-x", "1.0"), Origin("y", "eplb-y", "2.0"))
    catalog = Catalog(
        staging={"pool": pool},
        policies={"greedy": greedy},
        conflicts={("staging", "slab"): claimants},
        failures=(failed("late"),),
    )
    assert resolve(catalog, "staging", "pool") is pool
    assert resolve(catalog, "policy", "greedy") is greedy
    with pytest.raises(DiscoveryError, match="Staging allocator 'slab' is claimed by more than one distribution"):
        resolve(catalog, "staging", "slab")
    with pytest.raises(ConfigError, match="Unknown staging allocator 'slip'") as caught:
        resolve(catalog, "staging", "slip")
    assert caught.value.code == "EPLB-C011"
    assert "late of eplb-late 1.0: it broke" in str(caught.value)
    with pytest.raises(ConfigError, match=r"Unknown policy 'greedi'.*Did you mean 'greedy'") as caught:
        resolve(catalog, "policy", "greedi")
    assert caught.value.code == "EPLB-C012"


@pytest.mark.parametrize(("fields", "code"), [({"policy": "greedy"}, "EPLB-C012"), ({"staging": "slip"}, "EPLB-C011")])
def test_a_communicator_refuses_a_policy_or_allocator_that_is_not_installed(fields, code):
    control = ControlPlane.from_store(torch.distributed.HashStore(), rank=0, world_size=1)
    with pytest.raises(ConfigError) as caught:
        Communicator(EPLBConfig(use_async=False, **fields), [[torch.zeros(2, 8)]], control)
    assert caught.value.code == code
