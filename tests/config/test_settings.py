"""Configs become frozen dataclasses, and mistakes in them are reported by name."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from typing import get_type_hints

import pytest
from absl import flags
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict, config_flags

from coa_jax.config.fields import field_annotations, is_sparse, parts, without_none
from coa_jax.config.overrides import _OPEN, check_key, read_tuple, readable_overrides
from coa_jax.config.renamed import REMOVED, RENAMED, with_present_keys
from coa_jax.distillation.synthesis.closed_book import ClosedBookConfig
from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.evaluation.config import EvaluateConfig
from coa_jax.run.command import load_config, overridden
from coa_jax.run.settings import build_config, changes_of, complete_config, plain
from coa_jax.serve.config import ServeConfig
from coa_jax.train.config import DPOConfig, FitConfig, RFTConfig, SFTConfig
from coa_jax.train.defaults import with_defaults
from coa_jax.train.rl_config import RLConfig, RLRun


@dataclasses.dataclass(frozen=True)
class Inner:
    width: int
    sizes: tuple[int, ...] = (1, 2)


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    other: Inner = dataclasses.field(default_factory=lambda: Inner(7))


VALUES = {"name": "a", "inner": {"width": 3, "sizes": [4, 5]}}


@pytest.mark.parametrize("values", [VALUES, ConfigDict(VALUES)], ids=["mapping", "ConfigDict"])
def test_groups_become_dataclasses_and_lists_become_tuples(values):
    built = build_config(Outer, values)
    assert built == Outer("a", Inner(3, (4, 5)), {}, Inner(7))
    assert hash(built.inner) == hash(Inner(3, (4, 5)))


def test_all_mistakes_of_a_config_are_told_at_once():
    values = {"engine": {"slots": -1, "slotz": 1}, "optimizer": {"clip_norm": 0.0}, "groups": -1}
    with pytest.raises(UserError) as raised:
        build_config(RLConfig, {"model": "a", **values})
    parts = str(raised.value).split(" | ")
    keys = ("engine.slotz", "engine.slots", "optimizer.clip_norm", "tasks", "groups")
    assert {part.split()[0] for part in parts} == {f"config.{key}" for key in keys}


def test_a_table_that_is_no_group_stays_a_table():
    assert build_config(Outer, {**VALUES, "table": {"x": 1}}).table == {"x": 1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {**VALUES, "nmae": "b"},
            r"config\.nmae is not a setting; did you mean 'name'\?",
        ),
        ({"name": "a"}, r"config\.inner is missing; give it in the config file"),
        ({**VALUES, "inner": {}}, r"config\.inner\.width is missing"),
        ({**VALUES, "inner": {"width": 1, "hieght": 2}}, r"config\.inner\.hieght is not a setting"),
        ({**VALUES, "inner": 3}, r"config\.inner is 3; it is a group of settings: width, sizes"),
        ({**VALUES, "inner": None}, r"config\.inner is None; it is a group"),
    ],
)
@pytest.mark.parametrize("form", [dict, ConfigDict])
def test_mistakes_name_the_setting(form, values, message):
    with pytest.raises(UserError, match=message):
        build_config(Outer, form(values))


def test_the_place_of_a_part_is_named():
    with pytest.raises(UserError, match=r"config\.rl\.width is missing"):
        build_config(Inner, {}, "config.rl")


@dataclasses.dataclass(frozen=True)
class Hosts:
    names: tuple[str, ...] = ()
    widths: tuple[int, ...] = (1,)


def leaves(config, prefix=""):
    for name, value in config.items():
        if isinstance(value, ConfigDict) and len(value):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_a_run_of_rl_has_at_most_150_settings():
    """Settings of groups that are off, such as graders, count once for each group."""
    assert len(set(leaves(with_defaults("rl", {})))) <= 150


def test_a_group_of_what_is_off_holds_only_what_is_set():
    config = with_defaults("rl", {"model": "m", "tasks": "t"})
    assert config.graders.judge.chat.to_dict() == config.algorithm.to_dict() == {}
    usual = RLConfig(model="m", tasks="t")
    words = ("algorithm.name=dapo", "algorithm.clip_high=0.3", "stops.length=mask")
    words += ("graders.judge.chat.url=http://h/v1", "graders.judge.chat.model=j")
    given = overridden(config, [f"--config.{word}" for word in words])
    built = build_config(RLRun, given)
    assert (built.algorithm.name, built.algorithm.clip_high) == ("dapo", 0.3)
    assert built.algorithm == dataclasses.replace(usual.algorithm, name="dapo", clip_high=0.3)
    assert built.stops == dataclasses.replace(usual.stops, length="mask")
    # What is not set has the defaults of this judge, and not those of other chat models.
    judge = dataclasses.replace(usual.graders.judge.chat, url="http://h/v1", model="j")
    assert built.graders.judge.chat == judge and judge.max_tokens == 512
    # A file that is written out holds only what was set, too.
    again = complete_config(RLRun, given)
    assert again.algorithm.to_dict() == {"name": "dapo", "clip_high": 0.3}
    assert build_config(RLRun, again) == built


@pytest.mark.parametrize("key", ["stops.length", "tools.wiki_search.encoder.query_prefix"])
def test_a_command_line_can_set_a_text_that_looks_like_a_number(key):
    config = overridden(with_defaults("rl", {"model": "m", "tasks": "t"}), [f"--config.{key}=-0.5"])
    assert functools.reduce(getattr, key.split("."), build_config(RLRun, config)) == "-0.5"


@pytest.mark.parametrize("argument", ["--config.=3", "--config.", "--config.format_reward=yes"])
def test_an_override_without_a_key_or_with_a_wrong_bool_is_an_error_of_the_user(argument):
    with pytest.raises(UserError, match=argument.partition("=")[0]):
        overridden(with_defaults("rl", {"model": "m", "tasks": "t"}), [argument])


def test_the_value_of_an_option_may_begin_with_dashes():
    key = "--config.task_options.answer_after"
    given = overridden(with_defaults("rl", {"model": "m", "tasks": "t"}), [f"{key}=---"])
    assert given.task_options.answer_after == "---"
    with pytest.raises(UserError, match="answer_after needs a value"):
        overridden(with_defaults("rl", {"model": "m", "tasks": "t"}), [key, "--config.seed=1"])


def sparse_fields(cls):
    for name, annotation in field_annotations(cls).items():
        kind, _ = parts(without_none(annotation))
        if is_sparse(annotation):
            yield name
        if dataclasses.is_dataclass(kind):
            yield from sparse_fields(kind)


@pytest.mark.parametrize("cls", [RLRun, SFTConfig, EvaluateConfig])
def test_a_command_line_can_set_every_group_of_what_is_off(cls):
    assert {name for name in sparse_fields(cls) if not _OPEN.fullmatch(name)} == set()


def test_a_loaded_config_takes_further_settings_only_in_groups_of_what_is_off():
    config = load_config("configs/rl/factbook.py")
    config.algorithm.clip_high, config.graders.judge.chat.model = 0.3, "j"
    assert build_config(RLRun, config).algorithm.clip_high == 0.3
    with pytest.raises(AttributeError, match='"slotz"'):
        config.engine.slotz = 3


@pytest.mark.parametrize("former", [*RENAMED, *REMOVED])
def test_a_former_key_says_what_to_write(former):
    told = RENAMED.get(former) or REMOVED[former]
    *groups, name = former.split(".")
    config = {}
    for group in reversed(groups):
        config = {group: config}
    for place in ("", "rl."):
        with pytest.raises(UserError, match=re.escape(f"{told}")):
            check_key(ConfigDict({**config, "rl": config}), f"{place}{former}")
    with pytest.raises(UserError, match=re.escape(told)):
        build_config(Inner, {"width": 1, name: 0}, ".".join(["config", *groups]))


def test_a_run_of_an_earlier_version_has_the_same_settings():
    config = with_defaults("rl", {"model": "m", "tasks": "t"}).to_dict()
    present = json.loads(json.dumps(plain(build_config(RLRun, config))))
    former = json.loads(json.dumps(present))
    optimizer = {"b1": 0.9, "b2": 0.99, "eps": 1e-8, "max_skipped": 5}
    former["optimizer"] = optimizer | former["optimizer"]  # in the order of the former fields
    former["tools"] |= {"code_timeout_s": 9.0, "encoder": former["tools"]["wiki_search"]["encoder"]}
    former["graders"]["judge"]["chat"]["json_mode"] = False
    own = {"dice": {"path": "m:Dice", "options": {"json_mode": True, "b1": 0.9}}}
    former["tools"]["own"] = present["tools"]["own"] = own
    del former["tools"]["wiki_search"]["encoder"], former["tools"]["code"]["timeout_s"]
    present["optimizer"]["options"] = {"b2": 0.99}
    present["tools"]["code"]["timeout_s"] = 9.0
    assert with_present_keys(former) == with_present_keys(present) == present
    assert changes_of(with_present_keys({"rl": former}), {"rl": present}) == []


def test_a_config_file_may_give_a_list_of_words_as_one_text():
    config = complete_config(Hosts, {})
    assert config.to_dict() == {"names": "", "widths": (1,)}
    assert build_config(Hosts, config) == Hosts()
    assert build_config(Hosts, {"names": "a.org, b.org,"}).names == ("a.org", "b.org")
    assert build_config(Hosts, {"names": ""}).names == ()


@dataclasses.dataclass(frozen=True)
class Service:
    hosts: Hosts
    backup: Hosts | None = None
    limit: int | None = None


def test_a_complete_config_lacks_only_the_optional_groups_that_are_none():
    config = complete_config(Service, {"hosts": {"names": ("a.org",)}})
    assert config.to_dict() == {"hosts": {"names": ("a.org",), "widths": (1,)}, "limit": None}
    assert build_config(Service, config) == Service(Hosts(("a.org",)))
    assert "widths" in complete_config(Service, {"hosts": {}, "backup": {}}).backup


@pytest.mark.parametrize("seed", [2**31, 3_000_000_000, -1])
@pytest.mark.parametrize(
    ("path", "cls", "name"),
    [
        ("configs/serve/factbook.py", ServeConfig, "config.seed"),
        ("configs/evaluate/factbook.py", EvaluateConfig, "config.seed"),
        ("configs/rl/factbook.py", RLConfig, "config.seed"),
    ],
)
def test_a_seed_that_no_key_holds_is_refused_before_anything_is_loaded(path, cls, name, seed):
    names = {field.name for field in dataclasses.fields(cls)}
    values = {k: v for k, v in load_config(path).to_dict().items() if k in names}
    assert build_config(cls, {**values, "seed": 2**31 - 1}).seed == 2**31 - 1
    wanted = "a whole number from 0 to 2147483647"
    with pytest.raises(UserError, match=rf"^{name} is {seed}; give {wanted}$"):
        build_config(cls, {**values, "seed": seed})


def test_a_seed_that_no_key_holds_is_refused_for_the_check_without_tools():
    with pytest.raises(UserError, match=r"^seed is 2147483648; give a whole number from 0"):
        ClosedBookConfig(seed=2**31)


@dataclasses.dataclass(frozen=True)
class Window:
    steps: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    hosts: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ("mirror.example",)
    buckets: tuple[int, ...] = (32, 128)


def from_command_line(monkeypatch, *arguments: str) -> Window:
    config = complete_config(Window, {})
    values, argv = flags.FlagValues(), readable_overrides(["program", *arguments], config)
    monkeypatch.setattr("sys.argv", argv)  # where ml_collections looks for overrides
    config_flags.DEFINE_config_dict("config", config, flag_values=values)
    values(argv)
    return build_config(Window, values.config)


def test_a_command_line_gives_numbers_to_a_tuple_that_is_empty_by_default(monkeypatch):
    assert get_type_hints(Window)["steps"] == get_type_hints(FitConfig)["profile_steps"]
    assert from_command_line(monkeypatch) == Window()
    given = from_command_line(monkeypatch, "--config.steps=3,5", "--config.shares=0.5, 1")
    assert given == Window((3, 5), (0.5, 1.0))


@pytest.mark.parametrize(
    "text", ["a.b,c.d", "('a.b','c.d')", '["a.b", "c.d"]', " a.b , c.d ", "'a.b', c.d"]
)
@pytest.mark.parametrize("name", ["hosts", "blocked"])
def test_a_list_of_words_is_the_same_whatever_form_and_default_it_has(monkeypatch, name, text):
    assert getattr(from_command_line(monkeypatch, f"--config.{name}={text}"), name) == (
        "a.b",
        "c.d",
    )


@pytest.mark.parametrize("name", ["hosts", "blocked"])
@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("wiki_search,my_tools:Dice", ("wiki_search", "my_tools:Dice")),
        ("my data.jsonl, /a b/c.jsonl:x", ("my data.jsonl", "/a b/c.jsonl:x")),
        ("'a, b.jsonl', c", ("a, b.jsonl", "c")),
        ("('a, b.jsonl',)", ("a, b.jsonl",)),
        ("l'eau.txt,x-y;z", ("l'eau.txt", "x-y;z")),
        ("7,8", ("7", "8")),
        ("", ()),
    ],
)
def test_words_may_contain_colons_blanks_and_quotes(monkeypatch, name, text, items):
    assert getattr(from_command_line(monkeypatch, f"--config.{name}={text}"), name) == items
    assert getattr(from_command_line(monkeypatch, f"--config.{name}", text), name) == items


def test_repeated_overrides_of_a_list_are_concatenated(monkeypatch):
    arguments = ["--config.blocked=a:1,b", "--config.buckets=64", "--config.blocked=c"]
    given = from_command_line(monkeypatch, *arguments)
    assert (given.blocked, given.buckets) == (("a:1", "b", "c"), (64,))


PLAIN = st.from_regex(r"[^\s,'\"(\[]([^,]*[^\s,])?", fullmatch=True)


@given(words=st.lists(st.text()), plain=st.lists(PLAIN))
def test_a_list_of_words_is_read_as_it_was_written(words, plain):
    assert read_tuple(repr(tuple(words))) == read_tuple(repr(words)) == tuple(words)
    assert read_tuple(", ".join(map(repr, words))) == tuple(words)
    assert read_tuple(",".join(plain)) == read_tuple(" , ".join(plain)) == tuple(plain)


@given(st.text(alphabet="ab1 ,:'\"()[]\\\n") | st.text())
def test_every_text_is_a_list_or_is_refused(text):
    try:
        assert isinstance(read_tuple(text), tuple)
    except ValueError:
        assert text.strip().startswith("(")


def test_a_list_of_one(monkeypatch):
    given = from_command_line(
        monkeypatch, "--config.hosts=[::1]", "--config.blocked=a.b", "--config.buckets=64"
    )
    assert (given.hosts, given.blocked, given.buckets) == (("[::1]",), ("a.b",), (64,))
    assert build_config(Window, {"buckets": "64,256"}).buckets == (64, 256)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"buckets": (64, "x")}, r"config\.buckets is \(64, 'x'\); give whole numbers"),
        ({"buckets": (64, 0.5)}, r"config\.buckets is \(64, 0\.5\)"),
        ({"buckets": (64, True)}, r"config\.buckets is \(64, True\)"),
        ({"buckets": 64}, r"config\.buckets is 64; give whole numbers with commas"),
        ({"blocked": ("a", 3)}, r"config\.blocked is \('a', 3\)"),
        ({"shares": ("half",)}, r"config\.shares is \('half',\)"),
        ({"hosts": "(a,b)"}, r"config\.hosts is '\(a,b\)'"),
    ],
)
def test_a_list_with_something_of_another_kind_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        build_config(Window, values)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--config.steps=3,x", r"config\.steps is '3,x'; give whole numbers with commas, such as"),
        ("--config.steps=3-5", r"config\.steps is '3-5'; give whole numbers"),
        ("--config.shares=half", r"config\.shares is 'half'; give numbers with commas"),
    ],
)
def test_a_word_among_numbers_is_named(monkeypatch, argument, message):
    with pytest.raises(UserError, match=message):
        from_command_line(monkeypatch, argument)


@pytest.mark.parametrize(
    ("stage", "kind"),
    [("sft", SFTConfig), ("rft", RFTConfig), ("dpo", DPOConfig), ("rl", RLConfig)],
)
def test_a_dtype_that_is_not_known_is_refused_before_a_run_begins(stage, kind):
    config = load_config(f"configs/{stage}/factbook.py", {"dtype": "bf16"})
    config.unlock()
    for key in set(config) - {field.name for field in dataclasses.fields(kind)}:
        del config[key]  # what the command takes for itself
    known = "auto, float32, bfloat16"
    with pytest.raises(UserError, match=rf"config\.dtype is 'bf16'; give one of {known}$"):
        build_config(kind, config)


@pytest.mark.parametrize(
    ("name", "known"),
    [("dtype", "auto, float32, bfloat16"), ("cache_dtype", '"", float32, bfloat16, int8')],
)
def test_so_is_one_of_an_engine(name, known):
    with pytest.raises(UserError, match=rf"^{name} is 'fp8'; give one of {known}$"):
        EngineConfig(**{name: "fp8"})
