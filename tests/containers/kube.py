"""The manifests of a form as `podman kube play` takes them.

Changed are the paths and ports of the machine and where the images are, since a test has its own; and what podman 4.3 does
not know: a DaemonSet is played as its pod, probes (which it leaves to systemd) and ports (which it refuses on the host's
network) are left out, and the Secret that a cluster's administrator makes comes along.
"""

from __future__ import annotations

import base64
import os
import subprocess
from pathlib import Path

import yaml

from tests.containers.podman import Container, podman
from tests.containers.serving import Ports
from tests.deploy.manifests import Manifest, build, containers, pod_template

TOKEN = "a secret of this test"
_PREFIX = "xkv-test-"


class Player:
    """Plays pods of forms on ports and folders of its own.

    Args:
        folder: gets the files that are played, and the folders of the node.
        model: the folder of the model.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.ports = Ports.free()
        self.folders = folder / "node"
        self.folders.mkdir()
        self._paths = {
            "/run/xkv": self.folders / "run",
            "/var/lib/xkv": self.folders / "store",
            "/var/lib/xkv-model": model,
            "/dev/shm": folder / "shm",
        }
        for name in ("run", "store"):
            (self.folders / name).mkdir()
        (folder / "shm").mkdir()
        (folder / "shm").chmod(0o1777)
        self._folder = folder
        self._up: list[str] = []
        # The engine may not raise limits everywhere, and `kube play` has no option for them.
        self._config = folder / "containers.conf"
        self._config.write_text(
            '[containers]\ndefault_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]\n[engine]\nruntime = "runc"\n'
        )

    def up(self, form: str, name: str) -> dict[str, Container]:
        """Plays the pod of the workload `name` of a form; its containers by their names there."""
        secret: Manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "xkv-token"},
            "data": {"token": base64.b64encode(TOKEN.encode()).decode()},
        }
        (manifest,) = [
            each
            for each in build(form)
            if each["metadata"]["name"] == name and pod_template(each) is not None
        ]
        template = manifest["spec"]["template"]
        self._localize(template["spec"])
        # podman 4.3 removes an init container that is done, and at times fails because it is still ending.
        kept = {"io.podman.annotations.init.container.type": "always"}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **template["metadata"],
                "name": _PREFIX + name,
                "annotations": {**template["metadata"]["annotations"], **kept},
            },
            "spec": template["spec"],
        }
        file = self._folder / f"{form.replace('/', '-')}-{name}.yaml"
        file.write_text(yaml.safe_dump_all([secret, pod]))
        done = subprocess.run(
            ["podman", "kube", "play", file],
            env={**os.environ, "CONTAINERS_CONF": str(self._config)},
            capture_output=True,
            text=True,
            check=False,
        )
        self._up.append(name)
        assert done.returncode == 0, done.stdout + done.stderr
        return {
            each["name"]: Container(each["image"], [], name=f"{_PREFIX}{name}-{each['name']}")
            for each in template["spec"]["containers"]
        }

    def down(self, *names: str) -> None:
        """Ends the pods `names`, or all, and what they left in the engine."""
        for name in names or list(self._up):
            podman("pod", "stop", "--time=40", _PREFIX + name, check=False)
            podman("pod", "rm", "--force", _PREFIX + name, check=False)
            self._up.remove(name)
        if not self._up:
            podman("secret", "rm", "xkv-token", check=False)
            podman("volume", "rm", "--force", "xkv-token", "shm", "tmp", "home", "server-home", check=False)

    def _localize(self, spec: Manifest) -> None:
        ports = self.ports
        numbers = {
            "5557": ports.gateway, "6555": ports.zmq, "8080": ports.http,
            "9557": ports.gateway_metrics, "9558": ports.metrics,
        }  # fmt: skip
        for volume in spec["volumes"]:
            if "secret" in volume:
                # podman 4.3 falls over a Secret volume that does not say it.
                volume["secret"]["optional"] = False
            if (volume.get("emptyDir") or {}).get("medium") == "Memory":
                # A cluster's is for everybody, podman's is root's.
                del volume["emptyDir"]
                volume["hostPath"] = {"path": "/dev/shm", "type": "Directory"}
            if "hostPath" in volume:
                volume["hostPath"]["path"] = str(self._paths[volume["hostPath"]["path"]])
        for container in containers(spec):
            container["image"] = f"localhost/{container['image']}"
            for variable in container.get("env", []):
                variable["value"] = str(numbers.get(variable["value"], variable["value"]))
            container["args"] = [
                argument.replace("--port=8000", f"--port={ports.vllm}").replace(":6555,", f":{ports.zmq},")
                for argument in container.get("args", [])
            ]
            for key in ("ports", "startupProbe", "livenessProbe", "readinessProbe"):
                container.pop(key, None)
