"""What is wrong with settings, whoever reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SettingProblem:
    """One thing wrong with one setting."""

    source: str
    """Variable, option or key of a file, as the user wrote it."""
    value: str | None
    """The text it has; None where it is secret or there is none."""
    message: str
    """What is wrong and the cure."""

    def __str__(self) -> str:
        return (
            f"{self.source}: {self.message}"
            if self.value is None
            else f"{self.source}={self.value!r} {self.message}"
        )


class SettingsError(Exception):
    """Everything that is wrong with the settings."""

    def __init__(self, problems: Iterable[SettingProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
