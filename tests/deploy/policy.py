"""What every pod of ours must keep to, each rule a function that yields what is wrong with it.

Each was learned on real clusters; `test_policy.py` breaks each in a manifest that keeps it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence

from tests.deploy.manifests import Manifest, containers, environment, pod_template

GIB = 2**30
SERVER_GIB = 4.0
"""What the LMCache server needs beyond L1 and the ring."""

VLLM_GIB = 16.0
CPU_SERVER_GIB, CPU_VLLM_GIB = 2.0, 3.0

Rule = Callable[[Sequence[Manifest]], Iterator[str]]
RULES: dict[str, Rule] = {}

_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "": 1}


def rule(function: Rule) -> Rule:
    RULES[function.__name__] = function
    return function


def quantity(text: str) -> float:
    """A Kubernetes quantity of bytes."""
    found = re.fullmatch(r"([0-9.]+)(Ki|Mi|Gi|Ti|)", text)
    assert found, text
    return float(found[1]) * _UNITS[found[2]]


def pods(manifests: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Name and pod of every workload."""
    for manifest in manifests:
        if (template := pod_template(manifest)) is not None:
            yield f"{manifest['kind']}/{manifest['metadata']['name']}", template["spec"]


def runs_server(container: Manifest) -> bool:
    """Whether the LMCache server runs in it, alone or beside vLLM."""
    return "--exec" in container.get("command", []) or environment(container).get("LMC_ENABLE") == "1"


def runs_vllm(container: Manifest) -> bool:
    return "vllm" in container["image"] and "--exec" not in container.get("command", [])


def is_gateway(container: Manifest) -> bool:
    return "gateway" in container["image"] and "command" not in container


def memory_volumes(pod: Manifest) -> dict[str, float]:
    """Bytes of the pod's emptyDirs in memory, which count as memory of who fills them."""
    return {
        volume["name"]: quantity(volume["emptyDir"]["sizeLimit"])
        for volume in pod.get("volumes", [])
        if (volume.get("emptyDir") or {}).get("medium") == "Memory"
    }


@rule
def no_volume_over_the_hosts_shared_memory(manifests: Sequence[Manifest]) -> Iterator[str]:
    """With hostIPC, /dev/shm is the host's, which the other pods see; anything mounted over it parts them."""
    for name, pod in pods(manifests):
        for container in containers(pod) if pod.get("hostIPC") else ():
            for mount in container.get("volumeMounts", []):
                if mount["mountPath"].rstrip("/") == "/dev/shm":
                    yield f"{name}, {container['name']}: {mount['name']} covers the host's /dev/shm"


