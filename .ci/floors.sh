#!/usr/bin/env bash
# The lowest numpy, pluggy and pydantic that the core declares, in environments of their own: one fast pass with the
# torch of .venv, and, where the machine has Python 3.10, one without torch over what needs none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# With torch: tests that start no ranks, and two that rearrange over torch_gloo. Left out are those that time.
tests=(tests/test_{catalogue,checksums,config,discovery,hookspecs,layout,metadata,plan,schedule,selection}.py
    tests/balancing/test_placement.py
    plugins/eplb-gloo/tests/test_hooks.py)
rearranging="every_row_is_where_the_new_map_says and 2-torch_gloo and not cupy"  # CuPy asks for a later numpy
torchless=(tests/test_{config,discovery,hookspecs}.py tests/balancing/test_placement.py)

# The dependencies at their lowest, as pip reads them: numpy==1.26 pluggy==1.5 ...
floors=$(.venv/bin/python - numpy pluggy pydantic <<'PY'
import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

declared = {needed.name: needed for needed in map(Requirement, requires("eplb-core") or []) if needed.marker is None}
for name in sys.argv[1:]:
    (lowest,) = (one.version for one in declared[name].specifier if one.operator == ">=")
    print(f"{name}=={lowest}")
PY
)

# A stamp with what is in it: another floor, or another Python, makes it anew.
environment() {
    local folder=$1 python=$2
    shift 2
    local holds
    holds="$("$python" --version) $*"
    if [ "$(cat "$folder/.holds" 2>/dev/null)" != "$holds" ]; then
        rm -rf "$folder"
        "$python" -m venv "$folder"
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: "$@"
        echo "$holds" >"$folder/.holds"
    fi
}

if .venv/bin/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then
    environment .venv-floors .venv/bin/python $floors
    # What is not at its floor comes from .venv, behind it on the path.
    .venv-floors/bin/python - "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'PY'
import sys
import sysconfig
from pathlib import Path

Path(sysconfig.get_path("purelib"), "behind.pth").write_text(f"import site; site.addsitedir({sys.argv[1]!r})\n")
PY
    .venv-floors/bin/python -m pytest -q -p no:cacheprovider -k "not speed" "${tests[@]}"
    .venv-floors/bin/python -m pytest -q -p no:cacheprovider -k "$rearranging" tests/test_rearrange.py
else
    echo "floors: no wheels of $(echo $floors) are made for this Python; make .venv with one before 3.13"
fi

for candidate in python3.10 "$HOME"/.pyenv/versions/3.10.*/bin/python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' 2>/dev/null; then
        environment .venv-floors-3.10 "$candidate" $floors 'pytest>=8' pytest-timeout hypothesis
        .venv-floors-3.10/bin/python -m compileall -q eplb_core plugins/*/src examples
        PYTHONPATH=. .venv-floors-3.10/bin/python -m pytest -q -p no:cacheprovider "${torchless[@]}"
        exit
    fi
done
echo "floors: no Python 3.10 here"
