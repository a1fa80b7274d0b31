"""Declares every mutant; imports none."""

from __future__ import annotations

from dataclasses import replace

from eplb_good import hooks as good

from eplb_core import hookimpl
from eplb_mutants.table import MUTANTS, class_name


def declared(name, mutant):
    target = f"eplb_mutants.{mutant.module}:{class_name(name)}"
    return replace(good.eplb_register_backends(), name=name, target=target, **mutant.declares)


@hookimpl
def eplb_register_backends():
    return [
        declared(name, mutant)
        for name, mutant in MUTANTS.items()
        if name != "heavy_hooks"  # which has a module of its own
    ]
