"""The import hook: runs the patch right after vLLM's ``eplb_state`` was executed, and imports nothing before."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TARGET = "vllm.distributed.eplb.eplb_state"
"""It imports every other module that is patched."""


class _PatchingLoader(Loader):
    """Executes a module as its own loader does, then calls ``done``."""

    def __init__(self, loader: Any, done: Callable[[], None]) -> None:
        self._loader = loader
        self._done = done

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._done()

    def __getattr__(self, name: str) -> Any:  # get_source, get_data and so on, for inspect and linecache
        return getattr(self._loader, name)


class PatchAfterImport(MetaPathFinder):
    """Finds one module, as the finders after it do, and has a function called once it is executed.

    Parameters
    ----------
    target : str
        Name of the module.
    done : callable
        Called without arguments, while the import lock of the module is held.
    """

    def __init__(self, target: str, done: Callable[[], None]) -> None:
        self.target = target
        self._done = done

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the target; every other module is left to the other finders."""
        if fullname != self.target or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)  # once is enough, and the search below must not come back here
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, self._done)
        return spec


def install() -> None:
    """Patch now if vLLM's module is loaded, otherwise once it is; a second call changes nothing."""
    if TARGET in sys.modules:
        _patch()
    elif not any(isinstance(finder, PatchAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, PatchAfterImport(TARGET, _patch))


def _patch() -> None:
    from eplb_vllm.patches import patch

    patch()
