"""Bytes that are not valid HTTP, or that a proxy and a server may parse differently."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

from hypothesis import strategies as st

from tests.campaigns.hostile.inputs import TEXT

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
"""A request hidden in the body of another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawCase:
    """Bytes that are sent over a separate connection."""

    kind: str
    pieces: tuple[bytes, ...]
    """Parts that are sent in sequence, with pauses."""
    deserves_answer: bool
    """Whether the bytes are a complete request in any interpretation; otherwise, the server may
    wait for more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Endpoint and model of valid requests."""

    model: str
    api_key: str

    @property
    def body(self) -> bytes:
        """Body of a valid request."""
        return json.dumps({"model": self.model, "prompt": "hi", "max_tokens": 1}).encode()

    def head(self, method: str = "POST", path: str = TEXT, *, keyed: bool = True) -> bytes:
        """Request line and common headers, without the terminating empty line."""
        key = f"Authorization: Bearer {self.api_key}\r\n" if keyed else ""
        return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{key}".encode()

    def sound(self, headers: bytes = b"") -> bytes:
        """A complete request with additional headers."""
        length = b"Content-Length: %d\r\n" % len(self.body)
        return self.head() + headers + length + b"\r\n" + self.body


_NO_BREAKS = st.binary(min_size=1, max_size=40).map(
    lambda text: text.replace(b"\r", b"").replace(b"\n", b"")
)


@st.composite
def _request_ids(draw: st.DrawFn, target: Target) -> RawCase:
    """Request ids, and other headers that Serve decodes, with any bytes."""
    name = draw(
        st.sampled_from(
            [b"X-Request-Id"] * 4
            + [b"x-request-ID", b"serve_multiplexed_model_id", b"traceparent", b"X-Session-Id"]
        )
    )
    values = draw(st.lists(_NO_BREAKS | st.just(b"x" * 5000), min_size=1, max_size=2))
    headers = b"".join(name + b": " + value + b"\r\n" for value in values)
    kind = draw(st.integers(0, 2))
    if kind == 0:
        whole = target.sound(headers)
    else:
        path = "/health" if kind == 1 else "/v1/models"
        whole = target.head("GET", path, keyed=draw(st.booleans())) + headers + b"\r\n"
    return RawCase(kind="request ids", pieces=(whole,), deserves_answer=True)


_ODD_HEADERS = [
    b"Expect: 100-continue\r\n",
    b"Expect: 200-ok\r\n",
    b"Connection: close\r\n",
    b"Connection: keep-alive, Content-Length, Authorization\r\n",
    b"Connection: Transfer-Encoding\r\n",
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
    b"Host: other\r\n",
    b"Host: \r\n",
    b"Host: a/../b:99999\r\n",
    b"X-Forwarded-For: \xff\r\n",
    b"X-Forwarded-Proto: javascript\r\n",
    b'Forwarded: for="[::1"\r\n',
    b"Content-Encoding: gzip\r\n",
    b"Content-Encoding: br, deflate\r\n",
    b"Content-Type: \xff\r\n",
    b"Accept: */*;q=nan\r\n",
    b"Accept-Encoding: gzip;q=-1\r\n",
    b"Range: bytes=0-0,-1\r\n",
    b"Authorization: Basic \xff\r\n",
    b"Authorization: Bearer \r\n",
    b"Cookie: " + b"a=b; " * 2000 + b"\r\n",
    b"traceparent: 00-" + b"0" * 32 + b"-" + b"f" * 16 + b"-zz\r\n",
    b"Max-Forwards: -1\r\n",
    b"Content-Length : 3\r\n",
    b" folded: 1\r\n",
    b"X: a\r\n b\r\n",
    b"X: a\rb\r\n",
    b"X: a\nb: c\r\n",
    b"X: a\0b\r\n",
    b": nameless\r\n",
    b"no colon\r\n",
    b"N\xc3\xa4me: 1\r\n",
    b"X\x80: 1\r\n",
    b"(x): 1\r\n",
]


@st.composite
def _headers(draw: st.DrawFn, target: Target) -> RawCase:
    """Odd, many, long or missing headers."""
    headers = b"".join(draw(st.lists(st.sampled_from(_ODD_HEADERS), max_size=3)))
    if draw(st.integers(0, 9)) == 0:
        count, size = draw(st.sampled_from([(99, 10), (500, 10), (1, 30_000), (1, 200_000)]))
        headers += b"".join(b"X-%d: %s\r\n" % (i, b"v" * size) for i in range(count))
    if b"Upgrade" not in headers and draw(st.booleans()):
        headers += draw(_NO_BREAKS) + b": " + draw(_NO_BREAKS) + b"\r\n"
    whole = target.sound(headers)
    # The server may wait for more after headers that change the framing.
    is_whole = not any(word in headers.lower() for word in (b"content-length", b"transfer"))
    return RawCase(kind="headers", pieces=(whole,), deserves_answer=is_whole)


_METHODS = [b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"TRACE", b"PATCH", b"get", b"G\xffT"]
_METHODS += [b"", b"GET GET", b"X" * 5000, b"PROPFIND", b"\0", b"GET\t"]
_TARGETS = [
    b"/health",
    b"/v1/models",
    b"/v1/models/%00",
    b"*",
    b"/../../etc/passwd",
    b"//",
    b"/%ff",
]
_TARGETS += [
    b"http://other/health",
    b"http://[::1/health",
    b"health",
    b"/\xff",
    b"/?" + b"a=b&" * 3000,
]
_TARGETS += [b"/v1/models/" + b"x" * 20_000, b"/-/routes", b"/-/healthz", b"/metrics", b"/ready#x"]
_TARGETS += [b"/v1/models/..%2f..%2fadmin/admission", b"/admin/admission", b"/%%%", b"/a b", b""]
_VERSIONS = [b"HTTP/1.1"] * 6 + [
    b"HTTP/1.0",
    b"HTTP/0.9",
    b"HTTP/2.0",
    b"HTTP/9.9",
    b"http/1.1",
    b"",
]


