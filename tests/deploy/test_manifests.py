"""Every form builds, and is what three versions of Kubernetes take."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

from tests.deploy.manifests import FORMS, K8S, build, containers, pod_template
from tests.deploy.policy import GIB, SERVER_GIB, quantity

# It reads the definitions of all of Kubernetes again for each manifest.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)

VERSIONS = ("1.35", "1.36", "1.37")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("form", FORMS)
def test_follows_the_schemas(form: str, version: str) -> None:
    for manifest in build(form):
        assert kubernetes_validate.validate(manifest, version, strict=True) == version


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_know_what_is_wrong(version: str) -> None:
    (workload,) = [each for each in build("sidecar") if each["kind"] == "Deployment"]
    for path, value in (
        (("initContainers", 0, "restartPolicie"), "Always"),
        (("initContainers", 0, "startupProbe", "exec", "command"), "text"),
        (("terminationGracePeriodSeconds",), "sixty"),
    ):
        broken = copy.deepcopy(workload)
        place = broken["spec"]["template"]["spec"]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(broken, version, strict=True)


def test_every_folder_is_a_form() -> None:
    found = {
        str(path.parent.relative_to(K8S))
        for path in K8S.rglob("kustomization.yaml")
        if yaml.safe_load(path.read_text())["kind"] == "Kustomization"
    }
    assert found == set(FORMS)


def test_the_sidecar_is_native() -> None:
    (workload,) = [each for each in build("sidecar") if each["kind"] == "Deployment"]
    (server,) = workload["spec"]["template"]["spec"]["initContainers"]
    assert server["restartPolicy"] == "Always"
    assert server["startupProbe"]["exec"]["command"][-1] == "server"


@pytest.mark.parametrize("form", ["sidecar", "node", "cpu/sidecar"])
def test_the_transfer_config_is_the_launchers(form: str) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "xkv_lmcache_autostart", "--print", "kv-transfer-config"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (vllm,) = [
        each
        for manifest in build(form)
        if manifest["metadata"]["name"] == "model" and (template := pod_template(manifest))
        for each in containers(template["spec"])
        if each["name"] == "vllm"
    ]
    config = vllm["args"][vllm["args"].index("--kv-transfer-config") + 1]
    assert json.loads(config) == json.loads(printed)


def test_the_operators_engine_keeps_to_the_rules() -> None:
    """It is no pod, so that `policy.py` does not see it."""
    spec = yaml.safe_load((K8S / "operator" / "lmcacheengine.yaml").read_text())["spec"]
    params = spec["l2Backend"]["raw"]["config"]["adapter_params"]
    ring = params.get("batch_slots", 1024) * params.get("fragment_bytes", 131072)
    needed = (spec["l1"]["sizeGB"] + SERVER_GIB) * GIB + ring
    resources = spec["resourceOverrides"]
    assert quantity(resources["limits"]["memory"]) >= needed
    assert not {"nvidia.com/gpu"} & (resources["limits"].keys() | resources["requests"].keys())
    assert spec["l2Backend"].get("prefetchPolicy", "default") == "default"
    assert {"name": "PYTHONHASHSEED", "value": "0"} in spec["env"]
    (host_ip,) = [each for each in spec["env"] if each["name"] == "HOST_IP"]
    assert host_ip["valueFrom"]["fieldRef"]["fieldPath"] == "status.hostIP"
    assert params["host"] == "$(HOST_IP)"
    mounts = {each["mountPath"]: each["name"] for each in spec["volumeMounts"]}
    sources = {each["name"]: each for each in spec["volumes"]}
    gateway = build("base")
    (own,) = [
        volume["hostPath"]["path"]
        for manifest in gateway
        if (template := pod_template(manifest))
        for volume in template["spec"]["volumes"]
        if volume["name"] == "shm-dir"
    ]
    assert sources[mounts[params["shm_dir"]]]["hostPath"]["path"] == own
    assert "secret" in sources[mounts[str(Path(params["token_file"]).parent)]]


def test_the_operators_engine_names_the_plugin_as_the_launcher_does() -> None:
    engine = yaml.safe_load((K8S / "operator" / "lmcacheengine.yaml").read_text())
    raw = engine["spec"]["l2Backend"]["raw"]
    printed = subprocess.run(
        [sys.executable, "-m", "xkv_lmcache_autostart", "--print", "l2-adapter", "--xkv-port", "5557"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    ours = json.loads(printed)
    assert raw["type"] == ours["type"]
    assert {key: raw["config"][key] for key in ("module_path", "class_name")} == {
        key: ours[key] for key in ("module_path", "class_name")
    }
    subprocess.run(
        [sys.executable, "-m", "xkv_lmcache_autostart", "--print", "l2-adapter"],
        env={"LMC_XKV_PARAMS": json.dumps({**raw["config"]["adapter_params"], "host": "10.0.0.1"})},
        capture_output=True,
        check=True,
    )
