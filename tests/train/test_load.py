import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.config import ModelConfig, TrainConfig
from train.errors import ConfigError
from train.load import check_names, parse_command_line
from zoo.errors import UnknownNameError


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("name: mine\nmodel: {backbone: vit}\ndata: {root: photos}\noptimizer: {lr: 1e-4}\n")
    return str(path)


def test_bare_command_reads_the_digits_recipe():
    invocation = parse_command_line([])
    assert (invocation.recipe, invocation.dry_run, invocation.config.name) == ("digits", False, "digits")
    assert invocation.config.model.attention == "parameter"


def test_line_goes_before_recipe_and_recipe_before_defaults(recipe):
    config = parse_command_line([recipe]).config
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-4, 0.05)
    config = parse_command_line(["--optimizer.lr", "1e-2", recipe]).config
    assert config.optimizer.lr == 0.01


def test_flag_forms_are_equal(recipe):
    spaced = parse_command_line([recipe, "--model.timm_kwargs.depth", "6", "--loop.mixed_precision", "no"]).config
    equals = parse_command_line([recipe, "--model.timm-kwargs.depth=6", "--loop.mixed-precision=no"]).config
    mapping = parse_command_line([recipe, "--model.timm_kwargs", "{depth: 6}"]).config
    assert spaced == equals == mapping
    assert spaced.model.timm_kwargs == {"depth": 6}


def test_mapping_on_the_line_is_merged_not_swapped():
    config = parse_command_line(["--model.timm_kwargs", "{depth: 6}"]).config
    assert config.model.timm_kwargs["depth"] == 6
    assert config.model.timm_kwargs["img_size"] == 8


@pytest.mark.parametrize(
    ("text", "plugins"), [("my_attention.py", ("my_attention.py",)), ("[/x/a.py, b.c]", ("/x/a.py", "b.c")), ("[]", ())]
)
def test_plugins_are_one_path_or_a_list(recipe, text, plugins):
    assert parse_command_line([recipe, "--model.plugins", text]).config.model.plugins == plugins


@pytest.mark.parametrize(
    ("text", "patterns"),
    [
        ("head", ("head",)),
        ("*", ("*",)),
        ("*.attn.*", ("*.attn.*",)),
        ("blocks.0-5", ("blocks.0-5",)),
        ("all but head, norm", ("all but head, norm",)),
        ("[patch_embed, blocks.2-, '*.bias']", ("patch_embed", "blocks.2-", "*.bias")),
        ("[]", ()),
    ],
)
def test_freeze_is_one_pattern_or_a_list(recipe, text, patterns):
    assert parse_command_line([recipe, "--freeze", text]).config.freeze == patterns
    assert parse_command_line([recipe, f"--freeze={text}"]).config.freeze == patterns


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("blocks.*.attn.qkv.to_q", (("blocks.*.attn.qkv.to_q",),)),
        ("*.to_q = *.to_k", (("*.to_q = *.to_k",),)),
        ("a.weight = b.weight", (("a.weight = b.weight",),)),
        ("[a = b, c = d]", (("a = b",), ("c = d",))),
        ("[[a, b], [c, d, e]]", (("a", "b"), ("c", "d", "e"))),
        ("[[a, b], '*.to_q']", (("a", "b"), ("*.to_q",))),
        ("[]", ()),
    ],
)
def test_tie_is_one_text_or_a_list_of_texts_and_lists(recipe, text, groups):
    assert parse_command_line([recipe, "--tie", text]).config.tie == groups
    config = parse_command_line([recipe, f"--tie={text}"]).config
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config
    assert config.tie == groups


def test_freeze_and_tie_read_the_same_from_a_recipe(recipe):
    text = "freeze: [blocks.0-5, '*.bias']\ntie:\n- a.weight = b.weight\n- [c, d]\n"
    path = Path(recipe)
    path.write_text(path.read_text() + text)
    config = parse_command_line([recipe]).config
    assert config.freeze == ("blocks.0-5", "*.bias")
    assert config.tie == (("a.weight = b.weight",), ("c", "d"))


def test_bare_glob_in_a_list_says_that_it_wants_quotes(recipe):
    with pytest.raises(
        ConfigError, match=r"--freeze: in a list, a text that starts with \* wants quotes: \['\*\.bias'"
    ):
        parse_command_line([recipe, "--freeze", "[*.bias, head]"])


