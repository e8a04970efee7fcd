"""Runs that train an adapter: what engines get, what records say, what is kept, and what does not start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import digests, require_sound, small_config

from fathom import Run
from fathom.config.lora import LoraConfig
from fathom.core.adapter import AdapterIdentity
from fathom.core.errors import ConfigError
from fathom.ledger.events import Published
from fathom.ledger.reader import LedgerReader
from fathom.model.language_model import LanguageModel
from fathom.model.tiny import make_tiny
from fathom.run.lora_checks import adaptable_names
from fathom.run.weights.rebuild import rebuild, stored_versions
from fathom.sync.digest import digest
from fathom.text.characters import save_character_tokenizer

torch.set_num_threads(1)
LORA = ("lora.rank=4", "lora.alpha=8", "trainer.optimizer.lr=1e-2")


def played(config) -> Path:
    outcome = Run(config).start()
    assert outcome.exit_code == 0
    require_sound(outcome.folder)
    return outcome.folder


def published(run: Path) -> list[Published]:
    with LedgerReader(run / "ledger") as reader:
        return [entry.event for entry in reader.events(Published)]


def base_digest(run: Path) -> str:
    return digest(LanguageModel.load(run / "model", torch.float32, "cpu").weights())


def test_engines_get_the_adapter_alone_and_compute_its_function_to_the_bit(tmp_path: Path) -> None:
    run = played(small_config(tmp_path, *LORA, "model.aligned=true", "staleness.max_staleness=0"))
    events = published(run)
    assert len(events) == 7
    whole = sum(file.stat().st_size for file in (run / "model").glob("*.safetensors"))
    assert all(event.size_bytes < whole / 5 for event in events)
    identities = {event.adapter for event in events}
    (identity,) = identities
    assert isinstance(identity, AdapterIdentity)
    assert identity.base == base_digest(run)
    assert (identity.form.name, identity.form.rank, identity.form.alpha) == ("small", 4, 8.0)
    gaps = [event.gap for event in events if event.gap is not None]
    assert gaps
    assert all(gap.abs_log_ratio_max == 0.0 for gap in gaps)
    assert len({event.version.digest for event in events}) == 7
    with LedgerReader(run / "ledger") as reader:
        labels = {reader.trajectory(entry.id).trajectory.header.adapter for entry in reader.trajectories()}
    assert labels == {identity.label}


@pytest.mark.slow
def test_a_version_is_rebuilt_as_a_folder_that_others_load(tmp_path: Path) -> None:
    run = played(small_config(tmp_path, *LORA, "trainer.steps=2"))
    names = [version.name for version in stored_versions(run)]
    assert names[-1] == "v2@1"
    version = rebuild(run, 2, None, tmp_path / "out")
    assert version.digest == published(run)[-1].version.digest
    assert (tmp_path / "out" / "adapter_config.json").is_file()
    config = small_config(tmp_path, *LORA, f"lora.start_from={tmp_path / 'out'}", "trainer.steps=1")
    again = played(config)
    assert published(again)[0].version.digest == version.digest


@pytest.mark.slow
def test_resuming_goes_on_to_the_bit(tmp_path: Path) -> None:
    options = (*LORA, "deterministic=true", "staleness.max_staleness=0")
    straight = played(small_config(tmp_path / "a", *options))
    part = played(small_config(tmp_path / "b", *options, "trainer.steps=4"))
    edited = (part / "config.json").read_text().replace('"steps": 4', '"steps": 6').replace('"steps":4', '"steps":6')
    (part / "config.json").write_text(edited)
    assert Run.resume(part).start().exit_code == 0
    assert digests(part) == digests(straight)
    assert not list((part / "checkpoints").rglob("model.safetensors"))


def test_merged_versions_are_whole_models_and_say_what_was_lost(tmp_path: Path) -> None:
    options = (*LORA, "lora.publish=merged", "trainer.dtype=bfloat16", "trainer.steps=2", "sync.gap_rows=2")
    run = played(small_config(tmp_path, *options))
    events = published(run)
    whole = sum(file.stat().st_size for file in (run / "model").glob("*.safetensors")) / 2
    assert all(event.adapter is None and event.size_bytes > whole / 2 for event in events)
    first, *later = [event.merging for event in events]
    assert first is not None
    assert (first.max_abs, first.updated) == (0.0, 0)
    assert all(merging is not None and merging.max_abs > 0 and merging.updated > 0 for merging in later)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("lora.rank=0",), "lora.rank"),
        (("lora.dropout=0.1",), "unknown option lora.dropout"),
        (('lora.target_modules=["q_proj","q_proj"]',), "twice"),
        (("lora.rank=4", "lora.publish=merged", "model.aligned=true"), "lora.publish = 'adapter'"),
        (("lora.rank=4", "lora.start_from=nowhere"), "no folder of a LoRA adapter"),
        (('lora.target_modules=["nothing"]',), "names nothing"),
        (('lora.target_modules=["experts.down_proj"]',), "names experts.down_proj"),
        (('lora.target_modules=["gate_proj"]', "model.tiny=moe"), "names gate_proj"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(tmp_path: Path, overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        Run(small_config(tmp_path, *overrides))
    assert says in str(error.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("tiny", ["arithmetic", "moe"])
def test_names_are_known_without_loading_a_model(tmp_path: Path, tiny: str) -> None:
    save_character_tokenizer(tmp_path)
    make_tiny(tiny, 0, tmp_path)
    form = LoraConfig().form("x")
    found = LanguageModel.load(tmp_path, torch.float32, "cpu").adapt(form, 0).targets
    for folder in (tmp_path, None):
        names = adaptable_names(folder, tiny == "moe")
        assert {name for name in names if "." not in name or name.startswith("experts.")} == set(found)


def test_an_engine_without_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="capability `adapters`"):
        Run(small_config(tmp_path, *LORA, "engine.kind=scripted")).start()
