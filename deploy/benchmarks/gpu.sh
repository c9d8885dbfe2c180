#!/bin/sh
# All GPU measurements on a fresh machine: installs rayfleet with the extra `gpu`, and vLLM into a
# separate environment for comparison (WITHOUT_PEER=1 skips it), then runs each step of gpu.py. Run
# it in the project's folder; gpu.json and gpu.md are written to deploy/benchmarks/results/, or to the
# folder given. Takes one to two hours; a step that fails or hangs is reported, and the others still run.
set -u
cd "$(dirname "$0")/../.." || exit 1
results=${1:-deploy/benchmarks/results}
python=${PYTHON:-.venv/bin/python}
peer=${VLLM:-.venv-vllm/bin/vllm}

test -x "$python" || make install || exit 1
if [ -z "${WITHOUT_PEER:-}" ] && [ ! -x "$peer" ]; then
    "$python" -m venv .venv-vllm && .venv-vllm/bin/python -m pip install --quiet vllm ||
        echo "vLLM cannot be installed: measured without it" >&2
fi
"$python" -m pip install --quiet -c constraints.txt -e '.[gpu]' ||
    echo "flash-attn-4 cannot be installed: its step will fail" >&2
set -- --out "$results"
if [ -x "$peer" ]; then set -- "$@" --peer "$peer"; fi
exec "$python" -m deploy.benchmarks.gpu "$@"
