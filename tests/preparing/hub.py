"""A mock Hugging Face hub on loopback, as fast or slow and as unreliable as one likes.

    with Hub(folder) as hub: ...   # folder/ORG/NAME/FILE is hf://datasets/ORG/NAME/FILE

Speaks the addresses that huggingface_hub asks for datasets: information, tree and paths of a
repository, and the files themselves in ranges, with ETags. Give its clients hub.environment. The
files are also plain ones of the web, at hub.address/datasets/ORG/NAME/resolve/main/FILE.
"""

import hashlib
import json
import random
import re
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

INFORMATION = re.compile(r"/api/datasets/([^/]+/[^/]+)(?:/revision/[^/]+)?$")
TREE = re.compile(r"/api/datasets/([^/]+/[^/]+)/tree/[^/]+(?:/(.+))?$")
PATHS = re.compile(r"/api/datasets/([^/]+/[^/]+)/paths-info/[^/]+$")
FILE = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.+)$")
BLOCK = 1 << 16  # bytes written at a time


@dataclass
class Faults:
    """The faults of a server, each with a probability a request.

    cut: the connection breaks in the middle of a reply. stall: nothing comes for stall_seconds.
    too_many, broken: replies 429 and 500. seed: of the dice.
    """

    cut: float = 0
    stall: float = 0
    too_many: float = 0
    broken: float = 0
    stall_seconds: float = 5
    seed: int = 0
    dice: random.Random = field(init=False)

    def __post_init__(self):
        self.dice = random.Random(self.seed)

    def draw(self) -> str:
        """The name of what goes wrong with a request; "" for nothing."""
        value = self.dice.random()
        for name in ("cut", "stall", "too_many", "broken"):
            value -= getattr(self, name)
            if value < 0:
                return name
        return ""


