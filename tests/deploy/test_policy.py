"""The rules of `policy.py` hold in every form; each is broken in one that keeps it, and says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.deploy.manifests import FORMS, Manifest, build, containers
from tests.deploy.policy import RULES, violations


@pytest.mark.parametrize("form", FORMS)
def test_every_form_keeps_every_rule(form: str) -> None:
    assert violations(build(form)) == []


Manifests = list[Manifest]


def workload(manifests: Manifests, name: str = "model") -> Manifest:
    (found,) = [
        each
        for each in manifests
        if each["metadata"]["name"] == name and each["kind"] in ("Deployment", "DaemonSet", "StatefulSet")
    ]
    return found


def pod(manifests: Manifests, name: str = "model") -> Manifest:
    found: Manifest = workload(manifests, name)["spec"]["template"]["spec"]
    return found


def container(manifests: Manifests, name: str, of: str = "model") -> Manifest:
    (found,) = [each for each in containers(pod(manifests, of)) if each["name"] == name]
    return found


def set_variable(one: Manifest, name: str, value: str | None) -> None:
    one["env"] = [each for each in one["env"] if each["name"] != name]
    if value is not None:
        one["env"].append({"name": name, "value": value})


def cover_shm(m: Manifests) -> None:
    pod(m)["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}})
    container(m, "vllm")["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})


def server_without_shm(m: Manifests) -> None:
    one = container(m, "lmcache")
    one["volumeMounts"] = [each for each in one["volumeMounts"] if each["name"] != "shm"]


def request_gpu(m: Manifests) -> None:
    container(m, "lmcache")["resources"]["limits"]["nvidia.com/gpu"] = "1"


def no_runtime_class(m: Manifests) -> None:
    del pod(m)["runtimeClassName"]


def few_devices(m: Manifests) -> None:
    set_variable(container(m, "lmcache"), "NVIDIA_VISIBLE_DEVICES", "0")


def service_links(m: Manifests) -> None:
    del pod(m)["enableServiceLinks"]


def service(name: str) -> Callable[[Manifests], None]:
    def rename(m: Manifests) -> None:
        (found,) = [each for each in m if each["kind"] == "Service"]
        found["metadata"]["name"] = name

    return rename


def more_l1(m: Manifests) -> None:
    set_variable(container(m, "lmcache"), "LMC_L1_GB", "44")


def more_slots(m: Manifests) -> None:
    set_variable(container(m, "vllm"), "LMC_XKV_SLOTS", "65536")


def more_sessions(m: Manifests) -> None:
    set_variable(container(m, "gateway", "gateway"), "XKV_GATEWAY_MAX_SESSIONS", "64")


def more_shared_memory(m: Manifests) -> None:
    (volume,) = [each for each in pod(m)["volumes"] if each["name"] == "shm"]
    volume["emptyDir"]["sizeLimit"] = "32Gi"


def connector_by_name(m: Manifests) -> None:
    one = container(m, "vllm")
    place = one["args"].index("--kv-transfer-config") + 1
    one["args"][place] = '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both"}'


def not_injected(m: Manifests) -> None:
    set_variable(container(m, "vllm"), "LMC_INJECT", "0")


def random_seed(m: Manifests) -> None:
    set_variable(container(m, "vllm"), "PYTHONHASHSEED", None)


def probe_front_end(m: Manifests) -> None:
    container(m, "lmcache")["livenessProbe"] = {"httpGet": {"path": "/healthcheck", "port": 8080}}


def probe_plugin(m: Manifests) -> None:
    container(m, "vllm")["readinessProbe"]["httpGet"]["port"] = "metrics"


def probe_gateway(m: Manifests) -> None:
    container(m, "lmcache")["livenessProbe"]["exec"]["command"] = ["xkv", "gateway", "status"]


def open_front_end(m: Manifests) -> None:
    set_variable(container(m, "lmcache"), "LMC_HTTP_HOST", "0.0.0.0")


def no_startup_probe(m: Manifests) -> None:
    del container(m, "vllm")["startupProbe"]


def loopback_gateway(m: Manifests) -> None:
    set_variable(container(m, "vllm"), "LMC_XKV_HOST", "127.0.0.1")


def no_token(m: Manifests) -> None:
    set_variable(container(m, "vllm"), "LMC_XKV_TOKEN_FILE", None)


def gateway_without_token(m: Manifests) -> None:
    set_variable(container(m, "gateway", "gateway"), "XKV_GATEWAY_TOKEN_FILE", None)


def other_folder(m: Manifests) -> None:
    (volume,) = [each for each in pod(m)["volumes"] if each["name"] == "shm-dir"]
    volume["hostPath"]["path"] = "/run/other"


def private_folder(m: Manifests) -> None:
    (volume,) = [each for each in pod(m)["volumes"] if each["name"] == "shm-dir"]
    del volume["hostPath"]
    volume["emptyDir"] = {}


def no_wait(m: Manifests) -> None:
    set_variable(container(m, "vllm"), "LMC_WAIT_FOR_SERVER", None)


def no_wait_not_native(m: Manifests) -> None:
    no_wait(m)
    del container(m, "lmcache")["restartPolicy"]


def no_policy(m: Manifests) -> None:
    m[:] = [each for each in m if each["kind"] != "NetworkPolicy"]


def wide_policy(m: Manifests) -> None:
    (policy,) = [each for each in m if each["kind"] == "NetworkPolicy"]
    policy["spec"]["ingress"].append({"ports": [{"protocol": "TCP", "port": 6555}]})


def open_server(m: Manifests) -> None:
    set_variable(container(m, "lmcache", "lmcache"), "LMC_HOST", "0.0.0.0")


def root(m: Manifests) -> None:
    pod(m)["securityContext"]["runAsNonRoot"] = False


def privileged(m: Manifests) -> None:
    container(m, "lmcache")["securityContext"]["privileged"] = True


def capability(m: Manifests) -> None:
    container(m, "gateway", "gateway")["securityContext"]["capabilities"]["add"] = ["SYS_ADMIN"]


def writable_root(m: Manifests) -> None:
    container(m, "vllm")["securityContext"]["readOnlyRootFilesystem"] = False


def unconfined(m: Manifests) -> None:
    pod(m)["securityContext"]["seccompProfile"]["type"] = "Unconfined"


def api_token(m: Manifests) -> None:
    del pod(m)["automountServiceAccountToken"]


def closed_port(m: Manifests) -> None:
    workload(m)["spec"]["template"]["metadata"]["annotations"]["prometheus.io/port"] = "9090"


def short_grace(m: Manifests) -> None:
    pod(m)["terminationGracePeriodSeconds"] = 30


def short_grace_of_gateway(m: Manifests) -> None:
    pod(m, "gateway")["terminationGracePeriodSeconds"] = 5


def drive_by_number(m: Manifests) -> None:
    (volume,) = [each for each in m if each["kind"] == "PersistentVolume"]
    volume["spec"]["local"]["path"] = "/dev/nvme1n1"


def host_drive_by_number(m: Manifests) -> None:
    pod(m, "gateway")["volumes"].append({"name": "d", "hostPath": {"path": "/dev/nvme1n1"}})


def store_in_container(m: Manifests) -> None:
    set_variable(container(m, "gateway", "gateway"), "XKV_GATEWAY_STORE", "/srv/store")


BREAKS: list[tuple[str, str, Callable[[Manifests], None]]] = [
    ("no_volume_over_the_hosts_shared_memory", "node", cover_shm),
    ("one_shared_memory_for_server_and_vllm", "sidecar", server_without_shm),
    ("the_cache_server_takes_no_gpu", "sidecar", request_gpu),
    ("the_cache_server_takes_no_gpu", "sidecar", no_runtime_class),
    ("the_cache_server_takes_no_gpu", "sidecar", few_devices),
    ("no_service_links", "in-pod", service_links),
    ("no_service_that_names_our_variables", "in-pod", service("lmc")),
    ("no_service_that_names_our_variables", "in-pod", service("xkv-gateway")),
    ("memory_for_l1_ring_and_the_rest", "sidecar", more_l1),
    ("memory_for_l1_ring_and_the_rest", "in-pod", more_slots),
    ("memory_for_l1_ring_and_the_rest", "in-pod", more_shared_memory),
    ("memory_for_l1_ring_and_the_rest", "base", more_sessions),
    ("the_connector_is_named_by_its_module", "sidecar", connector_by_name),
    ("the_connector_is_named_by_its_module", "in-pod", not_injected),
    ("one_hash_seed", "node", random_seed),
    ("probes_do_not_ask_the_gateway_or_loopback_from_outside", "sidecar", probe_front_end),
    ("probes_do_not_ask_the_gateway_or_loopback_from_outside", "in-pod", probe_plugin),
    ("probes_do_not_ask_the_gateway_or_loopback_from_outside", "sidecar", probe_gateway),
    ("probes_do_not_ask_the_gateway_or_loopback_from_outside", "sidecar", open_front_end),
    ("a_startup_probe_everywhere", "in-pod", no_startup_probe),
    ("the_gateway_is_reached_at_the_nodes_address_with_a_token", "in-pod", loopback_gateway),
    ("the_gateway_is_reached_at_the_nodes_address_with_a_token", "in-pod", no_token),
    ("the_gateway_is_reached_at_the_nodes_address_with_a_token", "base", gateway_without_token),
    ("the_shared_folder_is_the_same", "in-pod", other_folder),
    ("the_shared_folder_is_the_same", "in-pod", private_folder),
    ("vllm_waits_for_a_server_apart", "node", no_wait),
    ("vllm_waits_for_a_server_apart", "sidecar", no_wait_not_native),
    ("a_network_policy_covers_the_models", "sidecar", no_policy),
    ("a_network_policy_covers_the_models", "sidecar", wide_policy),
    ("lmcache_listens_on_loopback", "node", open_server),
    ("as_few_rights_as_possible", "in-pod", root),
    ("as_few_rights_as_possible", "sidecar", privileged),
    ("as_few_rights_as_possible", "base", capability),
    ("as_few_rights_as_possible", "in-pod", writable_root),
    ("as_few_rights_as_possible", "in-pod", unconfined),
    ("as_few_rights_as_possible", "in-pod", api_token),
    ("prometheus_finds_a_port", "in-pod", closed_port),
    ("the_grace_is_longer_than_the_stop", "in-pod", short_grace),
    ("the_grace_is_longer_than_the_stop", "base", short_grace_of_gateway),
    ("drives_by_id_or_folder", "block", drive_by_number),
    ("drives_by_id_or_folder", "base", host_drive_by_number),
    ("drives_by_id_or_folder", "base", store_in_container),
]


@pytest.mark.parametrize(("rule", "form", "break_it"), BREAKS, ids=[each[2].__name__ for each in BREAKS])
def test_a_broken_rule_says_so(rule: str, form: str, break_it: Callable[[Manifests], None]) -> None:
    manifests = build(form)
    break_it(manifests)
    assert {each.split(":")[0] for each in violations(manifests)} == {rule}


def test_every_rule_is_broken_once() -> None:
    assert {rule for rule, _, _ in BREAKS} == RULES.keys()


def test_two_containers_of_a_sidecar_wait_by_the_startup_probe_alone() -> None:
    """The native form is enough by itself: `LMC_WAIT_FOR_SERVER` is the second belt."""
    manifests = build("sidecar")
    no_wait(manifests)
    assert violations(manifests) == []
