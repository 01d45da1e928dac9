"""What stands between a connector and its gateway."""

import os
import select
import socket
import threading


class Relay:
    """A TCP relay between a client and a gateway: it can cut connections, or keep them and pass nothing on."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._wake, self._woken = os.pipe()
        self._lock = threading.Lock()
        self.silent = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> int:
        """Resets every connection; how many there were."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
            for pair in pairs:
                for end in pair:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    end.close()
            return len(pairs)

    def close(self) -> None:
        os.close(self._woken)
        self._thread.join(10)
        self.cut()
        self._listener.close()
        os.close(self._wake)

    def _run(self) -> None:
        while True:
            with self._lock:
                ends = [] if self.silent else [end for pair in self._pairs for end in pair]
            readable, _, _ = select.select([self._wake, self._listener, *ends], [], [], 0.02)
            if self._wake in readable:
                return
            with self._lock:
                if self._listener in readable:
                    client, _ = self._listener.accept()
                    try:
                        self._pairs.append((client, socket.create_connection(self._target, timeout=1)))
                    except OSError:
                        client.close()
                # It may have fallen silent since the ends were looked at.
                for pair in [] if self.silent else list(self._pairs):
                    for source, target in (pair, pair[::-1]):
                        if source in readable and not self._pass_on(source, target):
                            self._pairs.remove(pair)
                            source.close()
                            target.close()
                            break

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> bool:
        try:
            data = source.recv(65536)
            target.sendall(data)
        except OSError:
            return False
        return bool(data)
