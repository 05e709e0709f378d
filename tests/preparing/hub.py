"""A mock Hugging Face hub on loopback, as slow and as unreliable as one likes.

    with Hub(folder) as hub: ...   # folder/ORG/NAME/FILE is hf://datasets/ORG/NAME/FILE

It is also hf://ORG/NAME/FILE, of a model. Speaks the addresses that huggingface_hub asks for:
information, tree and paths of a repository, and the files themselves in ranges, with ETags. Give
its clients hub.environment. The files are also plain ones of the web, at
hub.address/datasets/ORG/NAME/resolve/main/FILE.
"""

import hashlib
import io
import json
import random
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

# Repository, what is asked of it (nothing: information), and a file or folder in it.
ASKED = re.compile(
    r"(?:/api/models|(?:/api)?/datasets)?/([^/]+/[^/]+)"
    r"(?:/(revision|tree|paths-info|resolve)/[^/]+(?:/(.+))?)?"
)
BLOCK = 1 << 16  # bytes written at a time
STALL_SECONDS = 3


class Hub(ThreadingHTTPServer):
    """The server. It runs in a thread from `with` to the end of it.

    bytes_a_second: of each reply; 0 for no limit. faults: {what goes wrong: how probable that is at
    a request}; cut: the connection breaks in the middle of a reply; stall: nothing comes for
    STALL_SECONDS; 429, 500: replies of that status. token: any other is refused. tokens: those that
    came with requests. gated: nobody has accepted the terms. ranges: whether files are given in
    parts. files_at: the address of another hub, to which requests for files are redirected.
    environment: variables that make huggingface_hub talk to it, without the user's own token.
    """

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.bytes_a_second = 0
        self.faults = {}
        self.dice = random.Random(1)
        self.token = ""
        self.tokens = set()
        self.gated = False
        self.ranges = True
        self.files_at = ""
        self.environment = {
            "HF_ENDPOINT": self.address,
            "HF_HUB_DOWNLOAD_TIMEOUT": "1",
            "HF_HUB_ETAG_TIMEOUT": "1",
            "HF_HOME": str(folder / ".hf_home"),
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
        hub = self.server
        form = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        chances = hub.faults | {"": 1 - sum(hub.faults.values())}
        (self.fault,) = hub.dice.choices(list(chances), list(chances.values()))
        if self.fault == "stall":
            time.sleep(STALL_SECONDS)
        if isinstance(self.fault, int):
            return self._error(self.fault)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        hub.tokens.add(token)
        if token not in ("", hub.token):
            return self._error(401, "", "Invalid credentials in Authorization header")
        name, what, below = ASKED.fullmatch(unquote(urlsplit(self.path).path)).groups()
        repository = hub.folder / name
        path = repository / (below or "")
        if not repository.is_dir():
            return self._error(404, "RepoNotFound")
        if what in (None, "revision"):
            return self._json({"id": name, "sha": "0" * 40, "tags": [], "siblings": []})
        if hub.gated:
            return self._error(403, "GatedRepo")
        if not path.exists():
            return self._error(404, "EntryNotFound")
        if what == "resolve" and hub.files_at:
            return self._reply(io.BytesIO(), 0, 302, Location=hub.files_at + self.path)
        if what == "resolve":
            return self._file(path)
        paths = [repository / name for name in parse_qs(form).get("paths", [])]
        if what == "tree":
            everything = "recursive=true" in self.path.lower()
            paths = sorted(path.rglob("*") if everything else path.glob("*"))
        return self._json([self._entry(repository, path) for path in paths if path.exists()])

    do_HEAD = do_POST = do_GET

    def _entry(self, repository, path):
        """A file or folder as the hub describes it."""
        name = path.relative_to(repository).as_posix()
        if path.is_dir():
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        size = path.stat().st_size
        return {"type": "file", "oid": tag_of(path)[:40], "size": size, "path": name}

    def _file(self, path):
        """A file, or a range of it."""
        size = path.stat().st_size
        headers = {"ETag": f'"{tag_of(path)}"', "Accept-Ranges": "none"}
        with open(path, "rb") as file:
            if not self.server.ranges:
                return self._reply(file, size, **headers)
            headers["Accept-Ranges"] = "bytes"
            wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if not wanted:
                return self._reply(file, size, **headers)
            start = file.seek(int(wanted[1]))
            end = min(size, int(wanted[2]) + 1) if wanted[2] else size
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            return self._reply(file, end - start, 206, **headers)

    def _json(self, value):
        data = json.dumps(value).encode()
        self._reply(io.BytesIO(data), len(data))

    def _error(self, status, code="", message=""):
        """A reply that says what is wrong, in the headers in which the hub says it."""
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._reply(io.BytesIO(), 0, status, **headers)

    def _reply(self, file, size, status=200, **headers):
        """A reply with the next `size` bytes of a file, or fewer."""
        self.send_response(status)
        for name, value in ({"Content-Length": size} | headers).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        left = self.server.dice.randrange(size + 1) if self.fault == "cut" else size
        while block := file.read(min(BLOCK, left)):
            if self.server.bytes_a_second:
                time.sleep(len(block) / self.server.bytes_a_second)
            self.wfile.write(block)
            left -= len(block)
        if self.fault == "cut":  # as when somebody pulls a plug
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
