"""A stand-in for LMCache's server, for tests that start it dozens of times: the real one takes 10 s each
time.

It opens the two ports, answers `/healthcheck` and ends on TERM like the real one. `XKV_STANDIN` makes it
misbehave, with words separated by blanks:

    fail            exit with code 3 before opening a port
    fail-second     the same, on its second start only (counted in the file `XKV_STANDIN_STARTS`)
    deaf            open no port at all
    ignore-term     ignore TERM
    foreign-http    leave the HTTP port to a child process
    chatty          write a line of 1 KiB to stdout over and over
"""

import argparse
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time

LISTEN_FOREIGN = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthcheck" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def note(text: str) -> None:
    print(f"stand-in server: {text}", file=sys.stderr, flush=True)


def starts() -> int:
    path = os.environ.get("XKV_STANDIN_STARTS")
    if not path:
        return 1
    with open(path, "a+") as file:
        file.write("x")
        return file.tell()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--http-host")
    parser.add_argument("--http-port", type=int)
    args, _ = parser.parse_known_args()
    words = os.environ.get("XKV_STANDIN", "").split()
    count = starts()
    note(f"start {count}, process {os.getpid()}")

    def end(*_: object) -> None:
        note("got TERM")
        if "ignore-term" not in words:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(128 + signal.SIGTERM)  # process 1 of a container does not end by signals

    signal.signal(signal.SIGTERM, end)
    if "fail" in words or ("fail-second" in words and count == 2):
        note("the drive is on fire")
        sys.exit(3)
    if "deaf" in words:
        while True:
            time.sleep(3600)
    zmq = socket.create_server((args.host, args.port))
    if "foreign-http" in words:
        subprocess.Popen([sys.executable, "-c", LISTEN_FOREIGN, str(args.http_port)])
    else:
        front_end = http.server.ThreadingHTTPServer((args.http_host, args.http_port), Handler)
        threading.Thread(target=front_end.serve_forever, daemon=True).start()
        note("serves")
    while True:
        if "chatty" in words:
            print("x" * 1023, flush=True)
        else:
            time.sleep(3600)
    zmq.close()


if __name__ == "__main__":
    main()