@st.composite
def _first_lines(draw: st.DrawFn, target: Target) -> RawCase:
    """Methods, paths and versions."""
    line = [draw(st.sampled_from(part)) for part in (_METHODS, _TARGETS, _VERSIONS)]
    _, _, rest = target.head(keyed=draw(st.booleans())).partition(b"\r\n")
    end = draw(st.sampled_from([b"\r\n"] * 5 + [b"\n", b"\r\r\n"]))
    whole = b" ".join(line) + end + rest + b"\r\n"
    return RawCase(kind="first lines", pieces=(whole,), deserves_answer=end == b"\r\n")


_LENGTHS = [b"0", b"5, 5", b"5, 6", b"-1", b"0x5", b"5 5", b"9" * 20, b" 5", b"5\t", b"", b"1e1"]
_LENGTHS += [b"\xb2", b"5;", b"4294967301", b"+5"]
_CODINGS = [
    b"chunked",
    b"Chunked",
    b"xchunked",
    b"chunked, identity",
    b"identity, chunked",
    b"gzip",
]
_CODINGS += [b"\x0bchunked", b"chunked\t", b"chunked, chunked", b"'chunked'", b"", b"chunked;q=1"]
_SIZES = [
    b"F" * 17,
    b"5;ext=\xff",
    b"0x5",
    b"5 ",
    b"-5",
    b"",
    b"5\n",
    b"00000005",
    b"g",
    b"7fffffff",
]


@st.composite
def _framing(draw: st.DrawFn, target: Target) -> RawCase:
    """Contradictory lengths and encodings, invalid chunks, requests in bodies."""
    body = target.body
    lengths = draw(st.lists(st.sampled_from([*_LENGTHS, b"%d" % len(body)]), max_size=2))
    codings = draw(st.lists(st.sampled_from(_CODINGS), max_size=2))
    headers = [b"Content-Length: %s\r\n" % length for length in lengths]
    headers += [b"Transfer-Encoding: %s\r\n" % coding for coding in codings]
    chunk = b"%x\r\n%s\r\n" % (len(body), body)
    sent = draw(
        st.sampled_from(
            [
                body,
                chunk + b"0\r\n\r\n",
                chunk + b"0\r\n\r\n" + SMUGGLED,
                b"0\r\n\r\n" + SMUGGLED,
                chunk + b"0\r\nX-Trailer: \xff\r\nContent-Length: 3\r\n\r\n",
                chunk.replace(b"\r\n", b"\n") + b"0\n\n",
                chunk + draw(st.sampled_from(_SIZES)) + b"\r\nhello\r\n0\r\n\r\n",
                body + SMUGGLED,
                SMUGGLED,
                b"",
            ]
        )
    )
    headers = draw(st.permutations(headers))
    whole = target.head(keyed=draw(st.booleans())) + b"".join(headers) + b"\r\n" + sent
    return RawCase(kind="framing", pieces=(whole,), deserves_answer=False)


@st.composite
def _chunks(draw: st.DrawFn, target: Target) -> RawCase:
    """Valid chunked bodies with chunks of any size, extensions and trailers."""
    body, sent = target.body, b""
    while body:
        size = draw(st.sampled_from([1, 2, 7, 100]))
        part, body = body[:size], body[size:]
        extension = draw(st.sampled_from([b"", b"", b";a=b", b';a="\\""']))
        sent += b"%x%s\r\n%s\r\n" % (len(part), extension, part)
    trailer = draw(st.sampled_from([b"", b"X-Trailer: 1\r\n", b"X: 1\r\n" * 50]))
    whole = (
        target.head() + b"Transfer-Encoding: chunked\r\n\r\n" + sent + b"0\r\n" + trailer + b"\r\n"
    )
    return RawCase(kind="chunks", pieces=_cut(draw, whole), deserves_answer=True)


@st.composite
def _pieces(draw: st.DrawFn, target: Target) -> RawCase:
    """Valid requests that are split, pipelined or truncated."""
    whole = target.sound() * draw(st.sampled_from([1, 1, 3]))
    is_cut = draw(st.booleans())
    if is_cut:
        whole = whole[: draw(st.integers(0, len(target.sound()) - 1))]
    return RawCase(kind="pieces", pieces=_cut(draw, whole), deserves_answer=not is_cut)


@st.composite
def _noise(draw: st.DrawFn, target: Target) -> RawCase:
    """Other protocols, and random bytes."""
    hello = bytes.fromhex("160301020001000001fc0303") + bytes(200)
    greetings = [
        hello,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
        b"CONNECT x:1 HTTP/1.1\r\n\r\n",
    ]
    greetings += [b"PROXY TCP4 1.1.1.1 1.1.1.1 1 1\r\n", b"\r\n" * 500, b"\0" * 100, b"EHLO x\r\n"]
    noise = draw(st.sampled_from(greetings) | st.binary(min_size=1, max_size=300))
    return RawCase(kind="noise", pieces=(noise,), deserves_answer=False)


def _cut(draw: st.DrawFn, whole: bytes) -> tuple[bytes, ...]:
    places = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=3)))
    edges = [0, *places, len(whole)]
    return tuple(whole[a:b] for a, b in itertools.pairwise(edges) if a < b)


def raws(target: Target) -> st.SearchStrategy[RawCase]:
    """All kinds of raw cases."""
    return st.one_of(
        _request_ids(target),
        _headers(target),
        _first_lines(target),
        _framing(target),
        _chunks(target),
        _pieces(target),
        _noise(target),
    )
