"""A simulated Kubernetes API server in this process, which only stores objects.

Enough for Helm 3 and Helm 4 to install, upgrade, roll back and uninstall (they need
`--disable-openapi-validation`): discovery, get, list by labels, create, update, delete, merge
patch, server-side apply (taken as a replacement), and the protobuf Secrets in which Helm keeps its
releases.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import urllib.parse
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

RESOURCES = {
    # group/version: plural names and kinds
    "v1": {
        "configmaps": "ConfigMap",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "pods": "Pod",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
    },
    "gateway.networking.k8s.io/v1": {"httproutes": "HTTPRoute"},
    "monitoring.coreos.com/v1": {
        "podmonitors": "PodMonitor",
        "prometheusrules": "PrometheusRule",
        "servicemonitors": "ServiceMonitor",
    },
    "networking.k8s.io/v1": {"ingresses": "Ingress", "networkpolicies": "NetworkPolicy"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "ray.io/v1": {"rayjobs": "RayJob", "rayservices": "RayService"},
}
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
PATH = re.compile(
    r"^/apis?/(?P<version>v1|[^/]+/[^/]+)"
    r"(?:/namespaces/(?P<namespace>[^/]+))?(?:/(?P<plural>[^/]+))?(?:/(?P<name>[^/]+))?$"
)

Object = dict[str, Any]
Key = tuple[str, str, str]
"""Plural, namespace, name."""


class FakeCluster:
    """All objects, keyed by `Key`."""

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.lock = threading.Lock()

    def kinds(self) -> dict[tuple[str, str], Object]:
        """Objects, keyed by kind and name, without Helm's own records."""
        return {
            (o["kind"], name): o
            for (_, _, name), o in self.objects.items()
            if not name.startswith("sh.helm.release")
        }


@contextmanager
def serve_api() -> Iterator[tuple[FakeCluster, str]]:
    """Context with the cluster and the URL of its API on the loopback interface."""
    cluster = FakeCluster()
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield cluster, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: FakeCluster

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urllib.parse.urlparse(self.path)
        match = PATH.match(url.path)
        discovered = _discovery(url.path)
        if discovered is not None:
            self._reply(200, discovered)
        elif match is None or match["plural"] not in RESOURCES.get(match["version"], {}):
            self._fail(404, "NotFound", url.path)
        else:
            with self.cluster.lock:
                self._answer_about(match, url.query, body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

    def _answer_about(self, match: re.Match[str], query: str, body: bytes) -> None:
        plural, namespace, name = match["plural"], match["namespace"] or "", match["name"]
        base = {"apiVersion": match["version"], "kind": RESOURCES[match["version"]][plural]}
        objects = self.cluster.objects
        if self.command == "GET" and not name:
            return self._reply(200, _listing(objects, base, plural, namespace, query))
        if self.command in ("GET", "DELETE"):
            if (found := objects.get((plural, namespace, name))) is None:
                return self._fail(404, "NotFound", f'{plural} "{name}" not found')
            if self.command == "DELETE":
                del objects[plural, namespace, name]
            return self._reply(200, found)
        return self._write(base, (plural, namespace, name or ""), body)

    def _write(self, base: Object, key: Key, body: bytes) -> None:
        objects = self.cluster.objects
        given = _decode_secret(body) if body[:4] == b"k8s\0" else yaml.safe_load(body)
        if self.command == "POST":
            key = (*key[:2], given["metadata"]["name"])
            if key in objects:
                return self._fail(409, "AlreadyExists", f'{key[0]} "{key[2]}" already exists')
        elif self.command == "PATCH" and "apply" not in self.headers.get("Content-Type", ""):
            if key not in objects:
                return self._fail(404, "NotFound", f'{key[0]} "{key[2]}" not found')
            given = _merge(objects[key], given)
        made = {**base, **given}
        old = objects.get(key, {"metadata": {"uid": str(uuid.uuid4())}})
        made["metadata"] |= {
            "namespace": key[1],
            "uid": old["metadata"]["uid"],
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "resourceVersion": str(uuid.uuid4().int % 10**9),
        }
        objects[key] = made
        return self._reply(201 if self.command == "POST" else 200, made)

    def _reply(self, status: int, body: Object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _fail(self, status: int, reason: str, message: str) -> None:
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason}
        self._reply(status, {**body, "code": status, "message": message})


def _discovery(path: str) -> Object | None:
    """Discovery document at `path`."""
    if path == "/version":
        return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [v for v in RESOURCES if "/" in v]
        named = [{"groupVersion": v, "version": v.split("/")[1]} for v in versions]
        groups = [
            {"name": v.split("/")[0], "versions": [n], "preferredVersion": n}
            for v, n in zip(versions, named, strict=True)
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    version = re.sub("^/apis?/", "", path)
    if version not in RESOURCES:
        return None
    resources = [
        {
            "name": plural,
            "singularName": kind.lower(),
            "namespaced": True,
            "kind": kind,
            "verbs": VERBS,
        }
        for plural, kind in RESOURCES[version].items()
    ]
    head = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version}
    return {**head, "resources": resources}


def _listing(
    objects: dict[Key, Object], base: Object, plural: str, namespace: str, query: str
) -> Object:
    selector = (urllib.parse.parse_qs(query).get("labelSelector") or [""])[0]
    wanted = dict(term.split("=", 1) for term in selector.split(",") if "=" in term)
    items = [
        o
        for (kept, within, _), o in objects.items()
        if kept == plural
        and namespace in ("", within)
        and wanted.items() <= o["metadata"].get("labels", {}).items()
    ]
    return {**base, "kind": base["kind"] + "List", "metadata": {}, "items": items}


def _merge(target: Object, patch: Object) -> Object:
    """Applies a JSON merge patch (RFC 7386) to `target`; returns the result."""
    merged = dict(target)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _decode_secret(data: bytes) -> Object:
    """The protobuf Secret in which Helm stores a release."""
    raw = dict(_protobuf_fields(data[4:]))[2]
    metadata: Object = {"labels": {}}
    secret: Object = {"metadata": metadata, "data": {}}
    for number, value in _protobuf_fields(raw):
        if number == 1:  # ObjectMeta: its name is field 1, its labels are field 11
            for inner, text in _protobuf_fields(value):
                if inner == 1:
                    metadata["name"] = text.decode()
                elif inner == 11:
                    label = dict(_protobuf_fields(text))
                    metadata["labels"][label[1].decode()] = label[2].decode()
        elif number == 2:
            entry = dict(_protobuf_fields(value))
            secret["data"][entry[1].decode()] = base64.b64encode(entry[2]).decode()
        elif number == 3:
            secret["type"] = value.decode()
    return secret


def _protobuf_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers and raw values of one message."""
    position = 0

    def varint() -> int:
        nonlocal position
        result = shift = 0
        while True:
            byte = data[position]
            position += 1
            result |= (byte & 127) << shift
            if byte < 128:
                return result
            shift += 7

    while position < len(data):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        size = varint() if wire == 2 else 8 if wire == 1 else 4
        yield number, data[position : position + size]
        position += size
