import pytest
from pydantic import ValidationError

from fathom.config.families import Speculation
from fathom.config.rollout import EngineConfig


def test_it_is_off_by_default() -> None:
    assert EngineConfig().speculation is Speculation.NONE
    assert EngineConfig.model_validate({"speculation": "ngram"}).draft_tokens == 4
    assert EngineConfig.model_validate({"speculation": "draft_model", "draft_model": "small"}).draft_model == "small"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_tokens": 4}, "remove draft_tokens"),
        ({"draft_model": "small"}, "remove draft_model"),
        ({"speculation": "none", "draft_model": "small", "draft_tokens": 2}, "remove draft_model, draft_tokens"),
        ({"speculation": "draft_model"}, "set both or neither"),
        ({"speculation": "ngram", "draft_model": "small"}, "set both or neither"),
        ({"speculation": "ngram", "draft_tokens": 0}, "draft_tokens"),
        ({"speculation": "ngram", "kind": "scripted"}, "not 'scripted'"),
        ({"speculation": "ngram", "kind": "vllm"}, "not 'vllm'"),
    ],
)
def test_what_could_not_be_honoured_is_an_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EngineConfig.model_validate(options)
