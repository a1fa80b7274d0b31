#!/usr/bin/env bash
# What needs a GPU, in one command, under six minutes on one GPU; elsewhere it says so and ends well.
#
#   tests/gpu/run.sh              run the checks with ${PYTHON:-python3}, whose torch must see a GPU
#   tests/gpu/run.sh carry 3.12   where there is a network: gather wheels for that Python into build/gpu-wheels
#
# A GPU machine without a network needs torch, numpy, pluggy, cuda-bindings with cuda-pathfinder and, for the rows of
# CuPy, CuPy in its Python. The rest is carried: `carry` builds this repository's own wheels and downloads nccl4py and
# pydantic with what it needs, and NIXL where CARRY_NIXL=1 is set (its wheel alone has 57 MiB). Copy the tree with
# build/gpu-wheels and run; the wheels are unpacked into build/gpu-site, which only these checks see.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
wheels=build/gpu-wheels site=build/gpu-site

if [[ ${1:-} == carry ]]; then
    version=${2:?which Python, such as 3.12}
    python=${PYTHON:-.venv/bin/python}
    mkdir -p "$wheels"
    rm -f "$wheels"/eplb_*.whl
    for dist in . plugins/*/; do
        (cd "$dist" && "$OLDPWD/$python" -m hatchling build -t wheel -d "$OLDPWD/$wheels")
    done
    for_version=(-q --only-binary=:all: --python-version "$version" --platform manylinux_2_28_x86_64
        --platform manylinux_2_24_x86_64 --platform manylinux2014_x86_64 -d "$wheels")
    "$python" -m pip download "${for_version[@]}" pydantic
    without=('nccl4py~=0.6.0') # its needs, and NIXL's, are there or too large
    [[ -z ${CARRY_NIXL:-} ]] || without+=(nixl==1.5.1 nixl-cu13==1.5.1)
    "$python" -m pip download "${for_version[@]}" --no-deps "${without[@]}"
    du -sh "$wheels"
    exit
fi

python=${PYTHON:-python3}
if ! reason=$("$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "torch " + torch.__version__ + " sees no GPU")' 2>&1); then
    echo "tests/gpu: skipped: ${reason##*$'\n'}"
    exit 0
fi
if [[ -d $wheels ]]; then
    rm -rf "$site"
    "$python" -m pip install -q --no-index --no-deps --target "$site" "$wheels"/*.whl
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
# Without arguments, which are check.py's, also what eplb-vllm promises about streams.
status=0
"$python" tests/gpu/check.py "$@" || status=$?
(($#)) || "$python" tests/gpu/check_vllm.py || status=$?
exit "$status"
