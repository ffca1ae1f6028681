"""What README promises is what CI runs."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def commands() -> list[str]:
    """Shell lines of README."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_ci_runs_the_readmes_test_command_word_for_word() -> None:
    tests = [c for c in commands() if c.endswith("pytest")]
    assert len(tests) == 1
    assert tests[0] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_every_dependency_has_its_line_of_reason() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    table = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in wanted:
        name = re.match(r"[\w-]+", requirement)
        assert name is not None
        assert re.search(rf"^\|.*\b{name[0]}\b", table, re.MULTILINE), f"{name[0]} has no line in docs/dependencies.md"


def test_readme_names_only_commands_that_exist() -> None:
    from antiphon.runtime.plugin import kinds

    verbs = set(kinds()["command"])
    used = {m for line in commands() for m in re.findall(r"antiphon (?!\")([a-z]+)", line)}
    assert used <= verbs, used - verbs
