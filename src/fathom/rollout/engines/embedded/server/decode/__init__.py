"""From running sequences to their next tokens: slots, what a step computes, the forward, sampling, endings."""
