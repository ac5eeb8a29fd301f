"""A local Hub: an HTTP server with the part of the Hub API that the real client uses.

The server keeps everything in memory. It accepts large files with the LFS protocol, verifies their sha256 and serves
them from another path after a redirect. It has branches, commits, pull requests and private models, and injects faults.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKENS = {"alice-token": "alice", "bob-token": "bob", "your-token": "you"}
LARGE = (".safetensors", ".bin", ".npz")


@dataclass
class Model:
    """One repository: commits (file name -> content), branches and visibility."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(repr((branch, len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits[sha] = files
        self.refs[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        """Return the commit of a branch or of a hash; None if there is none."""
        return self.refs.get(revision) or (revision if revision in self.commits else None)


@dataclass(frozen=True)
class Fault:
    """A fault for the next requests whose method and path contain some words.

    Attributes:
        words: Words that must all occur in ``"METHOD /path"``.
        status: HTTP status of the response; ``None`` for none.
        cut: Number of bytes of the body after which the connection is closed; ``None`` to keep it open.
        flip: Whether one byte of the body is changed.
        times: Number of requests with the fault.
    """

    words: tuple[str, ...]
    status: int | None = None
    cut: int | None = None
    flip: bool = False
    times: int = 10**6


class Hub:
    """The server and its content; ``with Hub() as hub`` runs it in a thread."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.large: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.failed: Counter[int] = Counter()
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.cdn = f"http://localhost:{self._server.server_address[1]}"  # another host for the client

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def put(self, id: str, files: dict[str, bytes], branch: str = "main", private: bool = False) -> str:
        """Add a commit to a model, as a push does, and return its hash."""
        return self.models.setdefault(id, Model(private)).commit(branch, files)

    def files(self, id: str, revision: str = "main") -> dict[str, bytes]:
        model = self.models[id]
        return model.commits[model.resolve(revision) or ""]

    def fail(self, *words: str, **how: Any) -> None:
        """Add a fault; see :class:`Fault`."""
        self.faults.append(Fault(words, **how))

    def heal(self) -> None:
        self.faults.clear()
        self.failed.clear()

    def fault(self, request: str) -> Fault | None:
        """Return the fault of a request, and count it."""
        for index, fault in enumerate(self.faults):
            if all(word in request for word in fault.words) and self.failed[index] < fault.times:
                self.failed[index] += 1
                return fault
        return None


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        self.close_connection = True  # one connection per request, so that a cut connection is not used again
        path, _, self.query = self.path.partition("?")
        self.parts = [unquote(part) for part in path.strip("/").split("/")]
        self.hub.requests.append(f"{self.command} {unquote(path)}")
        fault = self.hub.fault(f"{self.command} {unquote(path)}")
        length = int(self.headers.get("Content-Length") or 0)
        if fault and fault.cut is not None and self.command in ("PUT", "POST"):
            self.rfile.read(min(fault.cut, length))
            self.connection.close()
            return
        chunked = self.headers.get("Transfer-Encoding", "") == "chunked"
        self.body = self._chunks() if chunked else self.rfile.read(length)
        self.broken = fault
        try:
            if fault and fault.status:
                raise _Refused(fault.status, message=f"injected fault with status {fault.status}")
            self._route()
        except _Refused as refusal:
            headers = {"X-Error-Message": refusal.message} if refusal.message else {}
            headers |= {"X-Error-Code": refusal.code} if refusal.code else {}
            self._send(refusal.status, json.dumps({"error": refusal.message or refusal.code}).encode(), headers)

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _chunks(self) -> bytes:
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    # -- responses -----------------------------------------------------------------------------------------------------
    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        broken = getattr(self, "broken", None)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        if broken and broken.flip:
            body = body[:-1] + bytes([body[-1] ^ 1])
        if broken and broken.cut is not None:
            body = body[: broken.cut]
        self.wfile.write(body)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    # -- users and models-----------------------------------------------------------------------------------------------
    def _user(self) -> str | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in TOKENS:
            raise _Refused(401, message="Invalid credentials in Authorization header")
        return TOKENS.get(token)

    def _model(self, id: str, write: bool = False) -> Model:
        user, model = self._user(), self.hub.models.get(id)
        if model is None or (model.private and user != id.split("/")[0]):
            raise _Refused(401 if user is None else 404, "RepoNotFound", "Repository not found")
        if write and user != id.split("/")[0]:
            raise _Refused(403, message="You don't have the rights to write here")
        return model

    def _commit_of(self, model: Model, revision: str) -> str:
        sha = model.resolve(revision)
        if sha is None:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    # -- routes --------------------------------------------------------------------------------------------------------
    def _route(self) -> None:
        match self.parts:
            case ["api", "whoami-v2"]:
                self._json({"name": self._user() or self._anonymous(), "type": "user", "orgs": []})
            case ["api", "validate-yaml"]:
                self._json({"errors": [], "warnings": []})
            case ["api", "repos", "create"]:
                self._create()
            case ["api", "models", owner, name, "preupload", revision]:
                self._modes(self._model(f"{owner}/{name}", write="create_pr" not in self.query), revision)
            case ["api", "models", owner, name, "commit", revision]:
                self._commit(f"{owner}/{name}", revision)
            case ["api", "models", owner, name, "branch", branch]:
                self._branch(self._model(f"{owner}/{name}", write=True), branch)
            case ["api", "models", owner, name, "tree", revision, *_]:
                self._tree(self._model(f"{owner}/{name}"), revision)
            case ["api", "models", owner, name, "revision", revision]:
                self._info(f"{owner}/{name}", revision)
            case ["api", "models", owner, name]:
                self._info(f"{owner}/{name}", "main")
            case [owner, git, "info", "lfs", "objects", "batch"]:
                self._batch(f"{owner}/{git.removesuffix('.git')}")
            case ["upload", oid]:
                if hashlib.sha256(self.body).hexdigest() != oid:
                    raise _Refused(400, message="the content has another sha256 than announced")
                self.hub.large[oid] = self.body
                self._send(200)
            case ["verify", _]:
                request = json.loads(self.body)
                if len(self.hub.large.get(request["oid"], b"")) != request["size"]:
                    raise _Refused(422, message="the object is not here")
                self._send(200)
            case [owner, name, "resolve", revision, *path]:
                self._resolve(f"{owner}/{name}", revision, "/".join(path))
            case ["cdn", oid]:
                if "Authorization" in self.headers:
                    raise _Refused(400, message="a token was sent to another host")
                self._send(200, self.hub.large[oid])
            case _:
                raise _Refused(404, message=f"no route {self.command} {urlsplit(self.path).path}")

    def _anonymous(self) -> str:
        raise _Refused(401, message="Invalid username or password.")

    def _create(self) -> None:
        request = json.loads(self.body)
        user = self._user()
        owner = request.get("organization") or user
        if user is None or owner != user:
            raise _Refused(401 if user is None else 403, message=f"You can't create a repo under {owner}")
        id = f"{owner}/{request['name']}"
        if id in self.hub.models:
            reply = {"error": "You already created this model repo", "url": f"{self.hub.url}/{id}"}
            self._send(409, json.dumps(reply).encode(), {"X-Error-Message": reply["error"]})
            return
        private = request.get("visibility") == "private" or bool(
            request.get("private")
        )  # older clients send the latter
        self.hub.put(id, {".gitattributes": b"*.safetensors filter=lfs\n"}, private=private)
        self._json({"url": f"{self.hub.url}/{id}", "name": id})

    def _modes(self, model: Model, revision: str) -> None:
        """Send which files are large, and the hashes of the files with their names."""
        there = model.commits[self._commit_of(model, revision)]
        modes = []
        for file in json.loads(self.body)["files"]:
            name = file["path"]
            large = name.endswith(LARGE)
            oid = None
            if name in there:
                oid = hashlib.sha256(there[name]).hexdigest() if large else _git_oid(there[name])
            mode = "lfs" if large else "regular"
            modes.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": modes})

    def _branch(self, model: Model, branch: str) -> None:
        if branch in model.refs:
            raise _Refused(409, message="Reference already exists")
        model.refs[branch] = model.refs["main"]
        self._json({})

    def _info(self, id: str, revision: str) -> None:
        model = self._model(id)
        sha = self._commit_of(model, revision)
        files = [{"rfilename": name} for name in model.commits[sha]]
        self._json({"_id": "0" * 24, "id": id, "modelId": id, "sha": sha, "private": model.private, "siblings": files})

    def _tree(self, model: Model, revision: str) -> None:
        self._json([_entry(name, content) for name, content in model.commits[self._commit_of(model, revision)].items()])

    def _batch(self, id: str) -> None:
        self._model(id)
        request = json.loads(self.body)
        objects = []
        for wanted in request["objects"]:
            actions = {
                "upload": {"href": f"{self.hub.url}/upload/{wanted['oid']}"},
                "verify": {"href": f"{self.hub.url}/verify/{wanted['oid']}"},
            }
            objects.append({**wanted} if wanted["oid"] in self.hub.large else {**wanted, "actions": actions})
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, id: str, revision: str) -> None:
        proposal = "create_pr=1" in self.query
        model = self._model(id, write=not proposal)
        sha = self._commit_of(model, revision)
        files = dict(model.commits[sha])
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            match item["key"]:
                case "header":
                    if value.get("parentCommit") not in (None, sha):
                        raise _Refused(412, message="A commit has happened since. Please refresh and try again.")
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.large[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        branch = f"refs/pr/{1 + sum(ref.startswith('refs/pr/') for ref in model.refs)}" if proposal else revision
        new = model.commit(branch, files)
        reply = {"commitUrl": f"{self.hub.url}/{id}/commit/{new}", "commitOid": new}
        if proposal:
            reply["pullRequestUrl"] = f"{self.hub.url}/{id}/discussions/{branch.rpartition('/')[2]}"
        self._json(reply)

    def _resolve(self, id: str, revision: str, name: str) -> None:
        model = self._model(id)
        sha = self._commit_of(model, revision)
        headers = {"X-Repo-Commit": sha}
        if name not in model.commits[sha]:
            self._send(404, b"", {**headers, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        content = model.commits[sha][name]
        if name.endswith(LARGE):
            oid = hashlib.sha256(content).hexdigest()
            self.hub.large[oid] = content
            linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
            self._send(302, b"", {**headers, **linked, "Location": f"{self.hub.cdn}/cdn/{oid}"})
        else:
            self._send(200, content, {**headers, "ETag": f'"{_git_oid(content)}"'})


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": _git_oid(content)}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


@contextmanager
def turned_to_a_hub(cache: Path) -> Iterator[Hub]:
    """Run a Hub, and make the client of this process use it as user ``alice``, with a separate cache."""
    import huggingface_hub
    import transformers.utils.hub
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    with Hub() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(cache),
            "HF_TOKEN_PATH": str(cache / "no-token"),
        }.items():
            patch.setattr(constants, name, value)
        patch.setattr(huggingface_hub.hf_api.api, "endpoint", server.url)
        patch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # created again, for this Hub
        patch.setattr(_http.time, "sleep", lambda _: None)  # between attempts
        patch.setenv("HF_TOKEN", "alice-token")
        yield server
