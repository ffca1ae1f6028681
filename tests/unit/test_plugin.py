"""Plugins: found by name or by file, and refused with the reason where they do not fit."""

import sys
from pathlib import Path

import pytest

from antiphon.runtime.errors import PluginError
from antiphon.runtime.plugin import Options, Plugin, accept, find, kinds, package_of, resource

SOURCE = '''
from antiphon.runtime.plugin import Options, Plugin

class Trick(Plugin[Options]):
    kind = "trick"

class Wanted(Options, frozen=True):
    size: int = 1

class Mine(Trick, Plugin[Wanted]):
    """A trick."""

class Old(Trick):
    api = 0

class Other(Plugin[Options]):
    kind = "other"

class Foreign:
    pass

value = 7
'''


class Contract(Plugin[Options]):
    kind = "contract"
    api = 2


class Fits(Contract):
    pass


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_a_file_is_found_relative_to_the_config_that_names_it(file: Path) -> None:
    found = find("trick", "./mine.py:Mine", file.parent)
    assert found.__name__ == "Mine"
    assert find("trick", f"{file}:Mine") is found, "a file is loaded once, however it is named"
    (file.parent / "inner").mkdir()
    assert find("trick", "../mine.py:Mine", file.parent / "inner") is found
    assert found.options_type.__name__ == "Wanted"


def test_two_files_of_the_same_name_are_two(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(SOURCE)
    one, two = (find("trick", "./mine.py:Mine", tmp_path / folder) for folder in ("one", "two"))
    assert one is not two


@pytest.mark.parametrize(("name", "message"), [
    ("./gone.py:Mine", "there is no file"),
    ("./mine.py:Gone", "has no 'Gone'"),
    ("./mine.py:value", "is 7, not a subclass of Plugin"),
    ("./mine.py:Foreign", "not a subclass of Plugin"),
    ("./mine.py:Other", "is a other, not a trick"),
    ("./mine.py:Old", "was written for trick api 0; this Antiphon has api 1"),
    ("mine.py:Mine", "write an installed plugin's name or './file.py:Class'"),
    ("package.module:Mine", "write an installed plugin's name or './file.py:Class'"),
    ("./mine.txt:Mine", "write an installed plugin's name or './file.py:Class'"),
    ("os:system", "write an installed plugin's name or './file.py:Class'"),
])
def test_a_file_that_does_not_fit_is_refused_with_the_reason(file: Path, name: str, message: str) -> None:
    with pytest.raises(PluginError, match=message.replace("(", r"\(")):
        find("trick", name, file.parent)


@pytest.mark.parametrize(("source", "cause"), [
    ("import no_such_module_here", "ModuleNotFoundError"),
    ("def broken(:", "SyntaxError"),
    ("1 / 0", "ZeroDivisionError"),
])
def test_a_file_that_fails_to_load_says_why_and_leaves_nothing(tmp_path: Path, source: str, cause: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(source)
    before = set(sys.modules)
    with pytest.raises(PluginError, match=f"bad.py does not load: {cause}"):
        find("trick", "./bad.py:Mine", tmp_path)
    assert not [name for name in set(sys.modules) - before if "bad" in name]
    path.write_text(SOURCE)
    assert find("trick", "./bad.py:Mine", tmp_path).__name__ == "Mine", "mended, it loads"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package, as pip would install it."""
    info = tmp_path / "somebody_else-3.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody-else\nVersion: 3.2\n")
    (info / "entry_points.txt").write_text(
        "[antiphon.contract]\nfits = somebody_else_of_these_tests:Fits\ngone = no_such_module_here:X\n"
        "nameless = json:no_such_name\ntext = json:__doc__\n"
        "[antiphon.thing]\nthing = json:dumps\n[elsewhere.contract]\nx = json:dumps\n")
    (tmp_path / "somebody_else_of_these_tests.py").write_text(
        "from antiphon.runtime.plugin import Options, Plugin\n"
        "class Contract(Plugin[Options]):\n    kind = 'contract'\nclass Fits(Contract):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_an_installed_plugin_is_found_by_its_name() -> None:
    assert find("contract", "fits").__name__ == "Fits"
    assert resource("thing", "thing").__name__ == "dumps"
    assert kinds()["contract"] == ["fits", "gone", "nameless", "text"]
    assert kinds()["thing"] == ["thing"]
    assert package_of("contract", "fits") == "somebody-else 3.2"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "message"), [
    ("fit", "no contract plugin named 'fit'; installed: fits, gone, nameless, text"),
    ("gone", "'gone' .*does not load: ModuleNotFoundError"),
    ("nameless", "'nameless' .*does not load: AttributeError"),
    ("text", "not a subclass of Plugin"),
    ("", "no contract plugin named ''"),
])
def test_an_installed_plugin_that_does_not_fit_is_refused(name: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        find("contract", name)


@pytest.mark.usefixtures("installed")
def test_a_kind_without_plugins_says_so() -> None:
    with pytest.raises(PluginError, match="no nothing plugin named 'x'; installed: none"):
        find("nothing", "x")


def test_the_version_is_that_of_the_contract_not_of_the_class() -> None:
    assert accept("contract", "x", Fits) is Fits
    with pytest.raises(PluginError, match="written for contract api 3; this Antiphon has api 2"):
        accept("contract", "x", type("New", (Contract,), {"api": 3}))


def test_options_refuse_unknown_fields_and_do_not_change() -> None:
    import msgspec

    class Wanted(Options, frozen=True):
        size: int = 1

    class Sized(Contract, Plugin[Wanted]):
        pass

    assert Sized.options_type is Wanted
    assert type("Heir", (Sized,), {}).options_type is Wanted
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"sise": 2}, Wanted)
    with pytest.raises(AttributeError):
        Wanted().size = 2  # type: ignore[misc]


def test_every_plugin_of_this_package_loads_through_the_same_door() -> None:
    for kind, names in kinds().items():
        for name in names:
            if kind in ("actor", "section", "preset", "command"):
                resource(kind, name)
            else:
                assert find(kind, name).kind == kind
            assert package_of(kind, name).startswith("antiphon ")
    assert package_of("drafter", "./mine.py:Mine") == "a file"
