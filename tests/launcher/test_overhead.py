"""A command that wants no server pays next to nothing for the launcher in front of it."""

from demo.overhead import overhead_ms


def test_the_launcher_adds_less_than_150_ms() -> None:
    launched_ms, plain_ms = overhead_ms(rounds=9)
    assert launched_ms - plain_ms < 150