class Hub(ThreadingHTTPServer):
    """The server. It runs in a thread from `with` to the end of it.

    bytes_a_second: of all replies together. token: any other is refused. gated: the repositories
    whose terms nobody has accepted. ranges: whether files are given in parts. files_at: the address
    of another hub, to which requests for files are redirected. asked: how often each path was.
    tokens: those that came with requests.
    """

    daemon_threads = True

    def __init__(self, folder: Path, bytes_a_second: float = 0, faults: Faults | None = None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.bytes_a_second = bytes_a_second
        self.faults = faults or Faults()
        self.token = ""
        self.gated = set()
        self.ranges = True
        self.files_at = ""
        self.tokens = set()
        self.asked = Counter()
        self.pace = threading.Lock()
        self.free_at = 0.0
        self.tags = {}

    @property
    def address(self) -> str:
        """The URL of the server."""
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make huggingface_hub talk to it, without the user's own token."""
        return {
            "HF_ENDPOINT": self.address,
            "HF_HUB_DOWNLOAD_TIMEOUT": "1",
            "HF_HUB_ETAG_TIMEOUT": "1",
            "HF_HOME": str(self.folder / ".hf_home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address) -> None:
        """Clients may go away at any time."""

    def tag(self, path: Path) -> str:
        """The checksum of a file, read once for each state of it."""
        stat = path.stat()
        key = (path, stat.st_size, stat.st_mtime_ns)
        if key not in self.tags:
            self.tags[key] = hashlib.sha256(path.read_bytes()).hexdigest()
        return self.tags[key]

    def wait_for_turn(self, size: int) -> None:
        """Wait until `size` more bytes may leave."""
        if not self.bytes_a_second:
            return
        with self.pace:
            self.free_at = max(self.free_at, time.monotonic()) + size / self.bytes_a_second
            wait = self.free_at - time.monotonic()
        time.sleep(max(0, wait))


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *words) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        self._answer(parse_qs(self.rfile.read(size).decode()))

    def _answer(self, form=None):
        """Find what is asked for, and let go wrong what has to."""
        path = urlsplit(self.path).path
        hub = self.server
        hub.asked[unquote(path)] += 1
        self.fault = hub.faults.draw()
        if self.fault == "too_many":
            return self._error(429, "")
        if self.fault == "broken":
            return self._error(500, "")
        if self.fault == "stall":
            time.sleep(hub.faults.stall_seconds)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        hub.tokens.add(given)
        if given and given != hub.token:
            return self._error(401, "", "Invalid credentials in Authorization header")
        for pattern, reply in (
            (INFORMATION, self._information),
            (TREE, self._tree),
            (PATHS, self._paths),
            (FILE, self._file),
        ):
            if found := pattern.match(path):
                repository = hub.folder / unquote(found[1])
                if not repository.is_dir():
                    return self._error(404, "RepoNotFound")
                if unquote(found[1]) in hub.gated and reply != self._information:
                    return self._error(403, "GatedRepo")
                return reply(repository, found, form)
        return self._error(404, "EntryNotFound")

    def _information(self, repository, found, form):
        """The reply about a repository."""
        self._json({"id": found[1], "sha": "0" * 40, "tags": [], "siblings": [], "gated": False})

    def _tree(self, repository, found, form):
        """The reply about the files in a folder of a repository, or also in those below it."""
        folder = repository / unquote(found[2] or "")
        if not folder.is_dir():
            return self._error(404, "EntryNotFound")
        recursive = "True" in self.path or "recursive=true" in self.path
        paths = sorted(folder.rglob("*") if recursive else folder.glob("*"))
        return self._json([self._entry(repository, path) for path in paths])

    def _paths(self, repository, found, form):
        """Some paths of a repository."""
        paths = [repository / name for name in form.get("paths", [])]
        self._json([self._entry(repository, path) for path in paths if path.exists()])

    def _entry(self, repository, path):
        """A file or folder as the hub describes it."""
        name = path.relative_to(repository).as_posix()
        if path.is_dir():
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        size = path.stat().st_size
        tag = self.server.tag(path)
        lfs = {"oid": tag, "size": size, "pointerSize": 134}
        return {"type": "file", "oid": tag[:40], "size": size, "path": name, "lfs": lfs}

    def _file(self, repository, found, form):
        """A file, or a range of it."""
        if self.server.files_at:
            return self._redirect(self.server.files_at + self.path)
        path = repository / unquote(found[2])
        if not path.is_file():
            return self._error(404, "EntryNotFound")
        size = path.stat().st_size
        start, end = 0, size
        wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        partial = bool(wanted) and self.server.ranges
        if partial:
            start = int(wanted[1])
            end = min(size, int(wanted[2]) + 1) if wanted[2] else size
        self.send_response(206 if partial else 200)
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", f'"{self.server.tag(path)}"')
        self.send_header("Accept-Ranges", "bytes" if self.server.ranges else "none")
        self.end_headers()
        if self.command != "HEAD":
            with open(path, "rb") as file:
                file.seek(start)
                self._send(file, end - start)

    def _send(self, file, size):
        """The next `size` bytes of a file, or fewer."""
        reach = size
        if self.fault == "cut":
            reach = self.server.faults.dice.randrange(size + 1)
        while reach > 0 and (block := file.read(min(BLOCK, reach))):
            self.server.wait_for_turn(len(block))
            self.wfile.write(block)
            reach -= len(block)
        if self.fault == "cut":
            self._break()

    def _break(self):
        """Let the connection end as when somebody pulls a plug."""
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def _redirect(self, address):
        """A reply that names another place."""
        self.send_response(302)
        self.send_header("Location", address)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value):
        """A reply of JSON."""
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.fault == "cut":
            self.wfile.write(data[: len(data) // 2])
            self._break()
        elif self.command != "HEAD":
            self.wfile.write(data)

    def _error(self, status, code, message=""):
        """A reply that says what is wrong, in the headers in which the hub says it."""
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if message:
            self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()
