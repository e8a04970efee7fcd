"""Named objectives: `[objective] kind`. A new one is a file in `kinds` and a line here."""

from __future__ import annotations

from fathom.config.families import ObjectiveKind
from fathom.config.objectives.declaration import Declaration
from fathom.config.objectives.kinds.cispo import CISPO
from fathom.config.objectives.kinds.dapo import DAPO
from fathom.config.objectives.kinds.dppo import DPPO
from fathom.config.objectives.kinds.dr_grpo import DR_GRPO
from fathom.config.objectives.kinds.grpo import GRPO
from fathom.config.objectives.kinds.gspo import GSPO
from fathom.config.objectives.kinds.ipo import IPO
from fathom.config.objectives.kinds.ppo import PPO
from fathom.config.objectives.kinds.reinforce_pp import REINFORCE_PP
from fathom.config.objectives.kinds.reinforce_pp_baseline import REINFORCE_PP_BASELINE
from fathom.config.objectives.kinds.rloo import RLOO

OBJECTIVES: dict[ObjectiveKind, Declaration] = {
    ObjectiveKind.GRPO: GRPO,
    ObjectiveKind.DR_GRPO: DR_GRPO,
    ObjectiveKind.DAPO: DAPO,
    ObjectiveKind.GSPO: GSPO,
    ObjectiveKind.CISPO: CISPO,
    ObjectiveKind.REINFORCE_PP: REINFORCE_PP,
    ObjectiveKind.REINFORCE_PP_BASELINE: REINFORCE_PP_BASELINE,
    ObjectiveKind.RLOO: RLOO,
    ObjectiveKind.PPO: PPO,
    ObjectiveKind.DPPO: DPPO,
    ObjectiveKind.IPO: IPO,
}
