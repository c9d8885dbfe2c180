#!/bin/sh
# One rate for an hour: no failure, and a last third as quick as the first.
exec "$(dirname "$0")/submit.sh" soak --rate 2 --duration 3600 --input-len 256 --output-len 64 --ignore-eos "$@"