def test_dry_run_resume_and_text_with_odd_characters(recipe):
    invocation = parse_command_line(["--dry-run", recipe, "--resume", "auto", "--data.root", "my photos #2"])
    assert invocation.dry_run
    assert invocation.config.resume == "auto"
    assert invocation.config.data.root == "my photos #2"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("digts", "unknown recipe 'digts', did you mean 'digits'"),
        ("--optimizer.lrr 1", "unknown flag --optimizer.lrr, did you mean 'optimizer.lr'"),
        ("--lr 1", "unknown flag --lr, did you mean 'optimizer.lr'"),
        ("--optimizr.lr 1", "unknown flag --optimizr.lr, did you mean 'optimizer'"),
        ("--data.zzz 1", "unknown flag --data.zzz; data has root, val_fraction"),
        ("--name.x 1", "name is a field, not a section"),
        ("--model.timm_kwargs. 1", "model.timm_kwargs is a field"),
        ("--model.timm_kwargs.depth.x 1", "model.timm_kwargs.depth is 4 in the recipe, not a section"),
        ("--optimizer.lr x", "optimizer.lr: got 'x', wanted a number"),
        ("--optimizer.lr -1", "optimizer.lr: got -1, wanted greater than 0"),
        ("--optimizer.lr .nan", "optimizer.lr: got '.nan', wanted a number"),
        ("--optimizer.lr", "--optimizer.lr wants a value"),
        ("--optimizer.lr --dry-run", "--optimizer.lr wants a value"),
        ("--optimizer.lr=", "--optimizer.lr wants a value"),
        ("--optimizer.lr=1 --optimizer.lr=1", "--optimizer.lr is given twice"),
        ("--dry-run --dry-run", "--dry-run is given twice"),
        ("--dry-run=1", "--dry-run takes no value"),
        ("a b", "wanted one recipe, got 'a' and 'b'"),
        ("-x", "unknown flag '-x'"),
        ("--", "unknown flag '--'"),
        ("--name 12", "name: got 12, wanted text"),
        ("--model vit", "model: got 'vit', wanted a section"),
        ("--seed 1.5", "seed: got 1.5, wanted a whole number"),
        ("--loop.compile yes", "loop.compile: got 'yes', wanted true or false"),
        ("--loop.mixed_precision bf61", "loop.mixed_precision: got 'bf61', wanted 'no', 'bf16' or 'fp16'"),
        ("--freeze 3", r"freeze: got 3, wanted a list such as \[a, b\]"),
        ("--freeze [3]", "freeze.0: got 3, wanted text"),
        ("--tie 3", r"tie: got 3, wanted a list such as \[a, b\]"),
        ("--tie [3]", r"tie.0: got 3, wanted a list"),
        ("--tie [[3]]", "tie.0.0: got 3, wanted text"),
        ("--tie null", "tie: got null, wanted a list"),
        ("--data.mean [1,2]", "data.mean: item 3 of the list is missing"),
        ("--data.mean [1,2,3,4]", "data.mean: got .* at most 3 items"),
        ("--data.root ''", "data.root: got ''"),
        ("--model.timm_kwargs 3", "model.timm_kwargs: got 3, wanted a mapping"),
        ("--schedule.warmup_epochs 99", "schedule: warmup_epochs 99 is more than epochs 60"),
        ("--publish.alias latest", "publish.alias: 'latest' is reserved by MLflow"),
    ],
)
def test_mistake_on_the_line_is_one_clear_line(line, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_command_line(line.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: {lrr: 1}", "unknown key 'optimizer.lrr', did you mean 'optimizer.lr'"),
        ("optimiser: {lr: 1}", "unknown key 'optimiser', did you mean 'optimizer'"),
        ("lr: 1", "unknown key 'lr', did you mean 'optimizer.lr'"),
        ("optimizer:", "optimizer: got null, wanted a section"),
    ],
)
def test_mistake_in_the_recipe_names_the_nearest_key(recipe, text, message):
    path = Path(recipe)
    path.write_text(path.read_text().replace("optimizer: {lr: 1e-4}", text))
    with pytest.raises(ConfigError, match=message):
        parse_command_line([recipe])


def test_missing_fields_and_many_mistakes_stay_one_line(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="name is missing; set it in the recipe or by --name; model is missing"):
        parse_command_line([str(path)])
    with pytest.raises(ConfigError, match="and 1 more"):
        parse_command_line(["--seed", "x", "--name", "1", "--optimizer.lr", "0", "--loop.compile", "1"])


def test_names_are_checked_before_any_data_is_read():
    check_names(ModelConfig(backbone="vit_tiny_patch16_224", attention="parameter", init="torch"))
    with pytest.raises(UnknownNameError, match="backbone 'vit_tiny_patch16_24', did you mean 'vit_tiny_patch16_224'"):
        check_names(ModelConfig(backbone="vit_tiny_patch16_24"))
    with pytest.raises(UnknownNameError, match="attention 'paramter', did you mean 'parameter'"):
        check_names(ModelConfig(backbone="vit_tiny_patch16_224", attention="paramter"))
    with pytest.raises(UnknownNameError, match="init 'torhc', did you mean 'torch'"):
        check_names(ModelConfig(backbone="vit_tiny_patch16_224", init="torhc"))


def test_list_recipes_prints_names(capsys):
    with pytest.raises(SystemExit) as left:
        parse_command_line(["--list-recipes"])
    assert not left.value.code
    assert "digits\n" in capsys.readouterr().out


@pytest.mark.slow
def test_command_line_outside_ascii_survives_lang_c():
    code = "import sys; from train.load import *; print(ascii(parse_command_line(sys.argv[1:]).config.data.root))"
    environment = {**os.environ, "LANG": "C", "LC_ALL": "C"}
    command = [sys.executable, "-c", code, "--data.root", "日本 語"]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert out.strip() == ascii("日本 語")


def test_mlflows_variable_is_the_default_store_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert parse_command_line([]).config.tracking.uri == "http://tracking:5000"
    assert parse_command_line(["--tracking.uri", "sqlite:///own.db"]).config.tracking.uri == "sqlite:///own.db"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert parse_command_line([]).config.tracking.uri == "sqlite:///mlflow.db"
