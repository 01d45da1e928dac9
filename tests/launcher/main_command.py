"""A main command for the supervisor's tests. Each argument is something that it does, in order:

exit=N          exit with code N
kill=N          end by signal N
ignore=NAME     ignore a signal
on=NAME         say so when this signal arrives
ask=PORT        on TERM or INT, ask the server's /healthcheck before ending with code 0
child           start a child that ends only by KILL, in the same process group
daemon          start a grandchild in a session of its own that ends only by KILL, and orphan it
orphan          start a grandchild that ends at once, and orphan it
bow             say so and end with code 0 on TERM
wait            wait for a signal
"""

import http.client
import os
import signal
import subprocess
import sys

STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
)


def say(text: str) -> None:
    print(f"command: {text}", flush=True)


def start_stubborn(**options: bool) -> None:
    """Start a process that ignores TERM, and return when it does."""
    child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, **options)
    assert child.stdout is not None
    child.stdout.readline()


def orphan(function) -> None:
    """Let a child call `function` and end, so that what it started has no parent."""
    pid = os.fork()
    if pid == 0:
        function()
        os._exit(0)
    os.waitpid(pid, 0)


def ask(port: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/healthcheck")
    say(f"the server answers {connection.getresponse().status}")
    sys.exit(0)


for argument in sys.argv[1:]:
    name, _, value = argument.partition("=")
    match name:
        case "exit":
            sys.exit(int(value))
        case "kill":
            os.kill(os.getpid(), int(value))
        case "ignore":
            signal.signal(signal.Signals[value], signal.SIG_IGN)
        case "on":
            signal.signal(signal.Signals[value], lambda number, _: say(f"got {signal.Signals(number).name}"))
        case "ask":
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_, port=int(value): ask(port))
        case "bow":
            signal.signal(signal.SIGTERM, lambda *_: (say("bows out"), sys.exit(0)))
        case "child":
            start_stubborn()
        case "daemon":
            orphan(lambda: start_stubborn(start_new_session=True))
        case "orphan":
            orphan(lambda: os.fork() or os._exit(0))
        case "wait":
            say("ready")
            while True:
                signal.pause()
        case _:
            sys.exit(f"unknown argument {argument}")
