"""From config to plan: layers, overrides, edges, start order, placement, and what is made of a plan."""

import types
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.runtime import assembly, check, graph, plugin
from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.errors import ConfigError, PluginError
from antiphon.runtime.plan import start_order
from antiphon.runtime.plugin import Options, Plugin
from antiphon.runtime.quantities import Bytes


class Tone(Plugin[Options]):
    kind = "tone"


class LoudOptions(Options, frozen=True):
    level: int = 3
    room: Bytes = 0


class Loud(Tone, Plugin[LoudOptions]):
    gives = frozenset({"noise"})


class Soft(Tone):
    pass


class PaceOptions(Options, frozen=True):
    beats: int
    tone: dict[str, Any] = msgspec.field(default_factory=dict)


class Pace(Plugin[PaceOptions]):
    kind = "pace"


class SingerOptions(Options, frozen=True):
    voices: int = 1


class Singer(Actor[SingerOptions]):
    kind = "singer"
    plugs = ("tone", "pace")
    defaults = {"tone": "soft", "pace": "steady"}  # noqa: RUF012 - as an actor declares it
    uses = ("organ",)
    sections = ("hall",)
    stand_in = "soft"


class Steady(Pace, Plugin[Options]):
    pass


class Organ(Actor[Options]):
    kind = "organ"
    provides = ("air",)

    @classmethod
    def crossing(cls, kind: str, options: dict[str, Any], sections: dict[str, Any]) -> str:
        return f"for the {kind}: {sections['hall'].seats} bytes a row"


class Bellows(Actor[Options]):
    kind = "bellows"
    requires = ("air",)


class Hall(Options, frozen=True):
    seats: int = 12


REGISTERED: dict[str, dict[str, Any]] = {
    "actor": {"singer": Singer, "organ": Organ, "bellows": Bellows},
    "tone": {"loud": Loud, "soft": Soft},
    "pace": {"pace": Pace, "steady": Steady},
    "section": {"hall": Hall},
    "preset": {},
}


@pytest.fixture(autouse=True)
def choir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two actors, two kinds of plugin, a section and a preset, as if they were installed."""
    preset = tmp_path / "presets" / "duo.toml"
    preset.parent.mkdir()
    preset.write_text(DUO)
    registered = {**REGISTERED, "preset": {"duo": preset}}

    def resource(kind: str, name: str) -> Any:
        if name not in registered.get(kind, {}):
            raise PluginError(f"no {kind} plugin named {name!r}")
        return registered[kind][name]

    def find(kind: str, name: str, base: Path | None = None) -> Any:
        return plugin.accept(kind, name, resource(kind, name))

    monkeypatch.setattr(plugin, "kinds", lambda: {k: sorted(v) for k, v in registered.items()})
    monkeypatch.setattr(plugin, "resource", resource)
    monkeypatch.setattr(plugin, "find", find)
    return tmp_path


DUO = """
schema = 1
delivery = "direct"

[hall]
seats = 80

[actors.singer]
plugin = "loud"
options = { voices = 2, level = 5, pace = { plugin = "pace", beats = 4 } }
uses = ["organ"]
cell = "loft"

