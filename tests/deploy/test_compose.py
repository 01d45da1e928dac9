"""The compose files: of the right form, and what they promise about memory, waiting and stopping."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from tests.launcher.harness import REPOSITORY
from xkv_lmcache.gateway_settings import GatewaySettings
from xkv_lmcache_autostart.settings import Settings, load

FILES = ("compose.yaml", "compose.sidecar.yaml")
_VARIABLE = re.compile(r"\$\{(\w+)(:-)?([^${}]*)\}")

Document = dict[str, Any]


def read(name: str, **variables: str) -> Document:
    """A compose file with its variables filled in, as Compose does it."""
    text = (REPOSITORY / "docker" / name).read_text()
    while _VARIABLE.search(text):
        text = _VARIABLE.sub(lambda found: variables.get(found[1]) or found[3], text)
    document: Document = yaml.safe_load(text)
    return document


def validate(document: Document) -> None:
    parsed = PyCompose.from_yaml(yaml.safe_dump(document))
    parsed.validate()


def services(document: Document, *, of: str) -> Document:
    """The services of a profile."""
    return {name: each for name, each in document["services"].items() if of in each["profiles"]}


@pytest.mark.parametrize("name", FILES)
def test_compose_takes_it(name: str) -> None:
    document = read(name, MODEL="/models/m")
    validate(document)

    def unknown_key(broken: Document) -> None:
        broken["services"]["gateway"]["ipcc"] = "host"

    def bad_restart(broken: Document) -> None:
        broken["services"]["gateway"]["restart"] = "sometimes"

    def no_duration(broken: Document) -> None:
        broken["services"]["gateway"]["stop_grace_period"] = "soon"

    breaks: tuple[Callable[[Document], None], ...] = (unknown_key, bad_restart, no_duration)
    for break_it in breaks:
        broken = read(name, MODEL="/models/m")
        break_it(broken)
        with pytest.raises(ValueError, match="services"):
            validate(broken)


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
@pytest.mark.parametrize("name", FILES)
def test_who_shares_what(name: str, profile: str) -> None:
    document = read(name, MODEL="/m")
    found = services(document, of=profile)
    assert len(found) == (2 if name == "compose.yaml" else 3)
    known = {f"LMC_{field.upper()}" for field in Settings.model_fields}
    known |= {f"XKV_GATEWAY_{field.upper()}" for field in GatewaySettings.model_fields}
    for service_name, service in found.items():
        assert service["network_mode"] == "host", service_name
        assert not any("/dev/shm" in volume for volume in service.get("volumes", [])), service_name
        values = service["environment"]
        assert set(values) - known <= {"PYTHONHASHSEED"}
        grace = float(service["stop_grace_period"].removesuffix("s"))
        assert grace >= float(values.get("LMC_STOP_S", 10)) + 10, service_name
        sources = [volume.split(":")[0] for volume in service.get("volumes", [])]
        assert all(source.startswith("/") or source in document["volumes"] for source in sources)
        for other in service.get("depends_on", {}):
            assert other in found, service_name
    clients = [each for each in found.values() if "LMC_XKV_PORT" in each["environment"]]
    assert len(clients) == 1
    for service, variable in ((found["gateway"], "XKV_GATEWAY_SHM_DIR"), (clients[0], "LMC_XKV_SHM_DIR")):
        assert f"shm-dir:{service['environment'][variable]}" in service["volumes"]
    vllm = found["vllm" if profile == "gpu" else "vllm-cpu"]
    assert ("deploy" in vllm) == (profile == "gpu")
    if name == "compose.yaml":
        assert vllm["environment"]["LMC_ENABLE"] == "1"
        assert vllm["shm_size"] == "8gb"
    else:
        assert vllm["environment"]["LMC_WAIT_FOR_SERVER"] == "1"
        server = found["lmcache" if profile == "gpu" else "lmcache-cpu"]
        assert server["entrypoint"][-1] == "--exec"
        # One /dev/shm for both.
        assert (server["ipc"], vllm["ipc"]) == ("host", "host")
        assert ("deploy" in server) == (profile == "gpu")


@pytest.mark.parametrize("name", FILES)
def test_the_settings_are_taken(name: str) -> None:
    for profile in ("gpu", "cpu"):
        for service in services(read(name, MODEL="org/model"), of=profile).values():
            values = {key: value for key, value in service["environment"].items() if key.startswith("LMC_")}
            configuration = load({key: str(value) for key, value in values.items()}, {})
            assert configuration.warnings == ()
