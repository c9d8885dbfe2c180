#!/bin/sh
# Steady, burst, mixed priorities, long among short; --rate is the endpoint's sustainable rate.
exec "$(dirname "$0")/submit.sh" scenario --rate 4 --duration 60 --ignore-eos "$@"
