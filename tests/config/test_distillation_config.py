import pytest
from pydantic import ValidationError

from fathom.config.distillation import DistillationConfig
from fathom.config.families import DistillationForm, EngineKind

TEACHER = {"path": "teacher"}


def of(**options: object) -> DistillationConfig:
    return DistillationConfig.model_validate({"teachers": {"concise": TEACHER}, **options})


def test_one_teacher_of_all_tasks_is_enough() -> None:
    config = of()
    assert config.form is DistillationForm.SAMPLED_TOKEN
    assert (config.coefficient, config.task_reward) == (1.0, False)
    assert (config.teachers["concise"].tasks, config.teachers["concise"].kind) == ("*", EngineKind.EMBEDDED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teachers": {}}, "at least 1"),
        ({"teachers": {"a": {}}}, "exactly one of path and tiny"),
        ({"teachers": {"a": {**TEACHER, "tiny": "arithmetic"}}}, "exactly one of path and tiny"),
        ({"teachers": {"a": {**TEACHER, "kind": "vllm", "device": "cuda"}}}, "'cpu' only"),
        ({"teachers": {"../x": TEACHER}}, "pattern"),
        ({"coefficient": 0}, "coefficient"),
        ({"top_k": 8}, "top_k changes nothing with form = 'sampled_token'"),
        ({"form": "full_vocabulary", "set": "union", "weight": "none"}, "set, weight changes nothing"),
        ({"form": "top_k", "set": "both"}, "only_student"),
        ({"temperature": 1.0}, "temperature"),
    ],
)
def test_what_could_not_be_honoured_is_an_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        of(**options)
