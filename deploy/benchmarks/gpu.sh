#!/bin/sh
# What a GPU must show: its tests, every kernel against the measured peaks, the idle gaps between
# steps, decode on random weights against the memory's bandwidth, and fifo against pack. Run in the
# project's folder; results go to deploy/benchmarks/results/, or to the folder given. Takes about ten
# minutes.
set -u
results=${1:-deploy/benchmarks/results}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$results"
status=0

$python -m pytest -m gpu -q || status=1
for bench in kernels roofline overlap admission; do
    $python -m cluster.bench $bench --device cuda --json >"$results/gpu-$bench.json" || status=1
done
$python - "$results" <<'END' || status=1
import json, pathlib, sys

failed = False
for path in sorted(pathlib.Path(sys.argv[1]).glob("gpu-*.json")):
    for check in json.loads(path.read_text() or "{}").get("checks", []):
        failed |= not check["holds"]
        mark = "ok  " if check["holds"] else "FAIL"
        print(f"{mark} {path.stem} {check['name']}: {check['value']:.4g} {check['unit']} ({check['goal']})")
sys.exit(failed)
END
exit $status