@rule
def one_shared_memory_for_server_and_vllm(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Without hostIPC every container of a pod that moves KV cache has the same large /dev/shm."""
    for name, pod in pods(manifests):
        users = [each for each in containers(pod) if runs_server(each) or runs_vllm(each)]
        if pod.get("hostIPC") or not users:
            continue
        found = {
            mount["name"]
            for each in users
            for mount in each.get("volumeMounts", [])
            if mount["mountPath"] == "/dev/shm"
        }
        with_it = [each for each in users if any(m["mountPath"] == "/dev/shm" for m in each["volumeMounts"])]
        if len(found) != 1 or len(with_it) != len(users) or not found <= memory_volumes(pod).keys():
            yield f"{name}: /dev/shm is {sorted(found)}, not one volume in memory of all of {len(users)} containers"


@rule
def the_cache_server_takes_no_gpu(manifests: Sequence[Manifest]) -> Iterator[str]:
    """A request would take a GPU from vLLM; it sees them all through the runtime instead."""
    for name, pod in pods(manifests):
        for container in containers(pod):
            if not runs_server(container) or runs_vllm(container):
                continue
            resources = container.get("resources", {})
            taken = {*resources.get("limits", {}), *resources.get("requests", {})} & {"nvidia.com/gpu"}
            if taken:
                yield f"{name}, {container['name']}: requests {sorted(taken)}"
            if "cpu" in container["image"]:
                continue
            if environment(container).get("NVIDIA_VISIBLE_DEVICES") != "all":
                yield f"{name}, {container['name']}: NVIDIA_VISIBLE_DEVICES is not all"
            if not pod.get("runtimeClassName"):
                yield f"{name}: no runtimeClassName, so that no GPU is visible without a request"


@rule
def no_service_links(manifests: Sequence[Manifest]) -> Iterator[str]:
    """They make variables out of the names of Services, such as LMC_PORT=tcp://..."""
    for name, pod in pods(manifests):
        if pod.get("enableServiceLinks") is not False:
            yield f"{name}: enableServiceLinks is not false"


@rule
def no_service_that_names_our_variables(manifests: Sequence[Manifest]) -> Iterator[str]:
    """For pods of others in the namespace, which have service links."""
    for manifest in manifests:
        if manifest["kind"] == "Service":
            name = manifest["metadata"]["name"]
            variable = f"{name.upper().replace('-', '_')}_PORT"
            if variable.startswith(("LMC_", "XKV_", "LMCACHE_")):
                yield f"Service/{name}: makes {variable}"


@rule
def memory_for_l1_ring_and_the_rest(manifests: Sequence[Manifest]) -> Iterator[str]:
    """L1 is not touched at the start: a limit below it kills the server under load, days later."""
    for name, pod in pods(manifests):
        in_memory = memory_volumes(pod)
        for container in containers(pod):
            values = environment(container)
            if is_gateway(container):
                fragment = int(values.get("XKV_GATEWAY_FRAGMENT_BYTES", 131072))
                sessions, slots = (int(values[f"XKV_GATEWAY_MAX_{each}"]) for each in ("SESSIONS", "SLOTS"))
                needed = sessions * slots * fragment + GIB
            elif runs_server(container) or runs_vllm(container):
                cpu = "cpu" in container["image"]
                needed = 0.0
                if runs_server(container):
                    slots = int(values.get("LMC_XKV_SLOTS", 1024))
                    fragment = int(values.get("LMC_XKV_FRAG", 131072))
                    needed += float(values["LMC_L1_GB"]) * GIB + slots * fragment
                    needed += (CPU_SERVER_GIB if cpu else SERVER_GIB) * GIB
                if runs_vllm(container):
                    needed += (CPU_VLLM_GIB if cpu else VLLM_GIB) * GIB
                needed += sum(
                    in_memory.get(mount["name"], 0.0) for mount in container.get("volumeMounts", [])
                )
            else:
                continue
            limit = quantity(container["resources"]["limits"]["memory"])
            if limit < needed:
                yield (
                    f"{name}, {container['name']}: memory limit {limit / GIB:.2f} GiB, "
                    f"needed {needed / GIB:.2f} GiB"
                )


@rule
def the_connector_is_named_by_its_module(manifests: Sequence[Manifest]) -> Iterator[str]:
    """vLLM's own registry has an older connector of that name. In one container the launcher writes it."""
    for name, pod in pods(manifests):
        for container in containers(pod):
            if not runs_vllm(container):
                continue
            arguments = container.get("args", [])
            if "--kv-transfer-config" in arguments:
                config = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
                if "kv_connector_module_path" not in config:
                    yield f"{name}, {container['name']}: no kv_connector_module_path"
            elif environment(container).get("LMC_ENABLE") != "1":
                yield f"{name}, {container['name']}: no --kv-transfer-config"
            elif environment(container).get("LMC_INJECT", "1") != "1" or "command" in container:
                yield f"{name}, {container['name']}: the launcher adds no --kv-transfer-config"


@rule
def one_hash_seed(manifests: Sequence[Manifest]) -> Iterator[str]:
    for name, pod in pods(manifests):
        for container in containers(pod):
            if runs_server(container) or runs_vllm(container):
                seed = environment(container).get("PYTHONHASHSEED")
                if seed != "0":
                    yield f"{name}, {container['name']}: PYTHONHASHSEED is {seed}"


@rule
def probes_do_not_ask_the_gateway_or_loopback_from_outside(manifests: Sequence[Manifest]) -> Iterator[str]:
    """LMCache's front end is on loopback: exec probes. A gateway that is away must restart nobody but itself."""
    for name, pod in pods(manifests):
        for container in containers(pod):
            if not (runs_server(container) or runs_vllm(container)):
                continue
            values = environment(container)
            ports = {each["name"]: each["containerPort"] for each in container.get("ports", [])}
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                probe = container.get(kind, {})
                command = probe.get("exec", {}).get("command")
                if command and "xkv_lmcache_autostart.health" not in command:
                    yield f"{name}, {container['name']}: {kind} runs {command}"
                for way in ("httpGet", "tcpSocket"):
                    port = probe.get(way, {}).get("port")
                    port = ports.get(port, port)
                    if port is None:
                        continue
                    if runs_server(container) and port == int(values.get("LMC_HTTP_PORT", 8080)):
                        yield f"{name}, {container['name']}: {kind} asks LMCache's front end on loopback"
                    elif port != 8000:
                        yield f"{name}, {container['name']}: {kind} asks port {port}, which knows the gateway"
            if runs_server(container) and values.get("LMC_HTTP_HOST", "127.0.0.1") != "127.0.0.1":
                yield f"{name}, {container['name']}: LMCache's front end is not on loopback"


@rule
def a_startup_probe_everywhere(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Loading a model or recovering a store takes longer than a liveness probe may wait."""
    for name, pod in pods(manifests):
        for container in containers(pod):
            if (runs_server(container) or runs_vllm(container) or is_gateway(container)) and (
                "startupProbe" not in container
            ):
                yield f"{name}, {container['name']}: no startupProbe"


@rule
def the_gateway_is_reached_at_the_nodes_address_with_a_token(manifests: Sequence[Manifest]) -> Iterator[str]:
    """127.0.0.1 is the pod's own, unless it is on the host's network."""
    for name, pod in pods(manifests):
        for container in containers(pod):
            values = environment(container)
            if is_gateway(container):
                if "XKV_GATEWAY_TOKEN_FILE" not in values:
                    yield f"{name}: a gateway without a token"
                continue
            if not runs_server(container):
                continue
            host = values.get("LMC_XKV_HOST", "127.0.0.1")
            if "status.hostIP" not in host and not pod.get("hostNetwork"):
                yield f"{name}, {container['name']}: the gateway is at {host}, not at status.hostIP"
            if "LMC_XKV_TOKEN_FILE" not in values:
                yield f"{name}, {container['name']}: no token"


@rule
def the_shared_folder_is_the_same(manifests: Sequence[Manifest]) -> Iterator[str]:
    """A session's memory is handed over there: one hostPath for the gateway and its clients."""
    found: set[str] = set()
    for name, pod in pods(manifests):
        volumes = {each["name"]: each for each in pod.get("volumes", [])}
        for container in containers(pod):
            values = environment(container)
            if not (is_gateway(container) or runs_server(container)):
                continue
            folder = values.get("XKV_GATEWAY_SHM_DIR" if is_gateway(container) else "LMC_XKV_SHM_DIR")
            sources = [
                volumes[mount["name"]].get("hostPath", {}).get("path", "not a hostPath")
                for mount in container.get("volumeMounts", [])
                if mount["mountPath"] == folder
            ]
            if not sources:
                yield f"{name}, {container['name']}: shm_dir {folder} is not mounted"
            found.update(sources)
    if len(found) > 1:
        yield f"shm_dir is {sorted(found)}"


@rule
def vllm_waits_for_a_server_apart(manifests: Sequence[Manifest]) -> Iterator[str]:
    """vLLM exits when it finds no server. In one container the launcher starts it after the server."""
    for name, pod in pods(manifests):
        for container in containers(pod):
            if not runs_vllm(container) or runs_server(container):
                continue
            before = [
                each
                for each in pod.get("initContainers", [])
                if each.get("restartPolicy") == "Always" and "startupProbe" in each and runs_server(each)
            ]
            waits = environment(container).get("LMC_WAIT_FOR_SERVER") == "1"
            if not waits and not before:
                yield f"{name}, {container['name']}: starts without waiting for the server"


@rule
def a_network_policy_covers_the_models(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Neither LMCache's ZMQ port nor its front end asks who is there."""
    policies = [each for each in manifests if each["kind"] == "NetworkPolicy"]
    for manifest in manifests:
        template = pod_template(manifest)
        if template is None:
            continue
        labels = template["metadata"]["labels"].items()
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if not any(policy["spec"]["podSelector"]["matchLabels"].items() <= labels for policy in policies):
            yield f"{name}: no NetworkPolicy selects it"
    for policy in policies:
        allowed = {
            port["port"]
            for each in policy["spec"].get("ingress", [])
            for port in each.get("ports", [{"port": "all"}])
        }
        if not allowed <= {8000, 9558}:
            yield f"NetworkPolicy/{policy['metadata']['name']}: lets in {sorted(map(str, allowed))}"


@rule
def lmcache_listens_on_loopback(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Its ZMQ port unpickles what it receives."""
    for name, pod in pods(manifests):
        for container in containers(pod):
            host = environment(container).get("LMC_HOST", "127.0.0.1")
            if runs_server(container) and host != "127.0.0.1":
                yield f"{name}, {container['name']}: the server listens on {host}"


@rule
def as_few_rights_as_possible(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Nobody is root but the init container that gives folders away, and it can do no more than that."""
    for name, pod in pods(manifests):
        general = pod.get("securityContext", {})
        if general.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{name}: no seccomp profile"
        if pod.get("automountServiceAccountToken") is not False:
            yield f"{name}: has a token of the cluster's API"
        for container in containers(pod):
            own = container.get("securityContext", {})
            where = f"{name}, {container['name']}"
            if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
                yield f"{where}: may gain rights"
            if not own.get("readOnlyRootFilesystem"):
                yield f"{where}: its root file system is writable"
            capabilities = own.get("capabilities", {})
            init = container["name"] == "folders"
            if capabilities.get("drop") != ["ALL"]:
                yield f"{where}: keeps capabilities"
            if set(capabilities.get("add", [])) - ({"CHOWN", "FOWNER"} if init else set()):
                yield f"{where}: adds {capabilities['add']}"
            if not init and not {**general, **own}.get("runAsNonRoot"):
                yield f"{where}: may be root"


@rule
def prometheus_finds_a_port(manifests: Sequence[Manifest]) -> Iterator[str]:
    for manifest in manifests:
        template = pod_template(manifest)
        if template is None:
            continue
        notes = template["metadata"].get("annotations", {})
        port = notes.get("prometheus.io/port", "")
        open_ports = {
            str(each["containerPort"])
            for one in containers(template["spec"])
            for each in one.get("ports", [])
        }
        if notes.get("prometheus.io/scrape") != "true" or port not in open_ports:
            yield f"{manifest['kind']}/{manifest['metadata']['name']}: scraped at {port!r}, open are {open_ports}"


@rule
def the_grace_is_longer_than_the_stop(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Or the store is cut off while it closes."""
    for name, pod in pods(manifests):
        grace = pod.get("terminationGracePeriodSeconds", 30)
        for container in containers(pod):
            stop = 8.0 if is_gateway(container) else float(environment(container).get("LMC_STOP_S", 10))
            if grace < stop + 10:
                yield f"{name}, {container['name']}: {grace} s of grace for a stop of {stop:g} s"


@rule
def drives_by_id_or_folder(manifests: Sequence[Manifest]) -> Iterator[str]:
    """/dev/nvme1n1 may be another drive after the next boot."""
    for manifest in manifests:
        if manifest["kind"] == "PersistentVolume":
            path = manifest["spec"].get("local", {}).get("path", "")
            if not path.startswith("/dev/disk/by-id/"):
                yield f"PersistentVolume/{manifest['metadata']['name']}: {path} is no id"
    for name, pod in pods(manifests):
        for volume in pod.get("volumes", []):
            path = volume.get("hostPath", {}).get("path", "")
            if path.startswith("/dev/") and not path.startswith("/dev/disk/by-id/"):
                yield f"{name}: {volume['name']} is {path}, no id"
        for container in containers(pod):
            if is_gateway(container):
                store = environment(container).get("XKV_GATEWAY_STORE", "")
                places = [m["mountPath"] for m in container.get("volumeMounts", [])]
                places += [d["devicePath"] for d in container.get("volumeDevices", [])]
                if store not in places:
                    yield f"{name}: the store {store} is in the container, which ends with it"


def violations(manifests: Sequence[Manifest]) -> list[str]:
    """What every rule says, each line with the rule's name."""
    return [f"{name}: {text}" for name, check in RULES.items() for text in check(manifests)]
