"""The few calls of the Hugging Face hub's API that a download makes, on a free port of this machine."""

import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def hub(models=None, datasets=None, gated=()):
    """Serves {repository: {revision: {file: content}}}; gives (address, list of the paths that were asked for)."""
    repositories = {"models": models or {}, "datasets": datasets or {}}
    asked = []

    def sha(kind, name, revision):
        return hashlib.sha1(f"{kind}/{name}/{revision}".encode()).hexdigest()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.do_GET()

        def answer(self, status, body=b"", **headers):
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def files(self, kind, name, revision):
            """The files of a revision (by name or commit); None after an error was answered."""
            if name not in repositories[kind]:
                self.answer(404, b"{}", X_Error_Code="RepoNotFound")
                return None
            if name in gated:
                self.answer(403, b"{}", X_Error_Code="GatedRepo")
                return None
            for known, files in repositories[kind][name].items():
                if revision in (known, sha(kind, name, known)):
                    return known, files
            self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
            return None

        def do_GET(self):
            path = self.path.partition("?")[0].replace("%2F", "/")
            asked.append(f"{self.command} {path}")
            call = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/(.+?))?/?", path)
            if call:
                kind, name, verb, revision = call.groups()
                found = self.files(kind, name, revision or "main")
                if found is None:
                    return
                known, files = found
                if verb == "tree":
                    body = [
                        {"type": "file", "path": f, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                        for f, c in files.items()
                    ]
                else:
                    siblings = [{"rfilename": file} for file in files]
                    body = {"id": name, "sha": sha(kind, name, known), "siblings": siblings, "tags": []}
                self.answer(200, json.dumps(body).encode(), Content_Type="application/json")
                return
            call = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([0-9a-f]{40}|[^/]+)/(.+)", path)
            if call:
                kind = "datasets" if call[1] else "models"
                found = self.files(kind, call[2], call[3])
                if found is None:
                    return
                known, files = found
                if call[4] in files:
                    content = files[call[4]]
                    etag = f'"{hashlib.sha1(content).hexdigest()}"'
                    self.answer(200, content, ETag=etag, X_Repo_Commit=sha(kind, call[2], known))
                    return
            self.answer(404, b"{}", X_Error_Code="EntryNotFound")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
