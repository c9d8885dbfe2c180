#!/bin/sh
# A constant rate for an hour: no failures, and the last third is as fast as the first.
exec "$(dirname "$0")/submit.sh" soak --rate 2 --duration 3600 --input-len 256 --output-len 64 --ignore-eos "$@"
