#!/bin/sh
# Latency against load, from 1 request per second up to saturation.
exec "$(dirname "$0")/submit.sh" sweep --rate 1 --duration 60 --input-len 512 --output-len 128 --ignore-eos "$@"
