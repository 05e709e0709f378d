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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

INFORMATION = re.compile(r"/api/datasets/([^/]+/[^/]+)(?:/revision/[^/]+)?$")
TREE = re.compile(r"/api/datasets/([^/]+/[^/]+)/tree/[^/]+(?:/(.+))?$")
PATHS = re.compile(r"/api/datasets/([^/]+/[^/]+)/paths-info/[^/]+$")
FILE = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.+)$")
BLOCK = 1 << 16  # bytes written at a time
STALL_SECONDS = 3
FAILURES = {"too_many": 429, "broken": 500}  # the status of each


class Hub(ThreadingHTTPServer):
    """The server. It runs in a thread from `with` to the end of it.

    bytes_a_second: of all replies together; 0 for no limit. faults: {what goes wrong: how probable
    that is at a request}; cut: the connection breaks in the middle of a reply; stall: nothing comes
    for STALL_SECONDS; too_many, broken: replies 429 and 500. token: any other is refused. gated:
    the repositories whose terms nobody has accepted. ranges: whether files are given in parts.
    files_at: the address of another hub, to which requests for files are redirected. tokens: those
    that came with requests.
    """

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.bytes_a_second = 0
        self.faults = {}
        self.dice = random.Random(1)
        self.token = ""
        self.gated = set()
        self.ranges = True
        self.files_at = ""
        self.tokens = set()
        self.pace = threading.Lock()
        self.free_at = 0.0

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

    def wait_for_turn(self, size: int) -> None:
        """Wait until `size` more bytes may leave."""
        if not self.bytes_a_second:
            return
        with self.pace:
            self.free_at = max(self.free_at, time.monotonic()) + size / self.bytes_a_second
            wait = self.free_at - time.monotonic()
        time.sleep(max(0, wait))


def tag_of(path: Path) -> str:
    """What stands for the content of a file, in the form of a checksum."""
    stat = path.stat()
    return hashlib.sha256(f"{path} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *words) -> None:
        pass

    def do_GET(self) -> None:
        """Find what is asked for, and let go wrong what has to."""
        self.form = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        path = urlsplit(self.path).path
        hub = self.server
        chances = hub.faults | {"": 1 - sum(hub.faults.values())}
        (self.fault,) = hub.dice.choices(list(chances), list(chances.values()))
        if self.fault in FAILURES:
            return self._error(FAILURES[self.fault])
        if self.fault == "stall":
            time.sleep(STALL_SECONDS)
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
                return reply(repository, found)
        return self._error(404, "EntryNotFound")

    do_HEAD = do_POST = do_GET

    def _information(self, repository, found):
        """The reply about a repository."""
        self._json({"id": found[1], "sha": "0" * 40, "tags": [], "siblings": [], "gated": False})

    def _tree(self, repository, found):
        """The reply about the files in a folder of a repository, or also in those below it."""
        folder = repository / unquote(found[2] or "")
        if not folder.is_dir():
            return self._error(404, "EntryNotFound")
        recursive = "True" in self.path or "recursive=true" in self.path
        paths = sorted(folder.rglob("*") if recursive else folder.glob("*"))
        return self._json([self._entry(repository, path) for path in paths])

    def _paths(self, repository, found):
        """Some paths of a repository."""
        paths = [repository / name for name in parse_qs(self.form).get("paths", [])]
        self._json([self._entry(repository, path) for path in paths if path.exists()])

    def _entry(self, repository, path):
        """A file or folder as the hub describes it."""
        name = path.relative_to(repository).as_posix()
        if path.is_dir():
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        size = path.stat().st_size
        tag = tag_of(path)
        lfs = {"oid": tag, "size": size, "pointerSize": 134}
        return {"type": "file", "oid": tag[:40], "size": size, "path": name, "lfs": lfs}

    def _file(self, repository, found):
        """A file, or a range of it."""
        if self.server.files_at:
            return self._without_content(302, {"Location": self.server.files_at + self.path})
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
        self.send_header("ETag", f'"{tag_of(path)}"')
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
            reach = self.server.dice.randrange(size + 1)
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

    def _error(self, status, code="", message=""):
        """A reply that says what is wrong, in the headers in which the hub says it."""
        self._without_content(status, {"X-Error-Code": code, "X-Error-Message": message})

    def _without_content(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()
