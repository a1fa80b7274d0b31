"""Keeps the asserts of test code alive under ``python -O``, in this process and in those it starts.

pytest rewrites the asserts of test modules and conftests, and only in its own process: a rank spawned by a test imports
the test module again, and ``-O`` would drop every assert in it. So the root conftest runs this file and puts its
folder on PYTHONPATH, where the interpreter of each child finds it at start.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class _WithAsserts(SourceFileLoader):
    def source_to_code(self, data, path, *, _optimization=-1):
        return compile(data, path, "exec", dont_inherit=True, optimize=0)

    def path_stats(self, path):
        # The import system keeps one cached bytecode per level of optimisation; ours belongs to none of them.
        raise OSError


class _TestCode(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader or not _is_test_code(Path(spec.origin)):
            return None
        spec.loader = _WithAsserts(fullname, spec.origin)
        return spec


def _is_test_code(path):
    return ROOT in path.parents and "tests" in path.relative_to(ROOT).parts[:-1]


if sys.flags.optimize:
    sys.meta_path.insert(sys.meta_path.index(PathFinder), _TestCode())  # behind pytest's own
