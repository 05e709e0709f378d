"""An S3 store on loopback for tests: moto's server, which can be slow and fail on demand."""

import logging
import os
import random
import threading
import time

import pytest

moto_server = pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")
from werkzeug.serving import make_server  # noqa: E402


class Store:
    """moto's S3 server in this process, wrapped in an application that misbehaves on demand.

    failing: the share of requests answered with 400, which no package tries again, or with 503.
    slow_s: seconds that each upload of a step's file takes. arrived: set when one begins.
    """

    def __init__(self):
        self.s3 = moto_server.DomainDispatcherApplication(moto_server.create_backend_app)
        self.dice = random.Random(1)
        self.failing = self.slow_s = self.failed = 0
        self.arrived = threading.Event()

    def __call__(self, environ, start_response):
        """Answer a request."""
        path = environ["PATH_INFO"]
        if self.dice.random() < self.failing:
            self.failed += 1
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(self.dice.choice([*["400 Bad Request"] * 4, "503 Slow Down"]), [])
            return [b""]
        if environ["REQUEST_METHOD"] == "PUT" and "/step_" in path:
            self.arrived.set()
            time.sleep(self.slow_s)
        return self.s3(environ, start_response)

    def __enter__(self):
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line a request
        self.server = make_server("127.0.0.1", 0, self, threaded=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        import boto3

        self.before = dict(os.environ)
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server.server_port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }
        s3fs.S3FileSystem.clear_instance_cache()  # those of another store
        boto3.client("s3").create_bucket(Bucket="bucket")
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()
        os.environ.clear()
        os.environ.update(self.before)
        s3fs.S3FileSystem.clear_instance_cache()
