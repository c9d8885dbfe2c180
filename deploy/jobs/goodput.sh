#!/bin/sh
# The highest rate whose p99 meets MLPerf's limits; --slo sets others.
exec "$(dirname "$0")/submit.sh" goodput --rate 1 --duration 60 --slo llama3.1-8b --input-len 512 --output-len 128 --ignore-eos "$@"
