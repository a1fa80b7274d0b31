#!/usr/bin/env bash
# Tests of eplb-vllm on the real vLLM: makes .venv-vllm beside the Python given, whose packages (torch, NIXL, this
# repository's distributions) it sees, and runs pytest there on this folder.
#
#   plugins/eplb-vllm/tests/run.sh .venv/bin/python [pytest's arguments]
#
# vLLM comes without its dependencies, most of which are for GPUs and servers, plus what importing its EPLB code needs.
# setuptools and its two companions let pip read the metadata of vLLM's sdist, which holds its own tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
base=${1:?which Python}
shift
venv=.venv-vllm stamp=.venv-vllm/.installed
if [[ ! -e $stamp || ${BASH_SOURCE[0]} -nt $stamp ]]; then
    "$base" -m venv "$venv"
    "$base" - "$venv" <<'PY'
import sys, sysconfig
from pathlib import Path
site = Path(sys.argv[1]) / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
# As a site directory, so that installations with -e count as well.
(site / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
PY
    pip=("$venv/bin/python" -m pip install --disable-pip-version-check -q)
    "${pip[@]}" --no-deps vllm==0.33.0
    "${pip[@]}" aiohttp cachetools cbor2 cloudpickle einops fastapi llguidance msgspec openai openai-harmony \
        partial-json-parser pillow prometheus_client psutil py-cpuinfo pybase64 pydantic pyyaml pyzmq regex requests \
        transformers uvloop xgrammar setuptools setuptools-rust setuptools-scm
    touch "$stamp"
fi
VLLM_TARGET_DEVICE=cpu OMP_NUM_THREADS=1 exec "$venv/bin/python" -m pytest plugins/eplb-vllm/tests --durations 5 "$@"
