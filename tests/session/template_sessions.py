"""Sessions of models whose chat templates are real."""

from plain_parts import Answers

from fathom.core.records.sampling import Purpose, SamplingParams
from fathom.rollout.session.session import Session, SessionPlan
from synthetic.real_templates import model


def opened(name, *answers):
    """A session whose engine answers with these ids, and the engine: it takes characters for ids."""
    tokenizer, renderer, readers = model(name)
    engine = Answers(*("".join(map(chr, ids)) for ids in answers))
    plan = SessionPlan(
        name="t",
        sampling=SamplingParams(),
        max_new_tokens=200,
        max_context_tokens=4000,
        max_turns=20,
        stop_ids=tokenizer.special.stop_ids,
        seed=0,
        priority=0,
        purpose=Purpose.ROLLOUT,
    )
    return Session(plan, engine, renderer, readers), engine