[actors.organ]
cell = "loft"
"""


def problems(error: pytest.ExceptionInfo[ConfigError]) -> list[str]:
    return [str(p) for p in error.value.problems]


# ---- layers


def test_a_preset_is_a_plan() -> None:
    plan = graph.load("duo")
    assert plan.file == "preset duo"
    assert plan.delivery == "direct"
    assert plan.sections == {"hall": {"seats": 80}}
    assert plan.actors["singer"].edges == {"organ": "organ"}
    assert plan.cells["loft"].actors == ["organ", "singer"]
    assert plan.cell_of("singer") == "loft"


def test_tables_merge_key_by_key_and_lists_replace(choir: Path) -> None:
    path = choir / "mine.toml"
    path.write_text("""
        extends = "duo"
        [actors.organ2]
        kind = "organ"
        [actors.singer]
        uses = ["organ2"]
        options = { level = 9, pace = { beats = 8 } }
    """)
    singer = graph.load(path).actors["singer"]
    assert singer.options == {"voices": 2, "level": 9, "pace": {"plugin": "pace", "beats": 8}}
    assert singer.edges == {"organ": "organ2"}
    assert singer.plugin == "loud"


def test_options_go_with_the_plugin_they_were_written_for() -> None:
    plan = graph.from_text("""
        extends = "duo"
        [actors.singer]
        plugin = "soft"
        options = { pace = { plugin = "steady" } }
    """)
    assert plan.actors["singer"].options == {"voices": 2, "pace": {"plugin": "steady"}}
    check.check(plan)


def test_a_file_extends_a_file_and_plugin_files_stay_where_they_were_named(choir: Path) -> None:
    (choir / "deep").mkdir()
    (choir / "deep" / "low.toml").write_text('extends = "duo"\n[actors.singer]\nplugin = "./mine.py:Mine"')
    (choir / "top.toml").write_text('extends = "./deep/low.toml"\n[hall]\nseats = 7')
    plan = graph.load(choir / "top.toml")
    assert plan.actors["singer"].plugin == str(choir / "deep" / "mine.py:Mine")
    assert plan.base == str(choir)
    assert plan.sections["hall"] == {"seats": 7}


def test_a_file_that_extends_itself_is_refused(choir: Path) -> None:
    (choir / "a.toml").write_text('extends = "./b.toml"')
    (choir / "b.toml").write_text('extends = "./a.toml"')
    with pytest.raises(ConfigError) as error:
        graph.load(choir / "a.toml")
    assert "extends: goes round in a circle" in problems(error)[0]
    assert problems(error)[0].count("b.toml") >= 2


def test_every_problem_names_the_file_that_wrote_the_key(choir: Path) -> None:
    path = choir / "mine.toml"
    path.write_text('extends = "duo"\n[hall]\nseats = "many"\n[actors.singer]\nplugin = "loud"')
    with pytest.raises(ConfigError) as error:
        check.examine(path, ["actors.singer.options.pace.beats=x", "actors.singer.options.voices=none"])
    assert [(p.file, p.key) for p in error.value.problems] == [
        ("--set", "actors.singer.options.voices"),
        ("--set", "actors.singer.options.pace.beats"),
        (str(path), "hall.seats"),
    ]
    low = graph.from_text('extends = "duo"\n[actors.singer]\noptions = { pace = { plugin = "steady" } }', file="top")
    assert "actors.singer.options.level" in low.origins
    assert "actors.singer.options.pace.beats" not in low.origins


# ---- overrides


def test_an_override_is_a_toml_value_or_else_a_string() -> None:
    plan = graph.load("duo", ["hall.seats=3", "actors.singer.cell=nave", "actors.singer.options.pace={plugin='steady'}",
                              "delivery=zmq", "deadlines.stop=30s", "log.prompts=true"])
    assert plan.sections["hall"] == {"seats": 3}
    assert plan.cell_of("singer") == "nave"
    assert plan.actors["singer"].options["pace"] == {"plugin": "steady"}
    assert (plan.delivery, plan.deadlines.stop, plan.log.prompts) == ("zmq", 30.0, True)


def test_a_plugin_file_on_the_command_line_is_relative_to_where_one_stands(
    choir: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(choir)
    plan = graph.load("duo", ["actors.singer.plugin=./mine.py:Mine"])
    assert plan.actors["singer"].plugin == str(choir / "mine.py:Mine")


@pytest.mark.parametrize(("override", "message"), [
    ("actors.signer.plugin=loud", "--set: actors.signer.plugin: no actor named 'signer'. Did you mean 'singer'?"),
    ("hal.seats=3", "--set: hal.seats: no key named 'hal'. Did you mean 'hall'?"),
    ("cells.nave.listen=x", "--set: cells.nave.listen: no cell named 'nave'. Accepted: loft"),
    ("hall.seats.left=3", "--set: hall.seats.left: hall.seats is 80 (an integer). Only a table has keys below it"),
    ("extends=duo", "--set: extends: cannot be overridden"),
    ("hall.seats", "--set: hall.seats: is no assignment. Write a.b.c=value"),
    ("hall..seats=3", "--set: hall..seats=3: is no assignment. Write a.b.c=value"),
])
def test_an_override_of_what_is_not_there_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        graph.load("duo", [override])
    assert problems(error)[0].startswith(message)


# ---- plans


def test_a_plan_survives_json() -> None:
    plan = graph.load("duo", ["hall.seats=3"])
    assert msgspec.json.decode(msgspec.json.encode(plan), type=graph.Plan, strict=True) == plan


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        check.examine(layer("""
            schema = 2
            delivery = "pigeon"
            [choir]
            [actors.singer]
            plugn = "loud"
            uses = ["orgel"]
            [actors.organ]
            cell = "front door"
            [deadlines]
            start = 5
            [log]
            level = "loud"
        """))
    found = "\n".join(problems(error))
    for part in ("schema: found 2", "delivery: found \"pigeon\"", "choir: unknown table or key", "plugn: unknown key",
                 "no actor named 'orgel'. Did you mean 'organ'?", "the name 'front door'", "deadlines.start: found 5",
                 'log.level: found "loud" (a string). Write one of "debug", "info", "warning", "error"'):
        assert part in found


def layer(text: str) -> Any:
    from antiphon.runtime.layers import parse
    from antiphon.runtime.tables import Findings

    return parse(text, "config", Path.cwd(), Findings("config"))


def test_an_actor_without_plugin_takes_its_default() -> None:
    plan = graph.from_text('[actors.singer]\nuses = ["organ"]\n[actors.organ]\n')
    assert plan.actors["singer"].plugin == "soft"
    assert plan.cells["main"].actors == ["organ", "singer"]


def test_cells_and_actors_start_used_before_user() -> None:
    plan = graph.load("duo", ["actors.singer.cell=nave"])
    assert list(plan.cells) == ["loft", "nave"]
    assert start_order({"a": ["b", "c"], "b": ["c"], "c": []}) == (["c", "b", "a"], [])
    assert start_order({"a": ["b"], "b": ["a"]})[1] == [["a", "b", "a"]]


def test_what_provides_a_service_starts_before_what_requires_it() -> None:
    plan = graph.from_text("[actors.bellows]\n[actors.organ]\n")
    assert plan.cells["main"].actors == ["organ", "bellows"]


def test_a_degraded_plan_runs_the_stand_in_without_the_plugins_options() -> None:
    plan = graph.degrade(graph.load("duo", ["actors.singer.on_failure=degrade"]), "singer")
    singer = plan.actors["singer"]
    assert (singer.plugin, singer.options, singer.on_failure) == ("soft", {"voices": 2}, "restart")
    check.check(plan)
    with pytest.raises(ConfigError, match="no plain stand-in"):
        graph.degrade(plan, "organ")


def test_a_gathered_plan_has_one_cell() -> None:
    plan = graph.gather(graph.load("duo", ["actors.singer.cell=nave"]))
    assert {name: cell.actors for name, cell in plan.cells.items()} == {"main": ["organ", "singer"]}
    assert plan.cell_of("singer") == "main"


def test_an_edge_that_leaves_its_cell_is_noted_with_its_cost() -> None:
    assert check.check(graph.load("duo")) == []
    notes = check.check(graph.load("duo", ["actors.singer.cell=nave"]))
    assert [str(n) for n in notes] == ["singer -> organ: leaves cell nave for loft: for the singer: 80 bytes a row"]


def test_a_service_must_be_in_the_cell_once() -> None:
    two = '[actors.bellows]\ncell = "a"\n[actors.organ]\ncell = "b"\n[actors.organ2]\nkind = "organ"\ncell = "b"'
    with pytest.raises(ConfigError) as error:
        check.check(graph.from_text(two))
    twice, elsewhere = problems(error)
    assert twice == ("config: actors.organ2.cell: organ and organ2 both provide 'air' in cell 'b'. "
                     "Give one of them a cell of its own")
    assert elsewhere == ("config: actors.bellows.cell: a bellows must share its cell with what provides 'air'; it is "
                         "in cell 'a', and 'air' comes from organ and organ2 in cell 'b'. Write cell = \"b\"")


def test_plugins_inside_a_plugins_options_are_checked_like_any_other() -> None:
    with pytest.raises(ConfigError) as error:
        check.check(graph.load("duo", ["actors.singer.options.pace.tone={plugin='loud', level='x'}"]))
    assert problems(error) == ['--set: actors.singer.options.pace.tone.level: found "x" (a string). Write an integer']


# ---- assembly


def place() -> ActorSite:
    nowhere: Any = types.SimpleNamespace()
    return ActorSite("singer", nowhere, nowhere, {"organ": "organ"}, lambda *_: None)


def test_build_shares_out_options_and_makes_the_plugins() -> None:
    plan = graph.load("duo", ["actors.singer.options.room=1KiB"])
    site = place()
    actor = assembly.build(plan, "singer", site)
    assert isinstance(actor, Singer)
    assert actor.options == SingerOptions(voices=2)
    assert site.plugin("tone").options == LoudOptions(level=5, room=1024)
    assert site.plugin("pace").options == PaceOptions(beats=4)
    assert site.section("hall") == Hall(seats=80)
    assert isinstance(site.build("tone", {"plugin": "loud", "level": 1}), Loud)
    with pytest.raises(ConfigError, match=r"unknown key 'lvl'\. Did you mean 'level'\?"):
        site.build("tone", {"plugin": "loud", "lvl": 1})


def test_build_takes_defaults_for_kinds_that_are_not_named() -> None:
    site = place()
    assembly.build(graph.from_text('[actors.singer]\nuses = ["organ"]\n[actors.organ]\n'), "singer", site)
    assert isinstance(site.plugin("tone"), Soft)
    assert isinstance(site.plugin("pace"), Steady)
    assert site.section("hall") == Hall()


def test_actor_class_refuses_what_is_no_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = graph.load("duo")
    assert assembly.actor_class(plan, "organ") is Organ
    monkeypatch.setattr(plugin, "resource", lambda _kind, _name: Hall)
    with pytest.raises(PluginError, match="not a subclass of Actor"):
        assembly.actor_class(plan, "organ")
