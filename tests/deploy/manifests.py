"""The manifests as a cluster would get them: built by kubectl's kustomize, from a package."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.launcher.harness import REPOSITORY

K8S = REPOSITORY / "k8s"
FORMS = ("base", "block", "cpu/in-pod", "cpu/sidecar", "in-pod", "node", "sidecar")
"""Every folder that can be applied."""

Manifest = dict[str, Any]


@functools.cache
def _text(form: str) -> str:
    kubectl = Path(sys.executable).parent / "kubectl"
    done = subprocess.run([kubectl, "kustomize", K8S / form], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(form: str) -> list[Manifest]:
    """The manifests of a form, as new objects each time."""
    return list(yaml.safe_load_all(_text(form)))


def pod_template(manifest: Manifest) -> Manifest | None:
    """The template of a workload's pods."""
    template = manifest.get("spec", {}).get("template")
    return template if isinstance(template, dict) else None


def containers(pod: Manifest) -> Iterator[Manifest]:
    """All of a pod's, init containers first."""
    yield from pod.get("initContainers", [])
    yield from pod["containers"]


def environment(container: Manifest) -> dict[str, str]:
    """Its variables; one that the cluster fills in is its source as JSON."""
    return {
        each["name"]: each["value"] if "value" in each else json.dumps(each["valueFrom"], sort_keys=True)
        for each in container.get("env", [])
    }
